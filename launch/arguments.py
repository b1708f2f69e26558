"""A command's own options, beside those of a recipe; a mistake in them is told in one sentence."""

from __future__ import annotations

import argparse
from typing import NoReturn

from thinwire.pipeline.errors import OptionsError


class Parser(argparse.ArgumentParser):
    """A parser that raises OptionsError where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        """Tell a mistake."""
        raise OptionsError([f"{message}; see {self.prog} --help"])
