"""The Hugging Face hub, and what its libraries read from it or from a folder.

Python code beside a model or a tokenizer never runs, whatever answers a question of the library.

The hub's library tries a host that it cannot reach again and again, for up to a minute, each time that it looks for a
name. So one short request goes ahead of all others. If it fails, the libraries look in their caches alone.
"""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from thinwire.errors.calls import first_line
from thinwire.models.errors import ModelError

PART_SECONDS = 5.0
"""Time-out in seconds of a part of the request, such as the connection: a lost packet comes again after 1 and 3 s."""
SECONDS = 10.0
"""Time-out in seconds of the whole request. The resolver of names has no limit of its own."""
NO_CODE = {"trust_remote_code": False}
"""For every call of an auto class of transformers; without it, the library asks on standard input."""
_FULL, _NO_ROOM = (errno.ENOSPC, errno.EDQUOT), "Not enough disk space"
"""Errors of a full disk, and how `datasets` says that it expects one."""
_BROKEN = 500
"""The least status of an answer that says that the hub itself has failed."""


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Inside, libraries do not use the network if the name is a file or folder, or if the hub cannot be reached."""
    if not is_local(name) and unreachable() is None:
        yield
        return
    from huggingface_hub import constants

    # both packages read their value at each request; `datasets` has one if it is imported
    homes: list[Any] = [constants, *filter(None, [sys.modules.get("datasets.config")])]
    before = [home.HF_HUB_OFFLINE for home in homes]
    for home in homes:
        home.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for home, value in zip(homes, before, strict=True):
            home.HF_HUB_OFFLINE = value


def load(auto: Any, name: str, **options: Any) -> Any:
    """What an auto class of transformers makes of a folder or a name on the hub. Code that lies there does not run.

    Raises:
        ModelError: it cannot be made without that code. Other errors are those of the library.
    """
    try:
        with reading(name):
            return auto.from_pretrained(name, **options, **NO_CODE)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ModelError(
            f"{name} must need no Python code of its own, because Thinwire never runs such code; take one that the "
            f"installed transformers knows by itself"
        ) from error


def file_of(name: str, file: str) -> Path | None:
    """A file of a folder, or of a name on the hub, which is fetched if need be; None if there is none."""
    from transformers.utils.hub import cached_file

    with reading(name):
        found = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def reason(name: str, error: BaseException, kept: str | Path = "") -> str:
    """Why a name cannot be read: a full cache, the hub that cannot be reached, or else the words of the library.

    `kept` is the folder where the library keeps what it has read, if that is not the hub's cache.
    """
    said = " ".join(str(error).split()) or type(error).__name__
    if getattr(error, "errno", None) in _FULL or said.startswith(_NO_ROOM):
        from huggingface_hub import constants

        return (
            f"no room is left in {kept or constants.HF_HUB_CACHE}, where a library keeps what it reads; free some "
            "space there, or set HF_HOME to a folder on a larger disk"
        )
    trouble = None if is_local(name) else unreachable()
    if trouble is None:
        return said
    # libraries raise other errors for what they read in the cache
    missing = "it is no folder here, the cache of the hub does not hold all of it"
    return f"{missing if isinstance(error, OSError) else said}, and {trouble}"


def is_local(name: str) -> bool:
    """Whether a name is that of a file or folder of this machine."""
    return Path(name).exists()


@cache
def unreachable() -> str | None:
    """Why the hub cannot be reached, in words; None if it can. It is asked once in a process."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    answers: list[str | None] = []
    asking = threading.Thread(target=lambda: answers.append(_ask(constants.ENDPOINT)), daemon=True)
    asking.start()
    asking.join(SECONDS)
    trouble = answers[0] if answers else f"no answer within {SECONDS:g} s"
    return None if trouble is None else f"{constants.ENDPOINT} cannot be reached ({trouble})"


def _ask(address: str) -> str | None:
    """Send the request; what went wrong, or None. Any answer will do that is not a failure of the hub itself."""
    from huggingface_hub import get_session

    try:
        status = get_session().head(address, timeout=PART_SECONDS, follow_redirects=False).status_code
    except Exception as error:  # the client's own errors have no root among Python's
        return first_line(error)
    return f"it answers {status}" if status >= _BROKEN else None
