"""JSON as the standard has it, for all files and answers: with null in place of NaN and infinity, which it lacks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def dumps(value: Any, *, indent: int | None = None) -> str:
    """The value as JSON."""
    return json.dumps(without_nan(value), indent=indent, allow_nan=False)


def without_nan(value: Any) -> Any:
    """The value with null for NaN and infinity."""
    if isinstance(value, Mapping):
        return {name: without_nan(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def with_nan(value: float | None) -> float:
    """The number, or NaN for the null that `without_nan` wrote."""
    return math.nan if value is None else value
