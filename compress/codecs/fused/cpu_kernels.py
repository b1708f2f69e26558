"""Kernels on a CPU, compiled by Numba. Imported only where used.

    encode, decode      scales, codes and packing in one pass, and back
    encode_scaled       the same with scales from elsewhere

A tensor's part is [n]: blocks of `inner` consecutive elements, of which the last may be shorter. Codes go through a
buffer that stays in the nearest cache, whatever the length of a block:

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

from thinwire.compress.codecs.fused.arithmetic import CodeRule

# What they mean is in arithmetic.py.
_FLOOR, _NEAREST, _RANGE = int(CodeRule.FLOOR), int(CodeRule.NEAREST), int(CodeRule.RANGE)

_BUFFER = 4096
TIES_TO_EVEN = np.float32(12582912.0)
"""1.5 * 2**23: adding and subtracting it rounds a smaller float32 to an integer."""
_SMALLEST = (127 - 118) << 23
_INFINITY = 0x7F800000

_LOW = np.array(
    [[sum(((1 << (bits << step)) - 1) << place for place in range(0, 64, 16 << step)) for step in range(3)]
     for bits in range(8)], np.uint64,
)  # fmt: skip
"""By the bits of a code and the step of joining or parting: the lower of each two lanes, without what is unused."""
_NO_SIGN = np.int32(0x7FFFFFFF)
_LEAST, _MOST = np.int32(-0x80000000), np.int32(0x7FFFFFFF)


def compiled(function: Any) -> Any:
    """A function that Numba compiles when it is first called, and keeps beside this file or in the user's cache."""
    try:
        return njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # there is no folder that may be written
        return njit(nogil=True, error_model="numpy")(function)


@compiled
def encode(values, inner, rule, bits, scale_bytes, out):
    """Write the scales and the packed codes of float32 `values` [n], measured as a rule says."""
    count = (len(values) + inner - 1) // inner
    scales, shifts, divisors = np.empty(count, np.float32), np.zeros(count, np.float32), np.empty(count, np.float32)
    _encode(values, inner, rule, scales, shifts, divisors, bits, out)
    if rule == _RANGE:
        _move(shifts, 4, scale_bytes, 8, False)
        _move(scales, 4, scale_bytes[4:], 8, False)
    else:
        _move(scales, 2, scale_bytes, 2, False)


@compiled
def encode_scaled(values, inner, rule, divisors, shifts, bits, out):
    """Write the packed codes of float32 `values` [n], with what Coding says of their blocks."""
    _encode(values, inner, rule, np.empty(0, np.float32), shifts, divisors, bits, out)


@compiled
def decode(scale_bytes, payload, inner, rule, bits, out):
    """Write the values of packed codes into `out`, float32 [n], with the scales that `encode` wrote."""
    count = (len(out) + inner - 1) // inner
    factors, shifts = np.zeros(count, np.float32), np.zeros(count, np.float32)
    half = 1 << (bits - 1)
    if rule == _RANGE:
        _move(shifts, 4, scale_bytes, 8, True)
        _move(factors, 4, scale_bytes[4:], 8, True)
        shifts = -shifts
    else:
        _move(factors, 2, scale_bytes, 2, True)
        factors *= np.float32(1 / half)
    codes, other = np.zeros(_BUFFER, np.uint8), np.zeros(_BUFFER, np.uint8)
    size, at, done, fill = _BUFFER * bits // 8, 0, 0, _BUFFER
    while at < len(out):
        if fill == _BUFFER:
            _unpack(payload[done : done + size], bits, codes, other)
            done += size
            fill = 0
        block, blocks, length = _piece(at, len(out), inner, _BUFFER - fill)
        stop, last, full = at + blocks * length, block + blocks, fill + blocks * length
        some, place = codes[fill:full].reshape(blocks, length), out[at:stop].reshape(blocks, length)
        _values(some, rule, half, factors[block:last], shifts[block:last], place)
        at, fill = stop, full


