"""The fields of a recipe by dotted name, such as `training.steps`, and those that change nothing in a run's numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

WITHOUT_EFFECT = (
    "name",
    "description",
    "output",
    "save_every",
    "wait_for_space",
    "checkpoint.",
    "wire.",
    "debug.",
    "compression.store_folder",
)
"""Fields that change nothing in a run's numbers. A name with a dot at the end is a whole group."""


def is_among(name: str, fields: Collection[str]) -> bool:
    """Whether a field is one of these, or in one of these groups."""
    return any(name.startswith(field) if field.endswith(".") else name == field for field in fields)


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The fields of nested groups by dotted name. Values deeper than one group, such as `boundaries`, stay whole."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = value if isinstance(value, Mapping) and prefix == "" else None
        found |= {f"{prefix}{name}": value} if inner is None else dotted(inner, f"{name}.")
    return found
