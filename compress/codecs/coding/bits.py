"""Codes of 1 to 8 bits, packed with nothing between them.

A payload of b-bit codes is a little-endian bit stream: code i lies in bits b*i to b*i+b-1, and bit k of the stream is
bit k % 8 of byte k // 8. So eight codes fill exactly b bytes, and n codes fill ceil(b*n/8), whatever b is:

    3-bit codes      | c0 | c1 | c2 | c3 | c4 | c5 | c6 | c7 |      c0 holds the lowest bits of byte 0
    bytes            |   byte 0   |   byte 1   |   byte 2    |      c2 lies across bytes 0 and 1

Both directions join or part codes two by two. Pairs of up to 4 bits fit a byte, so that alone packs 1, 2 and 4
bits, and turns 3 bits into 6. Of wider codes eight lie in a 64-bit word, and all its lanes are handled at once. Words
are read and written as bytes in the machine's own order, which has to be little-endian.
"""

import numpy as np
import torch
from torch import Tensor

_LANES = (8, 16, 32)
_QUARTERED = 6
"""The width of codes of which four, not eight, are joined in a word."""


def packed_size(n: int, bits: int) -> int:
    """How many bytes n codes take."""
    return (bits * n + 7) // 8


def pack(codes: Tensor, bits: int, out: Tensor) -> None:
    """Pack uint8 `codes`, each below 2**bits, into `out`: uint8 [packed_size(len(codes), bits)]."""
    while bits <= 4:
        codes, bits = _paired(codes, bits), 2 * bits
    if bits == 8:
        out.copy_(codes)
        return
    # 4 codes of 6 bits fill 3 bytes, 8 of any width as many bytes as that
    dtype = torch.int32 if bits == _QUARTERED else torch.int64
    n, of_word = len(codes), dtype.itemsize
    words = torch.empty(-(-n // of_word), dtype=dtype, device=codes.device)
    words[n // of_word :] = 0
    words.view(torch.uint8)[:n] = codes
    for lane in _LANES[: of_word.bit_length() - 1]:
        used = bits * lane // 8
        low = (1 << used) - 1
        upper = words >> (lane - used)
        upper &= _repeat(low << used, 2 * lane, dtype)
        words &= _repeat(low, 2 * lane, dtype)
        words |= upper
    _put_words(words, bits * of_word // 8, out)


def _put_words(words: Tensor, size: int, out: Tensor) -> None:
    """Write the `size` lowest bytes of each word, as many as `out` has room for."""
    if out.device.type != "cpu":
        out.copy_(words.view(torch.uint8).view(len(words), -1)[:, :size].reshape(-1)[: len(out)])
        return
    # NumPy writes integers that begin at any byte: the next one overwrites what is above the lowest bytes.
    source = words.numpy()
    direct = max(0, (len(out) - source.itemsize) // size + 1)
    whole, rest = min(direct, len(source)), bytearray()
    if whole:
        np.copyto(np.ndarray(whole, source.dtype, out.numpy(), strides=(size,)), source[:whole])
    for word in source[whole:]:
        rest += word.tobytes()[:size]
    if rest:
        tail = out[whole * size :]
        tail.copy_(torch.frombuffer(rest, dtype=torch.uint8)[: len(tail)])


def unpack(payload: Tensor, bits: int, n: int) -> Tensor:
    """The `n` codes in `payload` (uint8 [packed_size(n, bits)]) as new uint8 [n]."""
    if bits == 8:
        return payload.clone()
    words = _words(payload, bits, (n + 7) // 8, torch.int64)
    for lane in reversed(_LANES):
        _part(words, bits * lane // 8, lane)
    return words.view(torch.uint8)[:n]


def _paired(codes: Tensor, bits: int) -> Tensor:
    """`codes` two by two, the first in the lower bits, as uint8; a zero follows the last of an odd number."""
    if len(codes) % 2 or codes.storage_offset() % 2:
        pairs = torch.zeros((len(codes) + 1) // 2, dtype=torch.int16, device=codes.device)
        pairs.view(torch.uint8)[: len(codes)] = codes
    else:
        pairs = codes.view(torch.int16)
    return (pairs >> (8 - bits)).bitwise_or_(pairs).to(torch.uint8)


def _words(payload: Tensor, size: int, count: int, dtype: torch.dtype) -> Tensor:
    """`count` pieces of `size` bytes, each in the lowest bytes of an integer.

    The upper bytes, and all beyond the end of `payload`, are undefined.
    """
    words = torch.empty(count, dtype=dtype, device=payload.device)
    stream = torch.empty(count * size + dtype.itemsize - size, dtype=torch.uint8, device=payload.device)
    stream[: len(payload)] = payload
    if payload.device.type == "cpu":
        # NumPy reads integers that begin at any byte, in one pass. torch cannot, and takes one pass a byte.
        target = words.numpy()
        np.copyto(target, np.ndarray(count, target.dtype, stream.numpy(), strides=(size,)))
        return words
    for byte in range(size):
        words.view(torch.uint8)[byte :: dtype.itemsize] = stream[byte : count * size : size]
    return words


def _part(words: Tensor, used: int, lane: int) -> None:
    """Split lanes of 2 * `lane` bits, in place, into two: `used` bits in each, and zeros above them."""
    low = (1 << used) - 1
    upper = words << (lane - used)
    upper &= _repeat(low << lane, 2 * lane, words.dtype)
    words &= _repeat(low, 2 * lane, words.dtype)
    words |= upper


def _repeat(pattern: int, width: int, dtype: torch.dtype = torch.int64) -> int:
    """A word of `dtype` made of copies of `pattern`, each `width` bits wide."""
    return sum(pattern << position for position in range(0, 8 * dtype.itemsize, width))
