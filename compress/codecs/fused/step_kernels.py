"""The code of integers (coding/integers.py) and the grid of steps, compiled by Numba. Imported only where used.

The bytes are those of the torch operations there. Symbols go through buffers of one chunk, which stay in a cache.
"""

import numpy as np

from thinwire.compress.codecs.coding.lanes import CHUNK, MOST_LANES, SYMBOLS_OF_LANE
from thinwire.compress.codecs.coding.scales import MOST_OFFSET, RARE
from thinwire.compress.codecs.coding.tables import (
    CLASSES,
    ESCAPE,
    LARGEST,
    NO_BITS,
    OCTAVE,
    OWN,
    PROBABILITY_BITS,
    SYMBOLS,
    TOTAL,
    UNIT,
    ZERO,
)
from thinwire.compress.codecs.fused.cpu_kernels import TIES_TO_EVEN, compiled, copy, ends, floats

_LOWEST, _WORD_BITS = np.uint32(1 << 16), np.uint32(16)
_BITS, _FREQUENCY, _PLACE = np.uint32(PROBABILITY_BITS), np.uint32(0x1FFF), np.uint32(TOTAL - 1)
_FULL, _FOUR = np.uint32(20), np.uint32(4)
"""A state of at least frequency << 20 sends a word first."""
_OFFSETS = 2 * MOST_OFFSET + 1
_SOME, _ROWS = 1 << 15, 256
"""Of so many integers of 16 bits, less a mean, or of so many rows' the sum is below 2**31."""
_COLUMNS = 4096
_MAGNITUDE = np.uint16(0x7FFF)
_INFINITY, _NAN, _SMALLEST = np.uint16(0x7F80), np.uint16(0x7FC0), (127 - 125) << 7
_LARGEST, _LARGEST_BFLOAT16 = np.float32(3.4028234663852886e38), np.float32(3.3895313892515355e38)


@compiled
def measure(values, size, step, last, scales, integers):
    """Write the scales, bf16 as uint16, and the integers, int16, of blocks of `size` float32 values [n]."""
    for block in range(len(scales)):
        some = values[block * size : (block + 1) * size]
        out = integers[block * size : (block + 1) * size]
        low, high = floats(*ends(some.view(np.int32)))
        wide = min(np.float32(np.float32(_norm(some) / np.sqrt(np.float64(len(some)))) * step), _LARGEST_BFLOAT16)
        scale = max(np.float32(max(-low, high) / last), wide)
        if not (low > -np.inf and high < np.inf):
            scales[block] = _INFINITY if low == low else _NAN
            out[:] = 0
            continue
        bits = (np.int64(np.float32(scale).view(np.int32)) + 0xFFFF) >> 16
        bits = 0 if bits < _SMALLEST else bits
        scales[block] = np.uint16(bits)
        if bits == 0:
            out[:] = 0
            continue
        unit = np.int32(bits << 16).view(np.float32)
        limit = min(np.float32(np.floor(_LARGEST / unit)), last)
        for i in range(len(some)):
            whole = ((some[i] / unit) + TIES_TO_EVEN) - TIES_TO_EVEN
            out[i] = np.int16(np.int32(min(max(whole, -limit), limit)))


@compiled
def _norm(values):
    """The root of the sum of squares, in float64; in four sums, so that none waits for the one before."""
    sums, whole = np.zeros(4), len(values) // 4 * 4
    for i in range(0, whole, 4):
        for lane in range(4):
            sums[lane] += np.float64(values[i + lane]) * np.float64(values[i + lane])
    for i in range(whole, len(values)):
        sums[0] += np.float64(values[i]) * np.float64(values[i])
    return np.sqrt(sums.sum())


@compiled
def values(integers, scales, size, out):
    """Write integers times the scales of their blocks, float32 [n]."""
    for block in range(len(scales)):
        unit = np.int32(np.int32(scales[block]) << np.int32(16)).view(np.float32)
        some, place = integers[block * size : (block + 1) * size], out[block * size : (block + 1) * size]
        for i in range(len(some)):
            place[i] = np.float32(some[i]) * unit


