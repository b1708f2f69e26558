"""Rotations of rows on a CPU: cpu_rotation_kernels.py, if Numba is installed, with the results of rotation.py."""

import warnings
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from thinwire.compress.codecs.fused import cpu
from thinwire.errors import ThinwireWarning

Pieces = Iterable[tuple[slice, Tensor]]
"""The columns of each piece of a row, and its signs over sqrt(m)."""


def covers(rows: Tensor) -> bool:
    """Whether kernels rotate `rows` [R, n]."""
    return cpu.takes(rows.unsqueeze(0)) and _work()


def turn(rows: Tensor, pieces: Pieces) -> Tensor:
    """The float32 `rows` [R, n], each rotated."""
    from thinwire.compress.codecs.fused import cpu_rotation_kernels

    turned = torch.empty_like(rows)
    for columns, factors in pieces:
        cpu_rotation_kernels.turn(rows[:, columns].numpy(), factors.numpy(), turned[:, columns].numpy())
    return turned


def turn_back_(rows: Tensor, pieces: Pieces) -> None:
    """Undo `turn` on float32 `rows` [R, n], in place."""
    from thinwire.compress.codecs.fused import cpu_rotation_kernels

    for columns, factors in pieces:
        cpu_rotation_kernels.turn_back(rows[:, columns].numpy(), factors.numpy())


@cache
def _work() -> bool:
    """Whether the kernels work here, tried once beside the eager code."""
    if not find_spec("numba"):
        return False
    try:
        reason = "" if _agree() else "they gave other values than the eager code"
    except Exception as error:  # as in cpu.py
        reason = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    if reason:
        warnings.warn(
            f"the kernels for rotation do not work here, so it is slower: {reason}", ThinwireWarning, stacklevel=2
        )
    return not reason


def _agree() -> bool:
    """Whether kernels and eager code rotate alike, there and back."""
    from thinwire.compress.codecs import rotation

    rows = torch.linspace(-3, 2, 8 * 78, dtype=torch.float32).sin().view(8, 78)
    rows[1::2] *= 2.0**97
    pieces, turned = rotation.factors(rows), rotation.turn_eagerly(rows)
    back, others = turned.clone(), turned.clone()
    rotation.turn_back_eagerly_(back)
    turn_back_(others, pieces)
    return torch.equal(turn(rows, pieces), turned) and torch.equal(back, others)
