"""Which fields of a group do not have their usual value: a field that cannot have an effect must have it."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any


def changed(options: Any, *beside: str) -> dict[str, Any]:
    """The fields of a dataclass, except those named, that do not have their default; with their values."""
    return {
        each.name: value
        for each in fields(options)
        if (value := getattr(options, each.name)) != _default(each) and each.name not in beside
    }


def _default(each: Any) -> Any:
    return each.default if each.default_factory is MISSING else each.default_factory()
