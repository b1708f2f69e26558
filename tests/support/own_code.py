"""Modules as a user writes them."""

import sys
from contextlib import contextmanager
from textwrap import dedent
from types import ModuleType


def add_module(monkeypatch, name, text):
    """A module of this text that can be imported until the test ends."""
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(dedent(text), f"{name}.py", "exec"), vars(module))
    return module


@contextmanager
def own_module(name, source, folder, monkeypatch):
    """Write a module into a folder, make this the current directory, and forget the module at the end."""
    (folder / f"{name}.py").write_text(source)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    yield
    sys.modules.pop(name, None)
