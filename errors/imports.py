"""What a user wrote and names by the path it is imported by: found, or answered by one sentence."""

from __future__ import annotations

import importlib
import sys
from difflib import get_close_matches
from pathlib import Path

from thinwire.errors import ThinwireError


def is_path(name: str) -> bool:
    """Whether a name is written as `module:name`, and is no file."""
    module, _, inner = name.partition(":")
    return bool(module and inner) and not Path(name).exists()


def find(path: str, error: type[ThinwireError]) -> object:
    """What `module:name` leads to; `error` is raised where it leads to nothing."""
    module, colon, name = path.partition(":")
    error.require((bool(module and colon and name), f'what is your own is written as "module:name", got {path!r}'))
    return find_in(module, name, path, error)


def find_in(module_name: str, name: str, written: str, error: type[ThinwireError]) -> object:
    """What a module holds under a name; it is imported from the current directory too, as `python -m` does.

    `written` is the text in which the user named it, and `error` is raised where there is no such module or name.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as raised:
        raise error(
            f"module {module_name} of {written!r} cannot be imported, from {here} either: "
            f"{type(raised).__name__}: {raised}"
        ) from raised
    near = get_close_matches(name, [known for known in vars(module) if not known.startswith("__")])
    meant = f" (did you mean {' or '.join(near)}?)" if near else ""
    error.require((hasattr(module, name), f"module {module_name} has no {name!r}{meant}"))
    return getattr(module, name)
