"""Modules as a user writes them."""

import sys
from textwrap import dedent
from types import ModuleType


def add_module(monkeypatch, name, text):
    """A module of this text that can be imported until the test ends."""
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(dedent(text), f"{name}.py", "exec"), vars(module))
    return module
