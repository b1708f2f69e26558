"""Imports that wait: the user's own objects, by import path, and what a package exports on demand."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.errors import ThinwireError
from thinwire.errors.calls import first_line, last_line
from thinwire.errors.names import did_you_mean


def is_path(name: str) -> bool:
    """Whether a name is written as `module:name`, and is not a file."""
    module, _, inner = name.partition(":")
    return bool(module and inner) and not Path(name).exists()


def find(path: str, error: type[ThinwireError], field: str) -> object:
    """The object at `module:name`, which a field of the recipe names; raises `error` if there is none."""
    module, colon, name = path.partition(":")
    error.require((bool(module and colon and name), f'{field} must be written as "module:name", got {path!r}'))
    try:
        return find_in(module, name, path, error)
    except error as raised:
        raise error([f"{field}: {mistake}" for mistake in raised.mistakes]) from raised


def find_in(module_name: str, name: str, written: str, error: type[ThinwireError]) -> object:
    """The object of a name in a module, which is imported from the current directory too, like `python -m` does.

    `written` is what the user wrote. Raises `error` if there is no such module or name.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ThinwireError as raised:  # the user's module was found, and describes something that cannot be right
        raise error([f"module {module_name} of {written!r}: {mistake}" for mistake in raised.mistakes]) from raised
    except (Exception, SystemExit) as raised:
        missing = isinstance(raised, ModuleNotFoundError) and f"{module_name}.".startswith(f"{raised.name}.")
        elsewhere = f", from {here} either" if missing else ""
        raise error(
            f"module {module_name} of {written!r} cannot be imported{elsewhere}: "
            f"{first_line(raised)}{'' if missing else _place(raised)}"
        ) from raised
    if not hasattr(module, name):
        known = [known for known in vars(module) if not known.startswith("__")]
        raise error(f"module {module_name} has no {name!r}{did_you_mean(name, known)}")
    return getattr(module, name)


def _place(raised: BaseException) -> str:
    """The last line of the imported file that was run; empty where none was, as with a syntax error."""
    ours = (__file__, importlib.__file__)
    frames = [frame.filename for frame in traceback.extract_tb(raised.__traceback__)]
    imported = [name for name in frames if name not in ours and not name.startswith("<frozen")]
    return last_line(imported[0], raised) if imported else ""


def on_demand(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose names are imported when they are first asked for.

    Args:
        package: the package's `__name__`.
        homes: by module, the names that it brings.
    """
    home = {name: module for module, names in homes.items() for name in names}

    def find_name(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(home[name]), name)
        setattr(sys.modules[package], name, found)  # so that nobody asks twice
        return found

    return find_name
