"""Kernels of q and nf on a CPU, compiled by Numba: codes and packing in one pass, and back. Imported only where used.

A tensor's part is [count, inner]: blocks of consecutive elements. Codes go through a buffer that stays in the nearest
cache, whatever the length of a block:

    values    | block 0           | block 1           | ..       a code for each, uint8, until the buffer is full
    codes     | 4096 of them                  | 4096  | ..       packed, as bits.py says

Equal bytes need care in these places:

- LLVM makes one operation of a multiplication and an addition only if it is allowed to. Numba's default forbids it.
- Numbers without a type of their own are float64 and int64 to Numba, so each has one here.
- NaN is no integer: it becomes a zero before the conversion, as torch's conversion has it.
- Not defined by the eager code either: the bits of a NaN in a scale.
"""

from typing import Any

import numpy as np
from numba import njit

from thinwire.compress.codecs.fused.arithmetic import CodeRule, ValueRule

# What they mean is in arithmetic.py.
_FLOOR, _NEAREST, _RANGE = int(CodeRule.FLOOR), int(CodeRule.NEAREST), int(CodeRule.RANGE)
_LINEAR, _DIVIDED = int(ValueRule.LINEAR), int(ValueRule.DIVIDED)

_BUFFER = 4096
_TIES_TO_EVEN = np.float32(12582912.0)
"""1.5 * 2**23: adding and subtracting it rounds a smaller float32 to an integer."""
_TURN = np.float32(3)
_SMALLEST = (127 - 118) << 23
_INFINITY = 0x7F800000

_LOW = np.array(
    [[sum(((1 << (bits << step)) - 1) << place for place in range(0, 64, 16 << step)) for step in range(3)]
     for bits in range(8)], np.uint64,
)  # fmt: skip
"""By the bits of a code and the step of joining or parting: the lower of each two lanes, without what is unused."""


def _compiled(function: Any) -> Any:
    """A function that Numba compiles when it is first called, and keeps beside this file or in the user's cache."""
    try:
        return njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # there is no folder that may be written
        return njit(nogil=True, error_model="numpy")(function)


@_compiled
def encode(values, rule, share, scales, divisors, shifts, first, second, bits, out):
    """Write the packed codes of float32 `values` [count, inner] into `out`, measuring scales if `scales` has room.

    `divisors` and `shifts` are float32 [count], `scales` is [count] or [0]. Measured are, for FLOOR, max|x| times
    `share` rounded up to bf16; for RANGE the range, and the least value as shift.
    """
    count, inner = values.shape
    flat, integers = values.reshape(-1), values.view(np.int32)
    codes, other = np.zeros(_BUFFER, np.uint8), np.zeros(_BUFFER, np.uint8)
    half, size = 1 << (bits - 1), _BUFFER * bits // 8
    at = fill = done = 0
    while at < len(flat):
        block, blocks, length = _piece(at, count, inner, _BUFFER - fill)
        stop, last, full = at + blocks * length, block + blocks, fill + blocks * length
        if len(scales) and at == block * inner:
            _measure(
                integers[block:last], rule, share, half, scales[block:last], shifts[block:last], divisors[block:last]
            )
        some, place = flat[at:stop].reshape(blocks, length), codes[fill:full].reshape(blocks, length)
        _codes(some, rule, divisors[block:last], shifts[block:last], first, second, half, place)
        at, fill = stop, full
        if fill == _BUFFER:
            _pack(codes, other, bits, out[done : done + size])
            done += size
            fill = 0
    if done < len(out):
        codes[fill:] = 0
        _pack(codes, other, bits, out[done:])


@_compiled
def decode(payload, rule, first, second, table, factors, shifts, bits, out):
    """Write the values of packed codes into `out`, float32 [count, inner]."""
    count, inner = out.shape
    flat = out.reshape(-1)
    codes, other = np.zeros(_BUFFER, np.uint8), np.zeros(_BUFFER, np.uint8)
    size, at, done, fill = _BUFFER * bits // 8, 0, 0, _BUFFER
    while at < len(flat):
        if fill == _BUFFER:
            _unpack(payload[done : done + size], bits, codes, other)
            done += size
            fill = 0
        block, blocks, length = _piece(at, count, inner, _BUFFER - fill)
        stop, last, full = at + blocks * length, block + blocks, fill + blocks * length
        some, place = codes[fill:full].reshape(blocks, length), flat[at:stop].reshape(blocks, length)
        _values(some, rule, table, first, second, factors[block:last], shifts[block:last], place)
        at, fill = stop, full