@compiled
def encode_message(values, size, step, last, shape, known, out):
    """Write the payload of float32 values [n] in blocks of `size`: scales and integers."""
    count, width = (len(values) + size - 1) // size, 1 if last < 128 else 2
    scales, integers = np.empty(count, np.uint16), np.empty(len(values), np.int16)
    measure(values, size, step, last, scales, integers)
    head = 4 + 2 * count
    copy(scales.view(np.uint8), out[4:head])
    length = encode(integers, *shape, *known, out[head:-1])
    if length > 0:
        length += head
        out[length:] = 0
    else:
        length = len(out)
        plain = integers.view(np.uint8)
        for i in range(width * len(integers)):
            out[head + i] = plain[i * (3 - width)]
    for byte in range(4):
        out[byte] = np.uint8(length >> 8 * byte)


@compiled
def decode_message(payload, size, width, shape, slot, out):
    """Write the float32 values [n] of a payload of scales and integers; return False if it is none."""
    rows, columns, inner = shape
    count, length = (len(out) + size - 1) // size, np.int64(0)
    scales, integers = np.empty(count, np.uint16), np.empty(len(out), np.int16)
    head = 4 + 2 * count
    for byte in range(4):
        length |= np.int64(payload[byte]) << 8 * byte
    if length < head or length > len(payload):
        return False
    copy(payload[4:head], scales.view(np.uint8))
    for block in range(count):
        scales[block] &= _MAGNITUDE
    if length == len(payload):
        for i in range(len(out)):
            low, high = np.int32(payload[head + width * i]), np.int32(payload[head + width * (i + 1) - 1])
            integers[i] = np.int16(low | (high << 8)) if width == 2 else np.int16(np.int8(low))
    else:
        means, kinds, offsets = np.zeros(columns, np.int32), np.zeros(columns, np.int32), np.zeros(rows, np.int32)
        if not decode(payload[head:length], inner, means, kinds, offsets, slot, integers):
            return False
    values(integers, scales, size, out)
    return True


@compiled
def encode(integers, rows, columns, inner, mean, least, slope, bounds, reach, packed, out):
    """Write the code of integers [rows * columns * inner]; return its length, or -1 if there is no room."""
    means, kinds, offsets = np.zeros(columns, np.int32), np.zeros(columns, np.int32), np.zeros(rows, np.int32)
    _choose(integers, inner, mean, least, slope, bounds, means, kinds, offsets)
    at = _write_list(offsets, out, _write_list(kinds, out, _write_list(means, out, 0)))
    means, kinds = np.repeat(means, inner), np.repeat(kinds, inner)
    escapes, escaped = np.empty(len(integers) + 1, np.int16), 0
    for plane in range(2 if _has_low_bits(kinds, offsets) else 1):
        at, found = _encode_plane(integers, means, kinds, offsets, reach, packed, plane, escapes, out, at)
        escaped += found
    if at < 0 or at + 2 * escaped > len(out):
        return -1
    if escaped:
        copy(escapes[:escaped].view(np.uint8), out[at:])
    return at + 2 * escaped


@compiled
def encode_symbols(symbols, packed, out):
    """Write the lanes of uint8 symbols [n] of one table; return their length."""
    integers, reach, escapes = np.empty(len(symbols), np.int16), np.full(1, ZERO, np.int32), np.empty(1, np.int16)
    for i in range(len(symbols)):
        integers[i] = np.int16(symbols[i]) - np.int16(ZERO)
    kinds, offsets = _one_class(len(symbols))
    return _encode_plane(integers, kinds, kinds, offsets, reach, packed, 0, escapes, out, 0)[0]


@compiled
def decode_symbols(coded, slot, symbols):
    """Write the symbols that `encode_symbols` coded, uint8 [n]; return where they end, or -1 if these are none."""
    kinds, offsets = _one_class(len(symbols))
    return _decode_plane(coded, 0, kinds, offsets, slot, 0, symbols)


