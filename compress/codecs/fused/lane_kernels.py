"""The code of integers (coding/integers.py) on a GPU, by Triton kernels. Imported only where a tensor is on one.

In the lane code (coding/lanes.py) a program is a chunk of a plane, which has the high symbols or the low ones, and its
lanes are those of one warp: 16.8 M integers have 256 chunks of 32 lanes, which are coded at once, in 2,048 steps. What
a chunk writes goes to the end of its own room, and from there into the payload. Where that is depends on values, and
so does whether a payload is one. Both stay on the GPU: nobody waits for it.
"""

from functools import cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.compress.codecs.coding.lanes import CHUNK, lanes_of
from thinwire.compress.codecs.coding.scales import MOST_OFFSET, MOST_WIDTH, RARE, Scales, known
from thinwire.compress.codecs.coding.tables import (
    CLASSES,
    LARGEST,
    NO_BITS,
    OCTAVE,
    OWN,
    UNIT,
    ZERO,
    classes,
    tables,
)
from thinwire.compress.codecs.fused.trial import on
from thinwire.compress.codecs.granularity import Blocks
from thinwire.compress.transfer import put

_PART, _ROWS = 1024, 32
"""Columns, words or bytes of a program, and rows that it adds up."""
_CLASSES, _NO_BITS, _OCTAVE, _OWN, _ZERO = map(tl.constexpr, (CLASSES, NO_BITS, OCTAVE, OWN, ZERO))
_LARGEST, _MOST_OFFSET, _UNIT = map(tl.constexpr, (LARGEST, MOST_OFFSET, UNIT))
"""For kernels, which read no other numbers of a module."""


def encode(integers: Tensor, columns: Blocks, room: int) -> tuple[Tensor, Tensor]:
    """The code of integers, int16 [n], with zeros behind it, uint8 [room], and its length, int64 [1].

    If there is no room, it is cut.
    """
    device, sizes, (chunks, every, lanes) = integers.device, _sizes(columns), _chunks(columns)
    new, zeros = partial(torch.empty, device=device), partial(torch.zeros, device=device)
    with on(device):
        scales = _choose(integers, columns)
        lists, planes, (packed, _, reach) = (scales.means, scales.columns, scales.rows), scales.planes, _known(device)
        out, at = zeros(room, dtype=torch.uint8), zeros(5, dtype=torch.int64)
        for values, begin in zip(lists, at, strict=False):
            _pack[_parts(values)](values, *values.aminmax(), begin, out, room, len(values), _PART)
        words, apart = new(2, chunks, CHUNK, dtype=torch.int16), new(chunks, CHUNK, dtype=torch.int16)
        made = words, apart, new(3, chunks, dtype=torch.int64), new(2, chunks, lanes, dtype=torch.int32)
        _encode[(chunks, 2)](integers, *lists, planes, reach, packed, *made, *sizes, CHUNK, lanes, num_warps=1)
        grid = chunks, 2, triton.cdiv(CHUNK, _PART)
        _place[grid](*made, planes, at[3:], out, room, chunks, every, CHUNK, lanes, _PART)
    return out, at[4:]


def decode(payload: Tensor, start: int, stop: Tensor, columns: Blocks) -> tuple[Tensor, Tensor]:
    """The integers, int16 [n], that a payload has from `start` to `stop`, int64 [], and whether it does, bool []."""
    device, given, (chunks, every, lanes) = payload.device, (payload, len(payload)), _chunks(columns)
    new, counts = partial(torch.empty, device=device), [columns.count, columns.count, columns.outer]
    at, lists = torch.full((7,), start, device=device), new(sum(counts), dtype=torch.int32).split(counts)
    integers, widths = new(columns.numel, dtype=torch.int16), new(3, dtype=torch.int32)
    apart, escapes = new(chunks, CHUNK, dtype=torch.int32), new(chunks, dtype=torch.int64)
    ended = new(2, chunks, dtype=torch.bool)
    with on(device):
        for values, begin, width in zip(lists, at, widths, strict=False):
            _unpack[_parts(values)](*given, begin, width, values, len(values), _PART)
        known = *lists, Scales(*lists).planes, _known(device)[1]
        for plane in range(2):
            made = *known, integers, apart, escapes, ended, *_sizes(columns)
            _decode[(chunks,)](*given, at[3 + plane :], *made, plane, every, CHUNK, lanes, num_warps=1)
        grid = chunks, triton.cdiv(CHUNK, _PART)
        _fill[grid](*given, at[5:], apart, escapes, integers, every, CHUNK, _PART)
    return integers, (stop < len(payload)) & (widths <= MOST_WIDTH).all() & ended.all() & (at[6] == stop)