@_compiled
def _piece(at, count, inner, room):
    """The block at an element, how many blocks to take from there, and how much of each: whole ones, or a part."""
    block = at // inner
    if at > block * inner or room < inner:
        return block, 1, min((block + 1) * inner - at, room)
    return block, min(count - block, room // inner), inner


@_compiled
def _measure(integers, rule, share, half, scales, shifts, divisors):
    """Write the scales of whole blocks, and what their values are divided by."""
    for block in range(len(integers)):
        if rule == _FLOOR:
            scales[block] = _bfloat16_above(_largest(integers[block]), share)
            # slightly more than s/half, as AbsMaxGrid says
            divisor, instead = scales[block] * np.float32((1 + 2.0**-22) / half), np.float32(np.inf)
        else:
            shifts[block], scales[block] = _range(integers[block])
            divisor, instead = scales[block], np.float32(1)
        divisors[block] = instead if divisor == 0 else divisor


@_compiled
def _largest(integers):
    """The bits of the largest magnitude: without signs they have the order of magnitudes, with NaN above infinity."""
    largest = np.int32(0)
    for i in range(len(integers)):
        largest = max(largest, np.int32(integers[i] & np.int32(0x7FFFFFFF)))
    return largest


@_compiled
def _bfloat16_above(largest, share):
    """As grid.bfloat16_above: the magnitude of these bits, times `share`, up to the next bf16; 0 below 2**-118."""
    bits = np.int64(np.float32(np.int32(largest).view(np.float32) * share).view(np.int32))
    if bits > _INFINITY:
        return np.float32(np.nan)
    bits = (bits + 0xFFFF) & 0x7FFF0000
    return np.int32(0 if bits < _SMALLEST else bits).view(np.float32)


@_compiled
def _range(integers):
    """The least value, and the range; NaN for both if there is one."""
    # as integers in the order of floats, and without a branch
    least, most, largest = np.int32(0x7FFFFFFF), np.int32(-0x80000000), np.int32(0)
    for i in range(len(integers)):
        magnitude = np.int32(integers[i] & np.int32(0x7FFFFFFF))
        ordered = np.int32(integers[i] ^ np.int32(np.int32(integers[i] >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        least, most, largest = min(least, ordered), max(most, ordered), max(largest, magnitude)
    if largest > _INFINITY:
        return np.float32(np.nan), np.float32(np.nan)
    # adding zero takes the sign of a zero away
    low = np.int32(least ^ ((least >> 31) & 0x7FFFFFFF)).view(np.float32) + np.float32(0)
    high = np.int32(most ^ ((most >> 31) & 0x7FFFFFFF)).view(np.float32) + np.float32(0)
    return low, high - low


@_compiled
def _codes(values, rule, divisors, shifts, first, second, half, codes):
    """Write the codes of `values` [blocks, some] of these blocks."""
    # the rule is looked at once, because blocks may be short
    blocks, size = values.shape
    low, high = np.float32(-half), np.float32(half - 1)
    if rule == _RANGE:
        low, high = np.float32(0), np.float32(2 * half - 1)
        for block in range(blocks):
            divisor, shift = divisors[block], shifts[block]
            for i in range(size):
                steps = (values[block, i] - shift) / divisor * high
                steps = steps if steps == steps else np.float32(half)
                codes[block, i] = np.uint8(np.int32((steps + _TIES_TO_EVEN) - _TIES_TO_EVEN))
    elif rule == _NEAREST:
        for block in range(blocks):
            divisor, shift = divisors[block], shifts[block]
            for i in range(size):
                steps = values[block, i] / divisor - shift
                steps = low if steps < low else steps
                steps = high if steps > high else steps
                steps = steps if steps == steps else np.float32(0)
                codes[block, i] = np.uint8(np.int32((steps + _TIES_TO_EVEN) - _TIES_TO_EVEN) + half)
    elif second != 0:
        for block in range(blocks):
            divisor = divisors[block]
            for i in range(size):
                steps = values[block, i] / divisor
                steps = -_TURN if steps < -_TURN else steps
                steps = _TURN if steps > _TURN else steps
                codes[block, i] = _code_below(steps / (first + second * steps * steps), low, high)
    else:
        for block in range(blocks):
            divisor = divisors[block]
            for i in range(size):
                codes[block, i] = _code_below(values[block, i] / divisor * first, low, high)


@_compiled
def _code_below(steps, low, high):
    """The code of the integer below, cut to those from `low` to `high`; that of NaN is half of their number."""
    steps = low if steps < low else steps
    steps = high if steps >= high else steps
    steps = steps if steps == steps else np.float32(0)
    whole = np.int32(steps)
    return np.uint8(whole - (np.float32(whole) > steps) - np.int32(low))


@_compiled
def _values(codes, rule, table, first, second, factors, shifts, out):
    """Write the values of `codes` [blocks, some] of these blocks."""
    blocks, size = codes.shape
    if rule == _LINEAR:
        for block in range(blocks):
            factor, shift = factors[block], shifts[block]
            for i in range(size):
                out[block, i] = (np.float32(codes[block, i]) * first + second) * factor - shift
    elif rule == _DIVIDED:
        for block in range(blocks):
            factor, shift = factors[block], shifts[block]
            for i in range(size):
                out[block, i] = np.float32(codes[block, i]) / first * factor - shift
    else:
        for block in range(blocks):
            factor, shift = factors[block], shifts[block]
            for i in range(size):
                out[block, i] = table[codes[block, i]] * factor - shift


@_compiled
def _copy(codes, out, count):
    # Numba's own assignment of a slice takes three times as long
    for i in range(count):
        out[i] = codes[i]


@_compiled
def _pack(codes, other, bits, out):
    """Pack as many codes as `out` has room for; overwrites both buffers."""
    if bits == 8:
        _copy(codes, out, len(out))
    elif bits == 4:
        _join_pairs(codes, bits, out)
    elif bits == 2:
        _join_pairs(codes, bits, other[: 2 * len(out)])
        _join_pairs(other, 2 * bits, out)
    elif bits == 1:
        _join_pairs(codes, bits, other[: 4 * len(out)])
        _join_pairs(other, 2 * bits, codes[: 2 * len(out)])
        _join_pairs(codes, 4 * bits, out)
    else:
        _join_words(codes, bits, out)


@_compiled
def _join_pairs(codes, bits, out):
    """Two codes a byte of the result, the first in the lower bits."""
    pairs, up = codes.view(np.uint16), np.uint16(8 - bits)
    for i in range(len(out)):
        out[i] = np.uint8(pairs[i] | (pairs[i] >> up))


@_compiled
def _join_words(codes, bits, out):
    """Eight codes of `bits` bits to as many bytes: lanes of a word two by two, as bits.py does."""
    words, gap, start = codes.view(np.uint64), np.uint64(8 - bits), 0
    for i in range((len(out) + bits - 1) // bits):
        word = words[i]
        for step in range(3):
            low, used = _LOW[bits, step], np.uint64(bits << step)
            word = (word & low) | ((word >> (gap << np.uint64(step))) & (low << used))
        for byte in range(min(bits, len(out) - start)):
            out[start + byte] = np.uint8(word >> np.uint64(8 * byte))
        start += bits


@_compiled
def _unpack(payload, bits, codes, other):
    """Write the codes in `payload` into `codes`; overwrites `other`."""
    if bits == 8:
        _copy(payload, codes, len(payload))
    elif bits == 4:
        _part_pairs(payload, bits, codes)
    elif bits == 2:
        _part_pairs(payload, 2 * bits, other)
        _part_pairs(other[: 2 * len(payload)], bits, codes)
    elif bits == 1:
        _part_pairs(payload, 4 * bits, codes)
        _part_pairs(codes[: 2 * len(payload)], 2 * bits, other)
        _part_pairs(other[: 4 * len(payload)], bits, codes)
    else:
        _part_words(payload, bits, codes)


@_compiled
def _part_pairs(packed, bits, codes):
    """Two codes of each byte."""
    pairs, low, up = codes.view(np.uint16), np.uint8((1 << bits) - 1), np.uint8(bits)
    for i in range(len(packed)):
        pairs[i] = np.uint16(packed[i] & low) | np.uint16(np.uint16(packed[i] >> up) << np.uint16(8))


@_compiled
def _part_words(payload, bits, codes):
    """Eight codes of as many bytes as each has bits."""
    words, gap, start = codes.view(np.uint64), np.uint64(8 - bits), 0
    for i in range((len(payload) + bits - 1) // bits):
        word = np.uint64(0)
        for byte in range(min(bits, len(payload) - start)):
            word |= np.uint64(payload[start + byte]) << np.uint64(8 * byte)
        start += bits
        for step in (2, 1, 0):
            low, lane = _LOW[bits, step], np.uint64(8 << step)
            word = (word & low) | ((word << (gap << np.uint64(step))) & (low << lane))
        words[i] = word
