"""A command's own options, beside those of a recipe; a mistake in them is told in one sentence."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from thinwire.pipeline.errors import OptionsError


class Parser(argparse.ArgumentParser):
    """A parser that raises OptionsError where argparse would print its usage and exit."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("type", int, _whole)
        self.register("type", float, _number)

    def error(self, message: str) -> NoReturn:
        """Tell a mistake."""
        raise OptionsError([f"{message}; see {self.prog} --help"])


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