@compiled
def _encode(values, inner, rule, scales, shifts, divisors, bits, out):
    """Write packed codes; measure, if `scales` has room."""
    codes, other = np.zeros(_BUFFER, np.uint8), np.zeros(_BUFFER, np.uint8)
    half, size = 1 << (bits - 1), _BUFFER * bits // 8
    at = fill = done = 0
    while at < len(values):
        block, blocks, length = _piece(at, len(values), inner, _BUFFER - fill)
        stop, last, full = at + blocks * length, block + blocks, fill + blocks * length
        if len(scales) and at == block * inner:
            end = min(last * inner, len(values))
            whole = values[at:end].reshape(blocks, (end - at) // blocks)
            _measure(whole, rule, half, scales[block:last], shifts[block:last], divisors[block:last])
        some, place = values[at:stop].reshape(blocks, length), codes[fill:full].reshape(blocks, length)
        _codes(some, rule, divisors[block:last], shifts[block:last], half, place)
        at, fill = stop, full
        if fill == _BUFFER:
            _pack(codes, other, bits, out[done : done + size])
            done += size
            fill = 0
    if done < len(out):
        codes[fill:] = 0
        _pack(codes, other, bits, out[done:])


@compiled
def _piece(at, stop, inner, room):
    """The block at an element, how many blocks to take from there, and how much of each: whole ones, or a part."""
    block, left = at // inner, min(stop - at, room)
    if at > block * inner or left < inner:
        return block, 1, min((block + 1) * inner - at, left)
    return block, left // inner, inner


@compiled
def _move(numbers, size, places, step, back):
    """Write the upper `size` bytes of each float32 to places `step` apart, at any address, or read them from there."""
    own = numbers.view(np.uint8)
    for i in range(len(numbers)):
        for byte in range(size):
            if back:
                own[4 * i + 4 - size + byte] = places[step * i + byte]
            else:
                places[step * i + byte] = own[4 * i + 4 - size + byte]


@compiled
def _measure(values, rule, half, scales, shifts, divisors):
    """Write the scales of whole blocks, and what their values are divided by."""
    integers = values.view(np.int32)
    for block in range(len(values)):
        least, most = floats(*ends(integers[block]))
        if rule == _RANGE:
            # adding zero takes the sign of a zero away
            shifts[block] = least + np.float32(0)
            scales[block] = (most + np.float32(0)) - shifts[block]
            divisor, instead = scales[block], np.float32(1)
        else:
            scales[block] = _scale(least, most, rule == _NEAREST)
            # slightly more than s/half, as AbsMaxGrid says
            unit = np.float32(-1 / half) if rule == _NEAREST else np.float32((1 + 2.0**-22) / half)
            divisor, instead = scales[block] * unit, np.float32(np.inf)
        divisors[block] = instead if divisor == 0 else divisor


@compiled
def _scale(least, most, signed):
    """The scale of AbsMaxGrid or MidTreadGrid, up to the next bf16 and 0 below 2**-118."""
    largest = max(-least, most)
    bits = np.int64(np.float32(largest).view(np.int32) & _NO_SIGN)
    above = (bits + 0xFFFF) & 0x7FFF0000
    scale = np.int32(0 if above < _SMALLEST else above).view(np.float32)
    if not (bits <= _INFINITY and largest == largest):
        return np.float32(np.nan)
    return -scale if signed and most + least < 0 else scale


@compiled
def _codes(values, rule, divisors, shifts, half, codes):
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
                codes[block, i] = np.uint8(np.int32((steps + TIES_TO_EVEN) - TIES_TO_EVEN))
    elif rule == _NEAREST:
        for block in range(blocks):
            divisor, shift = divisors[block], shifts[block]
            for i in range(size):
                steps = values[block, i] / divisor - shift
                steps = low if steps < low else steps
                steps = high if steps > high else steps
                steps = steps if steps == steps else np.float32(0)
                codes[block, i] = np.uint8(np.int32((steps + TIES_TO_EVEN) - TIES_TO_EVEN) + half)
    else:
        for block in range(blocks):
            divisor = divisors[block]
            for i in range(size):
                codes[block, i] = _code_below(values[block, i] / divisor, low, high)


@compiled
def _code_below(steps, low, high):
    """The code of the integer below, cut to those from `low` to `high`; that of NaN is half of their number."""
    steps = low if steps < low else steps
    steps = high if steps >= high else steps
    steps = steps if steps == steps else np.float32(0)
    whole = np.int32(steps)
    return np.uint8(whole - (np.float32(whole) > steps) - np.int32(low))


@compiled
def _values(codes, rule, half, factors, shifts, out):
    """Write the values of `codes` [blocks, some] of these blocks."""
    blocks, size = codes.shape
    last, middle = np.float32(2 * half - 1), np.float32(half if rule == _NEAREST else 0.5 - half)
    sign = np.float32(-1 if rule == _NEAREST else 1)
    for block in range(blocks):
        factor, shift = factors[block], shifts[block]
        if rule == _RANGE:
            for i in range(size):
                out[block, i] = np.float32(codes[block, i]) / last * factor - shift
        else:
            for i in range(size):
                out[block, i] = (np.float32(codes[block, i]) * sign + middle) * factor


@compiled
def copy(some, out):
    """Copy all elements."""
    # Numba's own assignment of a slice takes three times as long
    for i in range(len(some)):
        out[i] = some[i]


@compiled
def _pack(codes, other, bits, out):
    """Pack as many codes as `out` has room for; overwrites both buffers."""
    if bits == 8:
        copy(codes[: len(out)], out)
    elif 8 % bits:
        _join_words(codes, bits, out)
    else:
        while bits < 4:
            _join_pairs(codes, bits, other[: 4 // bits * len(out)])
            codes, other, bits = other, codes, 2 * bits
        _join_pairs(codes, bits, out)


@compiled
def _join_pairs(codes, bits, out):
    """Two codes a byte of the result, the first in the lower bits."""
    pairs, up = codes.view(np.uint16), np.uint16(8 - bits)
    for i in range(len(out)):
        out[i] = np.uint8(pairs[i] | (pairs[i] >> up))


@compiled
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


@compiled
def _unpack(payload, bits, codes, other):
    """Write the codes in `payload` into `codes`; overwrites `other`."""
    if bits == 8:
        copy(payload, codes)
    elif 8 % bits:
        _part_words(payload, bits, codes)
    else:
        size, wide, packed = len(payload), 4, payload
        if bits == 2:
            codes, other = other, codes
        while wide > bits:
            _part_pairs(packed[:size], wide, codes)
            packed, codes, other = codes, other, codes
            size, wide = 2 * size, wide // 2
        _part_pairs(packed[:size], wide, codes)


@compiled
def _part_pairs(packed, bits, codes):
    """Two codes of each byte."""
    pairs, low, up = codes.view(np.uint16), np.uint8((1 << bits) - 1), np.uint8(bits)
    for i in range(len(packed)):
        pairs[i] = np.uint16(packed[i] & low) | np.uint16(np.uint16(packed[i] >> up) << np.uint16(8))


@compiled
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


@compiled
def ends(integers):
    """The least and the largest as integers in the order of floats."""
    low, high = _MOST, _LEAST
    for i in range(len(integers)):
        ordered = _ordered(integers[i])
        low, high = min(low, ordered), max(high, ordered)
    return low, high


@compiled
def _ordered(integer):
    """A float's bits as an integer in the order of floats; NaN is at both ends."""
    return np.int32(integer ^ np.int32(np.int32(integer >> np.int32(31)) & _NO_SIGN))


@compiled
def floats(low, high):
    """The floats of the least and the largest ordered integer; NaN for both if one is."""
    if high > _INFINITY or low < -_INFINITY - 1:
        return np.float32(np.nan), np.float32(np.nan)
    return np.int32(_ordered(low)).view(np.float32), np.int32(_ordered(high)).view(np.float32)