def _choose(integers: Tensor, columns: Blocks) -> Scales:
    """What `choose` of coding/scales.py chooses for integers, int16 [n]."""
    device, (n, width, inner), (count, rows) = integers.device, _sizes(columns), (columns.count, columns.outer)
    zeros, part, size = partial(torch.zeros, dtype=torch.int64, device=device), min(_PART, _power(width)), rows * inner

    def add(means: Tensor, most: Tensor) -> tuple[Tensor, ...]:
        added: tuple[Tensor, ...] = zeros(2 * count + rows).split([count, count, rows])
        programs = triton.cdiv(width, part) * triton.cdiv(rows, _ROWS)
        _add[(programs,)](integers, means, most, *added, rows, width, inner, _ROWS, part)
        return added

    least, slope, bounds, with_offsets = known(device)
    votes, many, of_rows, means = zeros(15 + CLASSES + count).split([11, CLASSES, 4, count])
    kinds, chosen, offsets = means.new_empty(3 * count, dtype=torch.int8), torch.empty_like(means), zeros(rows)
    most = (RARE * add(means, torch.full((), 1 << 15, device=device))[2].sum() // n).clamp_(min=LARGEST)
    sums, sizes, _ = add(means, most)
    _centre[_parts(means)](sums, means, count, size, _PART)
    known_of = sizes, add(means, most)[1], means, votes, kinds
    _price[_parts(means)](*known_of, sizes.sum(), least, slope, bounds, count, size, len(bounds), _PART)
    _take[_parts(means)](*known_of, chosen, many, count, _PART)
    left, sums_of = add(means, most)[2], (many * with_offsets).sum(-1)
    given = left, *sums_of, of_rows, offsets, rows, inner
    _weigh[_parts(offsets)](*given, _PART)
    _settle[_parts(offsets)](*given, _PART)
    return Scales(means, chosen, offsets)


def _parts(values: Tensor) -> tuple[int]:
    return (triton.cdiv(len(values), _PART),)


def _power(n: int) -> int:
    power: int = triton.next_power_of_2(n)
    return power


def _sizes(columns: Blocks) -> tuple[int, int, int]:
    """All integers, those of a row, and the inner ones."""
    return columns.numel, columns.count * columns.inner, columns.inner


def _chunks(columns: Blocks) -> tuple[int, int, int]:
    """How many chunks there are, the power of two from there on, and their lanes."""
    chunks = triton.cdiv(columns.numel, CHUNK)
    return chunks, _power(chunks), lanes_of(columns.numel)


@cache
def _known(device: torch.device) -> tuple[Tensor, ...]:
    """Frequencies with starts, slots, and the reach of classes, int32."""
    arrays = tables().packed, tables().slot.reshape(-1), classes().reach
    return tuple(put(torch.from_numpy(each.astype("int32")), device) for each in arrays)


@triton.jit
def _add(integers, means, most, sums, sizes, left, rows, width, inner, ROWS: tl.constexpr, PART: tl.constexpr):
    tiles, most = tl.cdiv(width, PART), tl.load(most).to(tl.int32)
    at, first = tl.program_id(0) % tiles * PART + tl.arange(0, PART), tl.program_id(0) // tiles * ROWS
    inside = at < width
    mean = tl.load(means + at // inner, mask=inside, other=0).to(tl.int32)
    total, size = tl.zeros((PART,), tl.int32), tl.zeros((PART,), tl.int32)
    place = first.to(tl.int64) * width + at
    for row in range(first, tl.minimum(first + ROWS, rows)):
        value = tl.load(integers + place, mask=inside, other=0).to(tl.int32)
        value = tl.minimum(tl.maximum(value, -most), most)
        far = tl.where(inside, tl.abs(value - mean), 0)
        total, size = total + value, size + far
        tl.atomic_add(left + row, tl.sum(far, axis=0).to(tl.int64), sem="relaxed")
        place += width
    tl.atomic_add(sums + at // inner, total.to(tl.int64), mask=inside, sem="relaxed")
    tl.atomic_add(sizes + at // inner, size.to(tl.int64), mask=inside, sem="relaxed")


@triton.jit
def _mine(n, PART: tl.constexpr):
    """The indices of a program, and which of them exist."""
    at = tl.program_id(0) * PART + tl.arange(0, PART)
    return at, at < n


@triton.jit
def _centre(sums, means, n, size, PART: tl.constexpr):
    at, inside = _mine(n, PART)
    size += tl.zeros((PART,), tl.int64)
    # the dividend is positive, because the division of Triton rounds towards zero
    mean = (2 * tl.load(sums + at, mask=inside, other=0) + size + (size << 17)) // (2 * size) - (1 << 16)
    tl.store(means + at, tl.minimum(tl.maximum(mean, -_LARGEST), _LARGEST), mask=inside)


@triton.jit
def _extend(extents, values, inside):
    """Record how far the integers of a list lie from 0 on both sides, plus 128."""
    tl.atomic_max(extents, tl.max(tl.where(inside, _ZERO + values, 0), axis=0), sem="relaxed")
    tl.atomic_max(extents + 1, tl.max(tl.where(inside, _ZERO - values, 0), axis=0), sem="relaxed")


@triton.jit
def _width_of(extent):
    return tl.sum(((extent >> tl.arange(0, 8)) > 0).to(tl.int64), axis=0)


@triton.jit
def _bits_of_list(extents, n):
    return _width_of(tl.load(extents) + tl.load(extents + 1) - 2 * _ZERO) * n << _UNIT


@triton.jit
def _price(
    sizes, centred, means, votes, kinds, all_sizes, least, slope, bounds, n, size,
    BOUNDS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    at, inside = _mine(n, PART)
    own, left = tl.load(sizes + at, mask=inside, other=0), tl.load(centred + at, mask=inside, other=0)
    of_all = (tl.load(all_sizes) << _UNIT) // n // size
    for way in tl.static_range(3):
        total = tl.minimum(own, left) if way == 2 else own
        mean_size, kind = tl.where(way == 0, of_all, (total << _UNIT) // size), tl.zeros((PART,), tl.int64)
        for each in range(BOUNDS):
            kind += (mean_size >= tl.load(bounds + each)).to(tl.int64)
        bits = size * tl.load(least + kind) + total * tl.load(slope + kind)
        tl.atomic_add(votes + way, tl.sum(tl.where(inside, bits, 0), axis=0), sem="relaxed")
        _extend(votes + 3 + 2 * way, kind, inside)
        tl.store(kinds + way * n + at, kind.to(tl.int8), mask=inside)
    _extend(votes + 9, tl.where(left < own, tl.load(means + at, mask=inside, other=0), 0), inside)


@triton.jit
def _take(sizes, centred, means, votes, kinds, chosen, many, n, PART: tl.constexpr):
    at, inside = _mine(n, PART)
    one = tl.load(votes) + _bits_of_list(votes + 3, n)
    apart = tl.load(votes + 1) + _bits_of_list(votes + 5, n)
    shifted = tl.load(votes + 2) + _bits_of_list(votes + 7, n) + _bits_of_list(votes + 9, n)
    best = tl.where(shifted < tl.minimum(one, apart), 2, tl.where(apart < one, 1, 0))
    kind = tl.load(kinds + best * n + at, mask=inside, other=0).to(tl.int64)
    mean = tl.load(means + at, mask=inside, other=0)
    less = tl.load(centred + at, mask=inside, other=0) < tl.load(sizes + at, mask=inside, other=0)
    tl.store(chosen + at, kind, mask=inside)
    tl.store(means + at, tl.where(less & (best == 2), mean, 0), mask=inside)
    bins = tl.arange(0, 128)
    found = tl.histogram(tl.where(inside, kind, 127).to(tl.int32), 128)
    tl.atomic_add(many + bins, found.to(tl.int64), mask=bins < _CLASSES, sem="relaxed")


@triton.jit
def _weigh(left, sized, base, steep, votes, offsets, rows, inner, PART: tl.constexpr):
    at, inside = _mine(rows, PART)
    size, found = tl.load(left + at, mask=inside, other=0), tl.zeros((PART,), tl.int64)
    for each in range(2 * _MOST_OFFSET):
        middle = (inner * tl.load(sized + each) + inner * tl.load(sized + each + 1)) // 2
        found += ((size << _UNIT) >= middle).to(tl.int64)
    bits = inner * tl.load(base + found) + size * (tl.load(steep + found) // tl.load(sized + found))
    tl.atomic_add(votes, tl.sum(tl.where(inside, bits, 0), axis=0), sem="relaxed")
    tl.atomic_add(votes + 1, tl.sum(size, axis=0), sem="relaxed")
    _extend(votes + 2, found, inside)
    tl.store(offsets + at, found, mask=inside)


@triton.jit
def _settle(left, sized, base, steep, votes, offsets, rows, inner, PART: tl.constexpr):
    at, inside = _mine(rows, PART)
    slope = tl.load(steep + _MOST_OFFSET) // tl.load(sized + _MOST_OFFSET)
    still = rows * (inner * tl.load(base + _MOST_OFFSET)) + tl.load(votes + 1) * slope
    moved = tl.load(votes) + _bits_of_list(votes + 2, rows) < still
    found = tl.load(offsets + at, mask=inside, other=0)
    tl.store(offsets + at, tl.where(moved, found - _MOST_OFFSET, 0), mask=inside)


@triton.jit
def _class(means, kinds, offsets, place, inside, width, inner):
    """The mean, the table and the low bits of integers."""
    column = place % width // inner
    kind = tl.load(kinds + column, mask=inside, other=0) + tl.load(offsets + place // width, mask=inside, other=0)
    kind = tl.minimum(tl.maximum(kind, 0), _CLASSES - 1).to(tl.int32)
    bits = tl.maximum(kind - _OWN + _OCTAVE, 0) // _OCTAVE
    return tl.load(means + column, mask=inside, other=0).to(tl.int32), kind - _OCTAVE * bits, bits


@triton.jit
def _short_at(payload, byte, nbytes, inside):
    """The int16 at these bytes, int64; beyond the end, 0."""
    inside = inside & (byte + 1 < nbytes)
    low, high = tl.load(payload + byte, mask=inside, other=0), tl.load(payload + byte + 1, mask=inside, other=0)
    return low.to(tl.int64) | (high.to(tl.int64) << 8)


@triton.jit
def _put_short(value, out, byte, limit, inside):
    """Write two bytes of integers, where there is room."""
    inside = inside & (byte + 1 < limit)
    tl.store(out + byte, (value & 255).to(tl.uint8), mask=inside)
    tl.store(out + byte + 1, ((value >> 8) & 255).to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["limit"])
def _pack(values, least, most, at, out, limit, n, PART: tl.constexpr):
    begin, least, some = tl.load(at), tl.load(least), tl.program_id(0) * PART + tl.arange(0, PART)
    width = _width_of(tl.load(most) - least)
    size, packed = (width * n + 7) // 8, tl.zeros((PART,), tl.int64)
    for bit in range(8):
        place = some.to(tl.int64) * 8 + bit
        which = place // tl.maximum(width, 1)
        value = tl.load(values + which, mask=which < n, other=least) - least
        packed |= ((value >> (place - which * width)) & 1) << bit
    tl.store(out + begin + 2 + some, packed.to(tl.uint8), mask=(some < size) & (begin + 2 + some < limit))
    _put_short((least & 255) | (width << 8), out, begin + some, limit, some == 0)
    tl.store(at + 1, begin + 2 + size)


@triton.jit(do_not_specialize=["nbytes"])
def _unpack(payload, nbytes, at, widths, values, n, PART: tl.constexpr):
    begin, some = tl.load(at), tl.program_id(0) * PART + tl.arange(0, PART)
    head = tl.sum(
        tl.where(some % PART == 0, _short_at(payload, begin + some % PART, nbytes, some % PART == 0), 0), axis=0
    )
    least, width = (head & 127) - (head & 128), head >> 8
    bit = some.to(tl.int64) * width
    word = _short_at(payload, begin + 2 + (bit >> 3), nbytes, some < n)
    value = least + ((word >> (bit & 7)) & ((1 << tl.minimum(width, 8)) - 1))
    tl.store(values + some, value.to(tl.int32), mask=some < n)
    tl.store(widths, width.to(tl.int32))
    tl.store(at + 1, begin + 2 + (width * n + 7) // 8)


@triton.jit
def _encode(
    integers, means, kinds, offsets, planes, reach, packed, words, apart, held, states, n, width, inner,
    CHUNK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    chunks, plane, lane = tl.num_programs(0), tl.program_id(1), tl.arange(0, LANES)
    chunk, begin = tl.program_id(0) + plane * chunks, tl.program_id(0).to(tl.int64) * CHUNK
    end, stop, aside = (chunk + 1).to(tl.int64) * CHUNK, tl.minimum(n, begin + CHUNK), begin + CHUNK
    steps = tl.where(plane < tl.load(planes), (stop - begin + LANES - 1) // LANES, 0)
    state, at = tl.full((LANES,), 1 << 16, tl.int64), end
    place = begin + (steps - 1) * LANES + lane
    ahead = tl.load(integers + place, mask=(place >= begin) & (place < stop), other=0)
    for back in range(steps):
        place = begin + (steps - 1 - back) * LANES + lane
        inside = place < stop
        mean, table, bits = _class(means, kinds, offsets, place, inside, width, inner)
        # the stores of a step hold up a load behind them
        whole, ahead = ahead, tl.load(integers + place - LANES, mask=place - LANES >= begin, other=0)
        value = whole.to(tl.int32) - mean + ((1 << bits) >> 1)
        high = value >> bits
        escaped = tl.abs(high) > tl.load(reach + table)
        symbol = table * 256 + tl.where(escaped, 0, high + _ZERO)
        low = (bits + _NO_BITS) * 256 + tl.where(escaped, 0, value - (high << bits))
        entry = tl.load(packed + tl.where(plane == 0, symbol, low), mask=inside, other=4096)
        frequency = (entry & 0x1FFF).to(tl.int64)
        full, gone = (state >> 20) >= frequency, escaped & inside & (plane == 0)
        both = full.to(tl.int32) + (gone.to(tl.int32) << 16)
        before, total = tl.cumsum(both, axis=0) - both, tl.sum(both, axis=0)
        at, aside = at - (total & 0xFFFF), aside - (total >> 16)
        tl.store(words + at + (before & 0xFFFF), (((state & 0xFFFF) ^ 0x8000) - 0x8000).to(tl.int16), mask=full)
        tl.store(apart + aside + (before >> 16), whole, mask=gone)
        state = tl.where(full, state >> 16, state)
        # of 32 bits, because a division of 64 takes a GPU several times as long
        quotient = (state.to(tl.uint32) // frequency.to(tl.uint32)).to(tl.int64)
        state = (quotient << 12) + (state - quotient * frequency) + (entry >> 16)
    tl.store(held + chunk, end - at)
    tl.store(held + 2 * chunks + tl.program_id(0), begin + CHUNK - aside, mask=plane == 0)
    tl.store(states + chunk * LANES + lane, state.to(tl.uint32).to(tl.int32, bitcast=True))


@triton.jit
def _before(every, chunk, counts):
    """The counts of the chunks before one, its own, and all."""
    own = tl.sum(tl.where(every == chunk, counts, 0), axis=0)
    return tl.sum(tl.where(every < chunk, counts, 0), axis=0), own, tl.sum(counts, axis=0)


@triton.jit(do_not_specialize=["limit"])
def _place(
    words, apart, held, states, planes, at, out, limit, chunks,
    EVERY: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    chunk, plane, some = tl.program_id(0), tl.program_id(1), tl.program_id(2) * PART + tl.arange(0, PART)
    every, lane, head, planes = tl.arange(0, EVERY), tl.arange(0, LANES), chunks * (2 + 4 * LANES), tl.load(planes)
    if plane >= planes:
        return
    earlier, high, of_high = _before(every, chunk, tl.load(held + every, mask=every < chunks, other=0))
    first, low, of_low = _before(every, chunk, tl.load(held + chunks + every, mask=every < chunks, other=0))
    lone, gone, escapes = _before(every, chunk, tl.load(held + 2 * chunks + every, mask=every < chunks, other=0))
    begin, end = tl.load(at), (chunk + 1).to(tl.int64) * CHUNK
    behind = begin + head * planes + 2 * (of_high + of_low)
    inside = (some < gone) & (plane == 0)
    value = tl.load(apart + end - gone + some, mask=inside, other=0)
    _put_short(value, out, behind + 2 * (lone + some), limit, inside)
    tl.store(at + 1, behind + 2 * escapes)
    if plane == 1:
        begin, earlier, high = begin + head + 2 * of_high, first, low
    value = tl.load(words + plane.to(tl.int64) * chunks * CHUNK + end - high + some, mask=some < high, other=0)
    _put_short(value, out, begin + head + 2 * (earlier + some), limit, some < high)
    inside = (lane >= 0) & (tl.program_id(2) == 0)
    _put_short(high, out, begin + 2 * chunk + lane, limit, inside & (lane == 0))
    state, byte = tl.load(states + (plane * chunks + chunk) * LANES + lane), 2 * chunks + 4 * (chunk * LANES + lane)
    _put_short(state, out, begin + byte, limit, inside)
    _put_short(state >> 16, out, begin + byte + 2, limit, inside)


@triton.jit(do_not_specialize=["nbytes"])
def _decode(
    payload, nbytes, ats, means, kinds, offsets, planes, slots, integers, apart, escapes, ended, n, width, inner,
    PLANE: tl.constexpr, EVERY: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    chunks, chunk, lane, every = tl.num_programs(0), tl.program_id(0), tl.arange(0, LANES), tl.arange(0, EVERY)
    begin, head, coded = tl.load(ats), chunks * (2 + 4 * LANES), tl.load(planes) > PLANE
    first, own, total = _before(every, chunk, _short_at(payload, begin + 2 * every, nbytes, every < chunks))
    byte = begin + 2 * chunks + 4 * (chunk * LANES + lane)
    state = _short_at(payload, byte, nbytes, lane >= 0) | (_short_at(payload, byte + 2, nbytes, lane >= 0) << 16)
    at = begin + head + 2 * first
    end, start = at + 2 * own, chunk.to(tl.int64) * CHUNK
    tl.store(ats + 1, tl.where(coded, begin + head + 2 * total, begin))
    stop, aside = tl.minimum(n, start + CHUNK), start
    for step in range(tl.where(coded, (stop - start + LANES - 1) // LANES, 0)):
        place = start + step * LANES + lane
        inside = place < stop
        mean, table, bits = _class(means, kinds, offsets, place, inside, width, inner)
        if PLANE == 1:
            table = bits + _NO_BITS
        # beyond the end is the table of no bits, whose one symbol leaves a state as it is
        slot = tl.load(slots + tl.where(inside, table, _NO_BITS) * 4096 + (state & 4095).to(tl.int32)).to(tl.int64)
        symbol, slot = (slot & 255).to(tl.int32), slot & 0xFFFFFFFF
        if PLANE == 1:
            value = tl.load(integers + place, mask=inside, other=0).to(tl.int32) + symbol
        else:
            value = ((symbol - _ZERO) << bits) - ((1 << bits) >> 1) + mean
        tl.store(integers + place, value.to(tl.int16), mask=inside)
        state = (((slot >> 8) & 4095) + 1) * (state >> 12) + (slot >> 20)
        needs, gone = state < 65536, inside & (symbol == 0) & (PLANE == 0)
        both = needs.to(tl.int32) + (gone.to(tl.int32) << 16)
        before, taken = tl.cumsum(both, axis=0) - both, tl.sum(both, axis=0)
        tl.store(apart + aside + (before >> 16), (place - start).to(tl.int32), mask=gone)
        # damaged bytes may want more words than there are
        word = _short_at(payload, at + 2 * (before & 0xFFFF), nbytes, needs)
        state = tl.where(needs, (state << 16) | word, state)
        at, aside = at + 2 * (taken & 0xFFFF), aside + (taken >> 16)
    wrong = tl.sum((state != 65536).to(tl.int32), axis=0)
    tl.store(ended + PLANE * chunks + chunk, (coded == 0) | ((at == end) & (wrong == 0)))
    if PLANE == 0:
        tl.store(escapes + chunk, aside - start)


@triton.jit(do_not_specialize=["nbytes"])
def _fill(payload, nbytes, at, apart, escapes, integers, EVERY: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr):
    chunk, every, some = tl.program_id(0), tl.arange(0, EVERY), tl.program_id(1) * PART + tl.arange(0, PART)
    counts = tl.load(escapes + every, mask=every < tl.num_programs(0), other=0)
    first, own, total = _before(every, chunk, counts)
    begin, start = tl.load(at), chunk.to(tl.int64) * CHUNK
    place = start + tl.load(apart + start + some, mask=some < own, other=0)
    value = _short_at(payload, begin + 2 * (first + some), nbytes, some < own)
    tl.store(integers + place, value.to(tl.int16), mask=some < own)
    tl.store(at + 1, begin + 2 * total)
