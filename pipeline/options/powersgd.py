"""PowerSGD between replicas, as an expression such as powersgd(4): its numbers, with their checks."""

from __future__ import annotations

import ast
import inspect
import math
from dataclasses import dataclass
from typing import Any

from thinwire.pipeline.errors import OptionsError

NAME = "powersgd"
MOST_RANK = 512
"""As the codec lowrank."""


@dataclass(frozen=True)
class PowerSGD:
    """`powersgd(rank)`: a matrix of gradients travels as two thin ones."""

    rank: int
    """Columns of the thin matrices, 1 to 512."""
    rate: float = 2.0
    """A parameter travels whole, unless the thin matrices have fewer elements by more than this factor."""
    start: int = 0
    """Optimizer steps before it, in which everything travels whole."""

    def __post_init__(self) -> None:
        mistakes = []
        if type(self.rank) is not int or not 1 <= self.rank <= MOST_RANK:
            mistakes.append(f"{NAME}'s rank must be an integer from 1 to {MOST_RANK}, got {self.rank!r}")
        if type(self.rate) not in (int, float) or not 0 < self.rate < math.inf:
            mistakes.append(f"{NAME}'s rate must be a finite number above 0, got {self.rate!r}")
        if type(self.start) is not int or self.start < 0:
            mistakes.append(f"{NAME}'s start must be a number of steps, 0 or more, got {self.start!r}")
        if mistakes:
            raise OptionsError(mistakes)

    def __str__(self) -> str:
        rate = "" if self.rate == 2.0 else f", rate={self.rate}"
        start = "" if self.start == 0 else f", start={self.start}"
        return f"{NAME}({self.rank}{rate}{start})"

    def rank_of(self, shape: tuple[int, ...]) -> int:
        """The columns of the thin matrices of a parameter; 0 if it travels whole, as every vector does.

        Its first dimension counts the rows of its matrix, all others the columns.
        """
        elements = math.prod(shape)
        if len(shape) < 2 or not elements:
            return 0
        columns = elements // shape[0]
        rank = min(shape[0], columns, self.rank)
        return rank if (shape[0] + columns) * rank * self.rate < elements else 0


def read_powersgd(expression: str) -> PowerSGD | None:
    """The PowerSGD of an expression; None if it is something else. OptionsError if its arguments are wrong."""
    try:
        node = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    function = node.func if isinstance(node, ast.Call) else node
    usage = f"write {NAME}(4), or {NAME}(4, rate=2.0, start=1000)"
    if not isinstance(function, ast.Name) or function.id != NAME:
        if any(isinstance(part, ast.Name) and part.id.lower() == NAME for part in ast.walk(node)):
            raise OptionsError(
                f"{NAME} must stand alone, in small letters: it keeps errors by itself; {usage}; got {expression}"
            )
        return None
    if not isinstance(node, ast.Call):
        raise OptionsError(f"{NAME} must have a rank; {usage}")
    try:
        given = [_number(value) for value in node.args]
        named = {keyword.arg: _number(keyword.value) for keyword in node.keywords if keyword.arg}
        if len(named) < len(node.keywords):
            raise TypeError("an argument stands twice, or has no name")
        bound = inspect.signature(PowerSGD).bind(*given, **named)
    except TypeError as error:
        raise OptionsError(f"{expression!r}: {error}; {usage}") from None
    return PowerSGD(*bound.args, **bound.kwargs)


def _number(node: ast.expr) -> Any:
    """The value of a literal. TypeError if it is none; PowerSGD checks which values are numbers."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise TypeError("all arguments must be numbers") from None
