"""The kernel of error feedback on a CPU, compiled by Numba: message, codes and new error while a block is in a cache.

    errors    | block 0         | block 1         | ..     u = x + d e in the error's place, then u - C(u)
    codes     | 4096 of them               | 4096 | ..     as in cpu_kernels.py, whose functions this one calls

What Numba compiled is kept until this file changes: after a change of cpu_kernels.py alone, touch this one too.
"""

import numpy as np

from thinwire.compress.codecs.fused.arithmetic import CodeRule, ValueRule
from thinwire.compress.codecs.fused.cpu_kernels import (
    _BUFFER,
    _bfloat16_above,
    _codes,
    _compiled,
    _largest,
    _pack,
    _range,
    _values,
)

_FLOOR, _RANGE = int(CodeRule.FLOOR), int(CodeRule.RANGE)
_LINEAR, _DIVIDED = int(ValueRule.LINEAR), int(ValueRule.DIVIDED)


@_compiled
def encode(values, errors, decay, rule, share, bits, divisors, shifts, out):
    """Write the packed codes of u = values + decay * errors, float32 [count, inner], and u - C(u) into `errors`.

    Scales are written to `divisors` and `shifts`, float32 [count]: for FLOOR, max|u| times `share` rounded up to bf16;
    for RANGE the range and the least value.
    """
    count, inner = values.shape
    integers = errors.view(np.int32)
    codes, other = np.zeros(_BUFFER, np.uint8), np.zeros(_BUFFER, np.uint8)
    decoded, no_table = np.empty(_BUFFER, np.float32), np.empty(0, np.float32)
    half, size, zero, one = 1 << (bits - 1), _BUFFER * bits // 8, np.float32(0), np.float32(1)
    value_rule, first, second = _LINEAR, one, np.float32(0.5 - half)
    if rule == _RANGE:
        value_rule, first, second = _DIVIDED, np.float32(2 * half - 1), zero
    fill = done = 0
    for block in range(count):
        _add(values[block], decay, errors[block])
        if rule == _FLOOR:
            scale, shift = _bfloat16_above(_largest(integers[block]), share), zero
            # slightly more than s/half, as AbsMaxGrid says
            divisor, factor = scale * np.float32((1 + 2.0**-22) / half), scale * np.float32(1 / half)
        else:
            shift, scale = _range(integers[block])
            divisor = factor = scale
        divisors[block], shifts[block] = scale, shift
        if divisor == 0:
            divisor = one if rule == _RANGE else np.float32(np.inf)
        start = 0
        while start < inner:
            stop = min(inner, start + _BUFFER - fill)
            some, place = errors[block, start:stop], codes[fill : fill + stop - start]
            _codes(some, rule, divisor, shift, one, zero, half, place)
            _values(place, value_rule, no_table, first, second, factor, -shift, decoded[: stop - start])
            _subtract(decoded, some)
            fill += stop - start
            start = stop
            if fill == _BUFFER:
                _pack(codes, other, bits, out[done : done + size])
                done += size
                fill = 0
    if done < len(out):
        codes[fill:] = 0
        _pack(codes, other, bits, out[done:])


@_compiled
def _add(values, decay, errors):
    """Turn errors into messages."""
    if decay == 1:
        for i in range(len(values)):
            errors[i] = values[i] + errors[i]
    else:
        for i in range(len(values)):
            errors[i] = errors[i] * decay + values[i]


@_compiled
def _subtract(decoded, messages):
    """Turn messages into errors."""
    for i in range(len(messages)):
        messages[i] -= decoded[i]
