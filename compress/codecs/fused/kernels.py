"""Triton kernels of q: scale, codes and packing in one, and back. Imported only where a tensor is on a GPU.

Triton comes with the CUDA build of torch, so setup.cfg does not ask for it. Its interpreter (TRITON_INTERPRET=1 before
the first import) runs the same kernels on the CPU: so tests/compress/test_fused.py compares them with grid.py.

A program handles a tile of a payload: some blocks, and of each some bytes, with `LANES` codes in a byte.

    elements    | row 0: lane 0, lane 1, .. | lane 0, lane 1, .. | ..        [ROWS, BYTES, LANES]
    codes       | row 0: byte 0             | byte 1             | ..        [ROWS, BYTES]

Equal bytes on a GPU need care in these places:

- A multiplication and an addition after it must not become one operation: every launch passes enable_fp_fusion=False.
- Division is `div_rn`, rounded as IEEE says; Triton's `/` is not. Rounding half to even adds and subtracts 1.5 * 2**23.
- bf16 is read and rounded as an integer, so that no conversion of a GPU is asked to round.
- Denormal numbers count, and Triton's `floor` flushes them to zero. So a second division, of the value times 2**64,
  finds what is negative and below 2**-126 of its scale.
- Not defined by the eager code either: the bits of a NaN in a scale (here 0x7fff as a GPU rounds it, 0x7fffffff as it
  computes it).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
"""Elements that a program handles, or one block if that is more."""
LONGEST = 16384
"""The longest block whose scale is found by the program that makes its codes: it holds the block in registers."""
_WARPS = 8


def encode(x: Tensor, out: Tensor, count: int, inner: int, bits: int, minmax: bool, measured: bool) -> None:
    """Write the payload of `x`, contiguous, in `count` blocks of `inner` elements; if `measured`, it has the scales."""
    tile = _tile(inner, bits, whole=not measured)
    _encode[_programs(count, inner, bits, tile)](
        _plain(x), out, x.numel(), count, inner, bits, 8 // bits, minmax, measured, x.dtype == torch.bfloat16, *tile,
        num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def decode(payload: Tensor, out: Tensor, count: int, inner: int, bits: int, minmax: bool) -> None:
    """Write the values of a payload's codes into `out`, contiguous, in `count` blocks of `inner` elements."""
    tile = _tile(inner, bits, whole=False)
    _decode[_programs(count, inner, bits, tile)](
        payload, _plain(out), out.numel(), count, inner, bits, 8 // bits, minmax, out.dtype == torch.bfloat16,
        out.dtype == torch.float16, *tile, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def _tile(inner: int, bits: int, whole: bool) -> tuple[int, int]:
    """The blocks and the bytes of each that a program handles; `whole` asks for all bytes of a block."""
    lanes = 8 // bits
    of_block = triton.next_power_of_2(triton.cdiv(inner, lanes))
    size = of_block if whole else min(of_block, TILE // lanes)
    return max(1, TILE // lanes // size), size


def _programs(count: int, inner: int, bits: int, tile: tuple[int, int]) -> tuple[int, int]:
    """How many tiles there are over the bytes of a block, and over the blocks; a GPU allows 65535 of the second."""
    return triton.cdiv(count, tile[0]) * triton.cdiv(triton.cdiv(inner, 8 // bits), tile[1]), 1


def _plain(x: Tensor) -> Tensor:
    """`x`, bf16 as integers."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


@triton.jit
def _encode(
    x, out, numel, count, inner,
    BITS: tl.constexpr, LANES: tl.constexpr, MINMAX: tl.constexpr, MEASURED: tl.constexpr, BF16: tl.constexpr,
    ROWS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    rows, places, inside, targets, fits = _where(numel, count, inner, LANES, ROWS, BYTES)
    values = tl.load(x + places, mask=inside, other=0)
    values = _bf16_value(values) if BF16 else values.to(tl.float32)
    if MEASURED:
        first, second = _read_scales(out, rows, count, MINMAX)
    else:
        first, second = _measure(values, inside, MINMAX)
        if MINMAX:
            _put(out, 8 * rows, first, rows < count, 4)
            _put(out, 8 * rows + 4, second, rows < count, 4)
        else:
            _put(out, 2 * rows, first >> 16, rows < count, 2)
    codes = _codes(values, _float(first)[:, None, None], _float(second)[:, None, None], BITS, MINMAX)
    # bytes are sums of their codes, because the codes share no bit; the last byte ends in zeros
    shifts = tl.arange(0, LANES)[None, None, :] * BITS
    packed = tl.sum(tl.where(inside, codes, 0) << shifts, axis=2)
    scales_size = count * (8 if MINMAX else 2)
    tl.store(out + scales_size + targets, packed.to(tl.uint8), mask=fits)


@triton.jit
def _decode(
    payload, out, numel, count, inner,
    BITS: tl.constexpr, LANES: tl.constexpr, MINMAX: tl.constexpr, BF16: tl.constexpr, FP16: tl.constexpr,
    ROWS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    rows, places, inside, sources, fits = _where(numel, count, inner, LANES, ROWS, BYTES)
    scales_size = count * (8 if MINMAX else 2)
    packed = tl.load(payload + scales_size + sources, mask=fits, other=0).to(tl.int32)
    shifts = tl.arange(0, LANES)[None, None, :] * BITS
    codes = ((packed[:, :, None] >> shifts) & ((1 << BITS) - 1)).to(tl.float32)
    first, second = _read_scales(payload, rows, count, MINMAX)
    scale, extent = _float(first)[:, None, None], _float(second)[:, None, None]
    last: tl.constexpr = (1 << BITS) - 1
    if MINMAX:
        values = tl.math.div_rn(codes, tl.full(codes.shape, last, tl.float32)) * extent + scale
    else:
        values = (codes - last / 2) * (scale * (2.0 / (1 << BITS)))
    if BF16:
        tl.store(out + places, _bf16_bits(values).to(tl.int16), mask=inside)
    elif FP16:
        tl.store(out + places, _saturated(values).to(tl.float16), mask=inside)
    else:
        tl.store(out + places, values, mask=inside)


@triton.jit
def _where(numel, count, inner, LANES: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """The rows, elements and bytes of this program's tile, and which of the elements and bytes exist."""
    per_row = tl.cdiv(inner, LANES)
    tiles = tl.cdiv(per_row, BYTES)
    program = tl.program_id(0)
    rows = (program // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (program % tiles) * BYTES + tl.arange(0, BYTES)
    elements = columns[:, None] * LANES + tl.arange(0, LANES)[None, :]
    places = rows[:, None, None] * inner + elements[None, :, :]
    inside = (elements[None, :, :] < inner) & (places < numel)
    targets = rows[:, None] * per_row + columns[None, :]
    fits = (columns[None, :] < per_row) & (rows[:, None] * inner + columns[None, :] * LANES < numel)
    return rows, places, inside, targets, fits


@triton.jit
def _measure(values, inside, MINMAX: tl.constexpr):
    """The bits of each row's scale: absmax and 0, or least and range."""
    # without their signs, the bits of floats have the order of magnitudes, with NaN above infinity
    magnitudes = tl.where(inside, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    largest = tl.max(tl.max(magnitudes, axis=2), axis=1)
    if MINMAX:
        lowest = (
            tl.min(tl.min(tl.where(inside, values, float("inf")), axis=2), axis=1) + 0.0
        )  # so that a zero has no sign
        highest = tl.max(tl.max(tl.where(inside, values, float("-inf")), axis=2), axis=1) + 0.0
        first = tl.where(largest > 0x7F800000, 0x7FFFFFFF, lowest.to(tl.int32, bitcast=True))
        second = tl.where(largest > 0x7F800000, 0x7FFFFFFF, (highest - lowest).to(tl.int32, bitcast=True))
    else:
        # as grid.bfloat16_above: up to the next bf16, and 0 below 2**-118
        is_nan = largest > 0x7F800000
        first = (tl.where(is_nan, 0, largest) + 0xFFFF) & 0x7FFF0000
        first = tl.where(is_nan, 0x7FFF0000, tl.where(first < (127 - 118) << 23, 0, first))
        second = first * 0
    return first, second


@triton.jit
def _codes(values, scale, extent, BITS: tl.constexpr, MINMAX: tl.constexpr):
    """The codes of `values` as AbsMaxGrid and MinMaxGrid say, int32; that of NaN is half of their number."""
    half: tl.constexpr = (1 << BITS) // 2
    if MINMAX:
        steps = tl.math.div_rn(values - scale, tl.where(extent == 0, 1.0, extent) + tl.zeros_like(values))
        steps = steps * (2 * half - 1)
        steps = (steps + 12582912.0) - 12582912.0 - half
    else:
        step = scale * ((1 + 2**-22) / half)
        step = tl.where(step == 0, float("inf"), step)
        step = step + tl.zeros_like(values)
        steps = tl.floor(tl.math.div_rn(values, step))
        # Triton's floor takes a denormal quotient for zero: a negative one is -1, unless division rounds it to zero
        enlarged = tl.math.div_rn(values * 2.0**64, step)
        steps = tl.where((steps == 0) & (enlarged < -(2.0**-86)), -1.0, steps)
    steps = tl.where(steps == steps, steps, 0.0)
    return (steps.to(tl.int32) & (2 * half - 1)) ^ half


@triton.jit
def _read_scales(payload, rows, count, MINMAX: tl.constexpr):
    """The bits of each row's scale in a payload: absmax and 0, or least and range."""
    if MINMAX:
        first = _get(payload, 8 * rows, rows < count, 4)
        second = _get(payload, 8 * rows + 4, rows < count, 4)
    else:
        first = _get(payload, 2 * rows, rows < count, 2) << 16
        second = first * 0
    return first, second


@triton.jit
def _put(out, places, bits, exists, SIZE: tl.constexpr):
    """Write the lowest bytes of integers, each by itself, because a payload begins at any address."""
    for byte in tl.static_range(SIZE):
        tl.store(out + places + byte, ((bits >> (8 * byte)) & 0xFF).to(tl.uint8), mask=exists)


@triton.jit
def _get(payload, places, exists, SIZE: tl.constexpr):
    """Integers of this many bytes."""
    bits = tl.load(payload + places, mask=exists, other=0).to(tl.int32)
    for byte in tl.static_range(1, SIZE):
        bits |= tl.load(payload + places + byte, mask=exists, other=0).to(tl.int32) << (8 * byte)
    return bits


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bf16_value(integers):
    """bf16, given as int16, as float32."""
    return _float(integers.to(tl.int32) << 16)


@triton.jit
def _bf16_bits(values):
    """float32 rounded to the nearest bf16, ties to even, as an integer."""
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(values == values, rounded, 0x7FFF)


@triton.jit
def _saturated(values):
    """As cast.saturating_copy: fp16 ends at 65504, and infinity becomes NaN."""
    cut = tl.where(values > 65504.0, 65504.0, tl.where(values < -65504.0, -65504.0, values))
    # 0.0 is added where x - x is: it turns -0 into 0
    return tl.where((values.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000, cut + 0.0, float("nan"))