@compiled
def _one_class(n):
    """The classes of columns and the offsets of rows, where all are 0."""
    return np.zeros(_COLUMNS, np.int32), np.zeros(n // _COLUMNS + 1, np.int32)


@compiled
def _choose(integers, inner, mean, least, slope, bounds, means, kinds, offsets):
    """Scales.choose: write means, classes and offsets."""
    rows, columns = len(offsets), len(means)
    size, best = rows * inner, 0
    most = np.int32(max(LARGEST, RARE * _size(integers) // len(integers)))
    sums, sizes, left = np.zeros(columns, np.int64), np.zeros(columns, np.int64), np.zeros(rows, np.int64)
    _add(integers, inner, means, most, sums, sizes, left)
    plain, apart = np.empty(columns, np.int32), np.empty(columns, np.int32)
    centred, other, without = np.zeros(columns, np.int64), np.zeros(rows, np.int64), 0
    for column in range(columns):
        means[column] = min(max((2 * sums[column] + size) // (2 * size), -LARGEST), LARGEST)
    has_means = _width(means) > 0 or means[0] != 0
    if has_means:
        _add(integers, inner, means, most, sums, centred, other)
        for column in range(columns):
            if centred[column] >= sizes[column]:
                centred[column] = sizes[column]
                without += means[column] != 0
                means[column] = 0
    total = cost = np.int64(0)
    for column in range(columns):
        total += sizes[column]
        plain[column] = kind = _kind(sizes[column], size, bounds)
        cost += size * least[kind] + sizes[column] * slope[kind]
    kinds[:] = kind = _kind(total, size * columns, bounds)
    lowest = size * columns * least[kind] + total * slope[kind]
    cost += _bits_of_list(plain)
    if cost < lowest:
        kinds[:] = plain
        lowest, best = cost, 1
    if has_means:
        cost = _bits_of_list(means)
        for column in range(columns):
            apart[column] = kind = _kind(centred[column], size, bounds)
            cost += size * least[kind] + centred[column] * slope[kind]
        cost += _bits_of_list(apart)
        if cost < lowest:
            kinds[:] = apart
            best = 2
    if best != 2:
        means[:] = 0
    elif without:
        _add(integers, inner, means, most, sums, centred, left)
    else:
        left[:] = other
    expected, base, steep = np.zeros(_OFFSETS, np.int64), np.zeros(_OFFSETS, np.int64), np.zeros(_OFFSETS, np.int64)
    counts, low, high = np.zeros(CLASSES, np.int64), kinds.min(), kinds.max()
    for column in range(columns):
        counts[kinds[column]] += 1
    for offset in range(_OFFSETS):
        for of_column in range(low, high + 1):
            kind = min(max(of_column + offset - MOST_OFFSET, 0), CLASSES - 1)
            expected[offset] += counts[of_column] * mean[kind]
            base[offset] += counts[of_column] * inner * least[kind]
            steep[offset] += counts[of_column] * mean[kind] * slope[kind]
        steep[offset] //= expected[offset]
        expected[offset] *= inner
    for offset in range(_OFFSETS - 1):
        expected[offset] = (expected[offset] + expected[offset + 1]) // 2
    total, still = np.int64(0), np.int64(0)
    for row in range(rows):
        offsets[row] = np.searchsorted(expected[:-1], left[row] << UNIT, side="right")
        total += base[offsets[row]] + left[row] * steep[offsets[row]]
        still += base[MOST_OFFSET] + left[row] * steep[MOST_OFFSET]
    if total + _bits_of_list(offsets) < still:
        offsets -= np.int32(MOST_OFFSET)
    else:
        offsets[:] = 0


@compiled
def _size(integers):
    """The sum of all sizes."""
    total = np.int64(0)
    for first in range(0, len(integers), _SOME):
        added = np.int32(0)
        some = integers[first : first + _SOME]
        for i in range(len(some)):
            added += abs(np.int32(some[i]))
        total += added
    return total


@compiled
def _kind(total, count, bounds):
    return np.searchsorted(bounds, (total << UNIT) // count, side="right")


@compiled
def _add(integers, inner, means, most, sums, sizes, left):
    """Add up the integers of each column, and their sizes less its mean: by column and by row."""
    spread = np.repeat(means, inner)
    totals, magnitudes = np.zeros(len(spread), np.int32), np.zeros(len(spread), np.int32)
    sums[:] = 0
    sizes[:] = 0
    left[:] = 0
    for row in range(len(left)):
        some = integers[row * len(spread) : (row + 1) * len(spread)]
        for first in range(0, len(spread), _SOME):
            last = min(first + _SOME, len(spread))
            left[row] += _add_row(
                some[first:last], spread[first:last], most, totals[first:last], magnitudes[first:last]
            )
        if row % _ROWS == _ROWS - 1 or row == len(left) - 1:
            for i in range(len(spread)):
                sums[i // inner] += totals[i]
                sizes[i // inner] += magnitudes[i]
                totals[i] = magnitudes[i] = 0


@compiled
def _add_row(some, means, most, totals, magnitudes):
    added = np.int32(0)
    for column in range(len(some)):
        value = min(max(np.int32(some[column]), -most), most)
        size = np.int32(abs(np.int32(value - means[column])))
        totals[column] += value
        magnitudes[column] += size
        added += size
    return np.int64(added)


@compiled
def _width(values):
    """The bits of the largest less the least."""
    extent, width = values.max() - values.min(), 0
    while extent >> width:
        width += 1
    return width


@compiled
def _has_low_bits(kinds, offsets):
    return kinds.max() + offsets.max() >= OWN


@compiled
def _bits_of_list(values):
    return (_width(values) * len(values)) << UNIT


@compiled
def _write_list(values, out, at):
    """Write a list; return where it ends, or -1 if there is no room."""
    least, width = values.min(), _width(values)
    stop = at + 2 + (width * len(values) + 7) // 8
    if at < 0 or stop > len(out):
        return -1
    out[at], out[at + 1] = np.uint8(least & 255), np.uint8(width)
    out[at + 2 : stop] = 0
    for i in range(len(values) if width else 0):
        bit = width * i
        word = (values[i] - least) << (bit & 7)
        place = at + 2 + (bit >> 3)
        out[place] |= np.uint8(word & 255)
        if word >> 8:
            out[place + 1] |= np.uint8(word >> 8)
    return stop


@compiled
def _read_list(coded, at, values):
    """Read a list; return where it ends, or -1 if these bytes are none."""
    if at < 0 or at + 2 > len(coded):
        return -1
    least, width = np.int64(np.int8(coded[at])), np.int64(coded[at + 1])
    stop = at + 2 + (width * len(values) + 7) // 8
    if width > 8 or stop > len(coded):
        return -1
    for i in range(len(values)):
        bit = width * i
        place = at + 2 + (bit >> 3)
        word = np.int64(coded[place]) if width else np.int64(0)
        if place + 1 < stop:
            word |= np.int64(coded[place + 1]) << 8
        values[i] = least + ((word >> (bit & 7)) & ((1 << width) - 1))
    return stop


@compiled
def _lanes(n):
    lanes = 1
    while lanes < MOST_LANES and lanes * SYMBOLS_OF_LANE < n:
        lanes *= 2
    return lanes


@compiled
def _by_offset(kinds, offsets):
    """The table and the low bits of each column, uint8 [offsets in use, columns], and the place of each row's."""
    least, most = offsets.min(), offsets.max()
    places, count = np.full(most - least + 1, -1, np.int32), 0
    rows = offsets - np.int32(least)
    for row in range(len(rows)):
        if places[rows[row]] < 0:
            places[rows[row]] = count
            count += 1
    tables, bits = np.empty((count, len(kinds)), np.uint8), np.empty((count, len(kinds)), np.uint8)
    for offset in range(len(places)):
        if places[offset] >= 0:
            _tables_of(kinds, np.int32(least + offset), tables[places[offset]], bits[places[offset]])
    return tables, bits, places[rows]


@compiled
def _tables_of(kinds, offset, tables, bits):
    """Write the table and the low bits of each column where a row has this offset."""
    # in int32, so that the loop becomes vectors
    for j in range(len(kinds)):
        kind = min(max(np.int32(kinds[j] + offset), np.int32(0)), np.int32(CLASSES - 1))
        low = np.int32(max(np.int32(kind - np.int32(OWN - OCTAVE)), np.int32(0)) // np.int32(OCTAVE))
        tables[j], bits[j] = np.uint8(kind - low * np.int32(OCTAVE)), np.uint8(low)


@compiled
def _encode_plane(integers, means, kinds, offsets, reach, packed, plane, escapes, out, at):
    """Write the high symbols, and which integers escape; or the low ones.

    Returns where they end, or -1 if there is no room, and how many escape.
    """
    n, lanes = len(integers), _lanes(len(integers))
    chunks = (n + CHUNK - 1) // CHUNK
    # no more than is needed: the room of a chunk takes as long to get as a short message to code
    most = min(CHUNK, n)
    index, words, states = np.empty(most, np.uint16), np.empty(most + 1, np.uint16), np.empty(lanes, np.uint32)
    place, head = at, at + chunks * (2 + 4 * lanes)
    head_states, escaped = at + 2 * chunks, 0
    tables, bits, rows = _by_offset(kinds, offsets)
    reaches = np.take(reach, tables)
    if at < 0 or head > len(out):
        return -1, 0
    at = head
    for chunk in range(chunks):
        start, stop = chunk * CHUNK, min((chunk + 1) * CHUNK, n)
        escaped += _symbols(integers, start, stop, means, rows, tables, bits, reaches, plane, index, escapes[escaped:])
        first = _encode_lanes(index[: stop - start], packed, states, words)
        count = len(words) - first
        if at + 2 * count > len(out):
            return -1, 0
        out[place + 2 * chunk], out[place + 2 * chunk + 1] = np.uint8(count), np.uint8(count >> 8)
        for lane in range(lanes):
            for byte in range(4):
                out[head_states + 4 * (chunk * lanes + lane) + byte] = np.uint8(states[lane] >> np.uint32(8 * byte))
        if count:
            copy(words[first:].view(np.uint8), out[at:])
        at += 2 * count
    return at, escaped


@compiled
def _symbols(integers, start, stop, means, rows, tables, bits, reaches, plane, index, escapes):
    """Write table * 256 + symbol of each integer of a chunk, and those that escape; return how many these are."""
    columns, escaped, i = len(means), 0, start
    while i < stop:
        row, column = rows[i // columns], i % columns
        some = integers[i : min(i - column + columns, stop)]
        place = index[i - start : i - start + len(some)]
        known = means[column:], tables[row, column:], bits[row, column:], reaches[row, column:]
        if _symbols_of_row(some, *known, plane, place) and plane == 0:
            for j in range(len(some)):
                escapes[escaped] = some[j]
                escaped += (place[j] & np.uint16(SYMBOLS - 1)) == ESCAPE
        i += len(some)
    return escaped


@compiled
def _symbols_of_row(integers, means, tables, bits, reach, plane, index):
    """Write table * 256 + symbol of integers of one row; return how many of them escape."""
    escapes = np.int32(0)
    for j in range(len(integers)):
        table, low = np.int32(tables[j]), np.int32(bits[j])
        value = np.int32(np.int32(integers[j] - means[j]) + (np.int32(np.int32(1) << low) >> np.int32(1)))
        high = np.int32(value >> low)
        escaped = np.int32(abs(high)) > reach[j]
        escapes += np.int32(escaped)
        if plane:
            table = np.int32(low + np.int32(NO_BITS))
            symbol = np.int32(0) if escaped else np.int32(value - np.int32(high << low))
        else:
            symbol = np.int32(ESCAPE) if escaped else np.int32(high + np.int32(ZERO))
        index[j] = np.uint16(table * np.int32(SYMBOLS) + symbol)
    return escapes


@compiled
def _encode_lanes(index, packed, states, words):
    """Write the words of a chunk to the end of `words`, and the states; return the first word's place."""
    # unsigned, because each access by a signed index checks whether it is negative
    n, lanes, at = len(index), len(states), np.uint64(len(words) - 1)
    entries, low, full = np.empty(lanes, np.uint32), np.empty(lanes, np.uint16), np.empty(lanes, np.uint32)
    states[:] = _LOWEST
    for start in range((n - 1) // lanes * lanes, -1, -lanes):
        if lanes == MOST_LANES and n - start >= MOST_LANES:
            # in three loops, of which the second becomes vectors
            for lane in range(MOST_LANES):
                entries[lane] = packed[index[start + lane]]
            for lane in range(MOST_LANES):
                low[lane] = np.uint16(states[lane])
                states[lane], full[lane] = _with(states[lane], entries[lane])
            for lane in range(MOST_LANES - 1, -1, -1):
                words[at] = low[lane]
                at -= np.uint64(full[lane])
        else:
            for lane in range(min(lanes, n - start) - 1, -1, -1):
                words[at] = np.uint16(states[lane])
                states[lane], sends = _with(states[lane], packed[index[start + lane]])
                at -= np.uint64(sends)
    return np.int64(at) + 1


@compiled
def _with(state, entry):
    """A state with a symbol, and whether it sends its low bits first."""
    frequency = entry & _FREQUENCY
    sends = np.uint32((state >> _FULL) >= frequency)
    # a shift, because a branch that depends on data is slow
    state = state >> np.uint32(sends << _FOUR)
    # exact: the true quotient is below 2**20, and at least 2**-12 below the next integer
    quotient = np.uint32(np.int32(np.float64(state) / np.float64(frequency)))
    return np.uint32((quotient << _BITS) + (state - quotient * frequency) + (entry >> _WORD_BITS)), sends


@compiled
def decode(coded, inner, means, kinds, offsets, slot, integers):
    """Write the integers that `encode` coded; return False if these bytes are no code."""
    at = _read_list(coded, _read_list(coded, _read_list(coded, 0, means), kinds), offsets)
    if at < 0:
        return False
    has_low = _has_low_bits(kinds, offsets)
    means, kinds = np.repeat(means, inner), np.repeat(kinds, inner)
    symbols = np.empty(len(integers), np.uint8)
    at = _decode_plane(coded, at, kinds, offsets, slot, 0, symbols)
    escapes, escaped = np.empty(len(integers) + 1, np.int64), 0
    for start in range(0, len(integers), len(means)):
        stop = start + len(means)
        several = _centre(symbols[start:stop], means, integers[start:stop])
        for i in range(start, stop if several else start):
            escapes[escaped] = i
            escaped += symbols[i] == ESCAPE
    if has_low:
        at = _decode_plane(coded, at, kinds, offsets, slot, 1, symbols)
        bits, rows = _by_offset(kinds, offsets)[1:]
        for row in range(len(offsets)):
            start, stop = row * len(means), (row + 1) * len(means)
            _add_low(symbols[start:stop], means, bits[rows[row]], integers[start:stop])
    if at < 0 or len(coded) - at != 2 * escaped:
        return False
    for j in range(escaped):
        integers[escapes[j]] = np.int16(np.int32(coded[at + 2 * j]) | np.int32(coded[at + 2 * j + 1]) << 8)
    return True


@compiled
def _centre(symbols, means, integers):
    """Write the integers of high symbols of one row; return how many are escapes."""
    several = np.int32(0)
    for j in range(len(symbols)):
        integers[j] = np.int16(np.int32(symbols[j]) - np.int32(ZERO) + means[j])
        several += np.int32(symbols[j] == ESCAPE)
    return several


@compiled
def _add_low(symbols, means, bits, integers):
    """Turn the high symbols of one row, plus its means, into integers."""
    for j in range(len(symbols)):
        low = np.int32(bits[j])
        high = np.int32(np.int32(np.int32(integers[j]) - means[j]) << low)
        half = np.int32(np.int32(np.int32(1) << low) >> np.int32(1))
        integers[j] = np.int16(np.int32(high + np.int32(symbols[j])) - half + means[j])


@compiled
def _decode_plane(coded, at, kinds, offsets, slot, plane, symbols):
    """Write the high or the low symbols; return where they end, or -1 if these bytes are no such code."""
    n, lanes = len(symbols), _lanes(len(symbols))
    chunks = (n + CHUNK - 1) // CHUNK
    if at < 0 or at + chunks * (2 + 4 * lanes) > len(coded):
        return -1
    most = min(CHUNK, n)
    table, words, states = np.empty(most, np.uint8), np.empty(most + 1, np.uint16), np.empty(lanes, np.uint32)
    numbers, bits, rows = _by_offset(kinds, offsets)
    if plane:
        numbers = bits + np.uint8(NO_BITS)
    place, head_states = at, at + 2 * chunks
    at += chunks * (2 + 4 * lanes)
    for chunk in range(chunks):
        start, stop = chunk * CHUNK, min((chunk + 1) * CHUNK, n)
        count = np.int64(coded[place + 2 * chunk]) | np.int64(coded[place + 2 * chunk + 1]) << 8
        if count > stop - start or at + 2 * count > len(coded):
            return -1
        for lane in range(lanes):
            state = np.uint32(0)
            for byte in range(4):
                state |= np.uint32(coded[head_states + 4 * (chunk * lanes + lane) + byte]) << np.uint32(8 * byte)
            states[lane] = state
        copy(coded[at : at + 2 * count], words.view(np.uint8))
        words[count] = 0
        at += 2 * count
        _fill_tables(start, stop, rows, numbers, table)
        if not _decode_lanes(table, slot, states, words[: count + 1], symbols[start:stop]):
            return -1
    return at


@compiled
def _fill_tables(start, stop, rows, numbers, table):
    """Write the number of the table of each integer of a chunk."""
    columns, i = numbers.shape[1], start
    while i < stop:
        column = i % columns
        some = numbers[rows[i // columns], column : column + stop - i]
        copy(some, table[i - start :])
        i += len(some)


@compiled
def _decode_lanes(table, slot, states, words, symbols):
    """Write the symbols of a chunk; return whether words and states end as they must."""
    n, lanes, at, last, done = len(symbols), len(states), np.uint64(0), np.uint64(len(words) - 1), 0
    found = np.empty(lanes, np.uint32)
    if lanes == MOST_LANES:
        for start in range(0, n - MOST_LANES + 1, MOST_LANES):
            if at + np.uint64(MOST_LANES) > last:
                break
            # in three loops: the second becomes vectors, and no symbol waits for the words of those before
            for lane in range(MOST_LANES):
                found[lane] = slot[table[start + lane], states[lane] & _PLACE]
            for lane in range(MOST_LANES):
                symbols[start + lane] = np.uint8(found[lane])
                states[lane] = _without(states[lane], found[lane])
            for lane in range(MOST_LANES):
                states[lane], at = _refilled(states[lane], words[at], at)
            done = start + MOST_LANES
    for start in range(done, n, lanes):
        for lane in range(min(lanes, n - start)):
            entry = slot[table[start + lane], states[lane] & _PLACE]
            symbols[start + lane] = np.uint8(entry)
            states[lane], at = _refilled(_without(states[lane], entry), words[min(at, last)], at)
    ended = at == last
    for lane in range(lanes):
        ended = ended and states[lane] == _LOWEST
    return ended


@compiled
def _without(state, found):
    """A state without its symbol."""
    share = ((found >> np.uint32(8)) & _PLACE) + np.uint32(1)
    return np.uint32(share * (state >> _BITS) + (found >> np.uint32(20)))


@compiled
def _refilled(state, word, at):
    """A state with the next word, if it needs one, and the place of the word after it."""
    needs = np.uint32(state < _LOWEST)
    return np.uint32(state << np.uint32(needs << _FOUR)) | (np.uint32(word) * needs), at + np.uint64(needs)
