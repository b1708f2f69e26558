"""Kernels are tried out beside the eager code, once in a process, before they are used."""

import fcntl
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from thinwire.errors import ThinwireWarning
from thinwire.errors.calls import first_line


@cache
def work(compiler: str, kernels: str, agree: Callable[..., bool], *case: Any) -> bool:
    """Whether `agree(*case)` finds that kernels give what the eager code gives; a warning says why not.

    Without the compiler there are none, and no warning.
    """
    if not find_spec(compiler):
        return False
    try:
        with _one_first(kernels) if compiler == "numba" else nullcontext():
            reason = "" if agree(*case) else "they gave other results than the eager code"
    except Exception as error:  # a missing library, a driver, a compiler, a processor or a cache folder
        reason = first_line(error)
    if reason:
        warnings.warn(
            f"the kernels for {kernels} do not work here, so codecs are slower: {reason}", ThinwireWarning, stacklevel=2
        )
    return not reason


@contextmanager
def _one_first(kernels: str) -> Iterator[None]:
    """Of several processes that start together, the first compiles; the others wait, and load what it kept."""
    from thinwire.compress.codecs.fused.cpu_kernels import encode

    with ExitStack() as stack:
        try:
            file = stack.enter_context(Path(encode.stats.cache_path, f"{kernels}.compiled").open("a+"))
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if kept := bool(file.read()):
                fcntl.flock(file, fcntl.LOCK_UN)
        except (OSError, TypeError):  # a folder without locks; Numba keeps nothing
            yield
            return
        if not kept:
            said = f"compiling the kernels for {kernels}, once after an installation: up to a minute"
            warnings.warn(said, ThinwireWarning, stacklevel=4)
        yield
        if not kept:
            file.write("yes")


def is_gpu(device: torch.device) -> bool:
    """Whether it is a device that Triton may compile for."""
    return device.type == "cuda" and torch.cuda.is_available() and torch.version.cuda is not None


def on(device: torch.device) -> AbstractContextManager[Any]:
    """The context in which Triton launches kernels on a device; on a CPU its interpreter runs them, in tests."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
