"""Kernels are tried out beside the eager code, once in a process, before they are used."""

import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
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
        reason = "" if agree(*case) else "they gave other results than the eager code"
    except Exception as error:  # a missing library, a driver, a compiler, a processor or a cache folder
        reason = first_line(error)
    if reason:
        warnings.warn(
            f"the kernels for {kernels} do not work here, so codecs are slower: {reason}", ThinwireWarning, stacklevel=2
        )
    return not reason


def is_gpu(device: torch.device) -> bool:
    """Whether it is a device that Triton may compile for."""
    return device.type == "cuda" and torch.cuda.is_available() and torch.version.cuda is not None
