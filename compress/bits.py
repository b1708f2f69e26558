"""Codes of 1 to 8 bits, packed with nothing between them.

A payload of b-bit codes is a little-endian bit stream: code i lies in bits b*i to b*i+b-1, and bit k of the stream is
bit k % 8 of byte k // 8. So eight codes fill exactly b bytes, and n codes fill ceil(b*n/8), whatever b is:

    3-bit codes      | c0 | c1 | c2 | c3 | c4 | c5 | c6 | c7 |      c0 holds the lowest bits of byte 0
    bytes            |   byte 0   |   byte 1   |   byte 2    |      c2 lies across bytes 0 and 1

Both directions handle eight codes as one 64-bit word and work on all lanes of the word at once, so that one path
serves every width. Words are read and written as bytes in the machine's own order, which has to be little-endian.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_LANES = (8, 16, 32)
_PIECES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def packed_size(n: int, bits: int) -> int:
    """Return how many bytes n codes take."""
    return (bits * n + 7) // 8


def pack(codes: Tensor, bits: int, out: Tensor) -> None:
    """Pack uint8 ``codes``, each below 2**bits, into ``out``: uint8 [packed_size(len(codes), bits)]."""
    if bits == 8:
        out.copy_(codes)
        return
    n, full = len(codes), len(codes) // 8
    words = torch.empty((n + 7) // 8, dtype=torch.int64, device=codes.device)
    words[full:] = 0
    word_bytes = words.view(torch.uint8)
    word_bytes[:n] = codes
    for lane in _LANES:
        used = bits * lane // 8
        low = (1 << used) - 1
        upper = words >> (lane - used)
        upper &= _repeat(low << used, 2 * lane)
        words &= _repeat(low, 2 * lane)
        words |= upper
    packed = torch.empty(full * bits, dtype=torch.uint8, device=codes.device)
    size = bits & -bits
    rows, packed_rows = words[:full].view(_PIECES[size]), packed.view(_PIECES[size])
    for column in range(bits // size):
        packed_rows[column :: bits // size] = rows[column :: 8 // size]
    out[: full * bits] = packed
    out[full * bits :] = word_bytes[8 * full :][: len(out) - full * bits]


def unpack(payload: Tensor, bits: int, n: int) -> Tensor:
    """Return the ``n`` codes in ``payload`` (uint8 [packed_size(n, bits)]) as new uint8 [n]."""
    if bits == 8:
        return payload.clone()
    full = n // 8
    words = torch.empty((n + 7) // 8, dtype=torch.int64, device=payload.device)
    words[full:] = 0
    word_bytes = words.view(torch.uint8)
    rows, packed_rows = word_bytes.view(-1, 8), payload[: full * bits].view(full, bits)
    for byte in range(bits):
        rows[:full, byte] = packed_rows[:, byte]
    word_bytes[8 * full :][: len(payload) - full * bits] = payload[full * bits :]
    for lane in reversed(_LANES):
        used = bits * lane // 8
        low = (1 << used) - 1
        upper = words << (lane - used)
        upper &= _repeat(low << lane, 2 * lane)
        words &= _repeat(low, 2 * lane)
        words |= upper
    return word_bytes[:n]


def unpack_values(payload: Tensor, bits: int, n: int, value_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``value_of(unpack(payload, bits, n))``, where ``value_of`` maps codes to float32 one by one.

    Where a byte holds whole codes, the values of each of the 256 bytes are looked up: 2 to 4 times as fast.
    """
    if bits not in (1, 2, 4):
        return value_of(unpack(payload, bits, n))
    every_byte = torch.arange(256, dtype=torch.uint8, device=payload.device)
    table = value_of(unpack(every_byte, bits, 256 * 8 // bits)).view(256, 8 // bits)
    # One element per row where that can be: torch gathers rows of two or four floats four times slower.
    wide = table.view(torch.float64 if bits == 4 else torch.complex128).squeeze(-1)
    return wide.index_select(0, payload.int()).view(torch.float32).view(-1)[:n]


def _repeat(pattern: int, width: int) -> int:
    """Return a 64-bit word made of copies of ``pattern``, each ``width`` bits wide."""
    return sum(pattern << position for position in range(0, 64, width))
