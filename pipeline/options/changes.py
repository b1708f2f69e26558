"""What checks ask of the fields of a group: which lie outside of their bounds, and which have an unusual value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any


def changed(options: Any, *beside: str) -> dict[str, Any]:
    """The fields of a dataclass, except those named, that do not have their default; with their values.

    A field that cannot have an effect must have its default.
    """
    defaults = {
        each.name: each.default if each.default_factory is MISSING else each.default_factory()
        for each in fields(options)
        if each.name not in beside
    }
    return {name: value for name, usual in defaults.items() if (value := getattr(options, name)) != usual}


def beyond(group: str, options: Any, bounds: Mapping[str, tuple[int, float]]) -> list[str]:
    """A sentence for each field of a group below the first of its bounds, or above the second; null is neither."""
    values = {name: getattr(options, name) for name in bounds}
    return [
        f"{group}.{name} must be at {f'least {least}' if values[name] < least else f'most {most}'}, got {values[name]}"
        for name, (least, most) in bounds.items()
        if values[name] is not None and not least <= values[name] <= most
    ]
