"""The kernel of error feedback on a CPU, compiled by Numba: message, codes and new error while a block is in a cache.

    errors    | block 0         | block 1         | ..     u = x + d e in the error's place, then u - C(u)
    codes     | 4096 of them               | 4096 | ..     as in cpu_kernels.py, whose functions this one calls

What Numba compiled is kept until this file changes: after a change of cpu_kernels.py alone, touch this one too.
"""

import numpy as np

from thinwire.compress.codecs.fused.arithmetic import CodeRule, ValueRule
from thinwire.compress.codecs.fused.cpu_kernels import (
    _BUFFER,
    _codes,
    _compiled,
    _measure,
    _pack,
    _piece,
    _values,
)

_FLOOR, _RANGE = int(CodeRule.FLOOR), int(CodeRule.RANGE)
_LINEAR, _DIVIDED = int(ValueRule.LINEAR), int(ValueRule.DIVIDED)


@_compiled
def encode(values, errors, decay, rule, share, bits, scales, shifts, out):
    """Write the packed codes of u = values + decay * errors, float32 [count, inner], and u - C(u) into `errors`.

    Scales are written to `scales` and `shifts`, float32 [count]: for FLOOR, max|u| times `share` rounded up to bf16;
    for RANGE the range and the least value.
    """
    count, inner = values.shape
    flat, integers = errors.reshape(-1), errors.view(np.int32)
    codes, other = np.zeros(_BUFFER, np.uint8), np.zeros(_BUFFER, np.uint8)
    decoded, no_table = np.empty(_BUFFER, np.float32), np.empty(0, np.float32)
    divisors, factors, least = np.empty(count, np.float32), np.empty(count, np.float32), np.empty(count, np.float32)
    half, size, zero, one = 1 << (bits - 1), _BUFFER * bits // 8, np.float32(0), np.float32(1)
    value_rule, first, second, unit = _LINEAR, one, np.float32(0.5 - half), np.float32(1 / half)
    if rule == _RANGE:
        value_rule, first, second, unit = _DIVIDED, np.float32(2 * half - 1), zero, one
    at = fill = done = 0
    while at < len(flat):
        block, blocks, length = _piece(at, count, inner, _BUFFER - fill)
        stop, last, full = at + blocks * length, block + blocks, fill + blocks * length
        if at == block * inner:
            _add(values[block:last], decay, errors[block:last])
            _measure(
                integers[block:last], rule, share, half, scales[block:last], shifts[block:last], divisors[block:last]
            )
            for i in range(block, last):
                factors[i], least[i] = scales[i] * unit, -shifts[i]
        some, place = flat[at:stop].reshape(blocks, length), codes[fill:full].reshape(blocks, length)
        back = decoded[: stop - at].reshape(blocks, length)
        _codes(some, rule, divisors[block:last], shifts[block:last], one, zero, half, place)
        _values(place, value_rule, no_table, first, second, factors[block:last], least[block:last], back)
        _subtract(decoded, flat[at:stop])
        at, fill = stop, full
        if fill == _BUFFER:
            _pack(codes, other, bits, out[done : done + size])
            done += size
            fill = 0
    if done < len(out):
        codes[fill:] = 0
        _pack(codes, other, bits, out[done:])


@_compiled
def _add(values, decay, errors):
    """Turn errors [blocks, inner] into messages."""
    for block in range(len(values)):
        if decay == 1:
            for i in range(values.shape[1]):
                errors[block, i] = values[block, i] + errors[block, i]
        else:
            for i in range(values.shape[1]):
                errors[block, i] = errors[block, i] * decay + values[block, i]


@_compiled
def _subtract(decoded, messages):
    """Turn messages into errors."""
    for i in range(len(messages)):
        messages[i] -= decoded[i]
