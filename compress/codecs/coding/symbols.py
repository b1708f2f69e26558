"""Symbols by a table that the payload brings: how frequent each is in this message.

    | S - 1, uint8 | frequency of each symbol below S, uint16 | lanes |      lanes are those of lanes.py

Frequencies are parts of 4096, whose sum is 4096; what occurs has at least one.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.compress.codec import CodecError, tensor_bytes
from thinwire.compress.codecs.coding.lanes import (
    DAMAGED,
    STATE,
    WORD,
    chunks_of,
    decode_lanes,
    encode_lanes,
    integers,
    lanes_of,
    require_bytes,
)
from thinwire.compress.codecs.coding.tables import SYMBOLS, TOTAL, Tables
from thinwire.compress.codecs.fused import steps as kernels

_FREQUENCY_BYTES = 2


def encode_symbols(symbols: Tensor, counts: Tensor | None = None) -> Tensor:
    """The bytes of symbols, uint8 [n], on a CPU; `counts` say how often each occurs, for who knows it already."""
    frequency = _frequencies(symbols.bincount() if counts is None else counts)
    made, head = _tables(frequency), torch.tensor([len(frequency) - 1], dtype=torch.uint8)
    parts = [head, tensor_bytes(torch.from_numpy(frequency.astype(np.int16)))]
    if kernels.cover_code(symbols):
        return torch.cat([*parts, kernels.encode_symbols(symbols, made)])
    return torch.cat([*parts, *encode_lanes(torch.zeros_like(symbols), symbols, made)])


def coded_size(counts: Tensor) -> int:
    """About how many bytes `encode_symbols` needs for symbols that occur so often."""
    n = int(counts.sum())
    shares = counts[counts > 0].double() / n
    lanes = chunks_of(n) * (WORD + STATE * lanes_of(n))
    return 1 + _FREQUENCY_BYTES * len(counts) + lanes - int(n * (shares * shares.log2()).sum()) // 8


def decode_symbols(coded: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The `n` symbols, uint8, that `encode_symbols` coded, and the bytes behind them.

    Raises CodecError if these bytes are no such code.
    """
    require_bytes(coded, 1)
    stop = 1 + _FREQUENCY_BYTES * (int(coded[0]) + 1)
    require_bytes(coded, stop)
    frequency = integers(coded[1:stop], torch.int16).numpy()
    if frequency.min() < 0 or frequency.sum() != TOTAL:
        raise CodecError(f"a payload's frequencies must be parts of {TOTAL}, got {frequency.tolist()}")
    made, symbols = _tables(frequency), torch.zeros(n, dtype=torch.uint8)
    if not kernels.cover_code(coded):
        return decode_lanes(symbols, coded[stop:], made)
    size = kernels.decode_symbols(coded[stop:], made, symbols)
    if size < 0:
        raise CodecError(DAMAGED)
    return symbols, coded[stop + size :]


def _frequencies(counts: Tensor) -> NDArray[np.int64]:
    """How frequent symbols are that occur so often."""
    found: NDArray[np.int64] = torch.maximum(counts * TOTAL // counts.sum(), (counts > 0).long()).numpy()
    while missing := TOTAL - found.sum():
        found[found.argmax()] += max(missing, -1)
    return found


def _tables(frequency: NDArray[np.int64]) -> Tables:
    """The table, and behind it that of what is certain."""
    both = np.zeros((2, SYMBOLS), np.int64)
    both[0, : len(frequency)], both[1, 0] = frequency, TOTAL
    return Tables.of(both, certain=1)
