"""Integers in as few bytes as they need: classes of scale, the lane code, and what no table has as it is.

    | lists of scales | high symbols | low symbols | escapes, int16 |

An integer less its column's mean is v. Its class sends the b low bits of v apart (0 in most): v is cut into
high = v + 2**b // 2 >> b, and what of v + 2**b // 2 lies below. The high symbol is 128 + high, or an escape where the
table of the class has none; then the low bits are 0, and the integer itself follows behind all symbols. If no class has
low bits there are no low symbols.
"""

import torch
from torch import Tensor

from thinwire.compress.codec import CodecError, tensor_bytes
from thinwire.compress.codecs.coding.lanes import decode_lanes, encode_lanes, integers
from thinwire.compress.codecs.coding.scales import Scales, choose
from thinwire.compress.codecs.coding.tables import ESCAPE, NO_BITS, OCTAVE, OWN, ZERO, classes
from thinwire.compress.codecs.granularity import Blocks

_ESCAPE_BYTES = 2


def encode_integers(values: Tensor, columns: Blocks) -> list[Tensor]:
    """The bytes of integers, int16 [n] of these columns, in parts."""
    seen = columns.view(values.int())
    scales = choose(seen)
    table, bits = _tables(scales, columns)
    centred = (seen - scales.means.int().unsqueeze(1)).view(-1)
    half = (1 << bits) >> 1
    high = (centred + half) >> bits
    reach = torch.from_numpy(classes().reach)
    escaped = high.abs() > reach[table.long()]
    symbols = torch.where(escaped, ESCAPE, high + ZERO).to(torch.uint8)
    parts = [*scales.packed(), *encode_lanes(table, symbols)]
    if scales.planes == 2:
        low = (centred + half - (high << bits)).masked_fill_(escaped, 0)
        parts += encode_lanes((bits + NO_BITS).to(torch.uint8), low.to(torch.uint8))
    return [*parts, tensor_bytes(values[escaped])]


def decode_integers(coded: Tensor, columns: Blocks) -> Tensor:
    """The integers, int16 [n] of these columns, that `encode_integers` wrote; CodecError if these bytes are no code."""
    scales, coded = Scales.read(coded, columns.outer, columns.count)
    table, bits = _tables(scales, columns)
    symbols, coded = decode_lanes(table, coded)
    values = (symbols.int() - ZERO) << bits
    if scales.planes == 2:
        low, coded = decode_lanes((bits + NO_BITS).to(torch.uint8), coded)
        values += low - ((1 << bits) >> 1)
    values = (columns.view(values) + scales.means.int().unsqueeze(1)).view(-1).to(torch.int16)
    escaped = symbols == ESCAPE
    wanted = _ESCAPE_BYTES * int(escaped.sum())
    if len(coded) != wanted:
        raise CodecError(f"a payload's escapes must have {wanted} bytes, and {len(coded)} are there")
    values[escaped] = integers(coded, torch.int16).to(torch.int16)
    return values


def _tables(scales: Scales, columns: Blocks) -> tuple[Tensor, Tensor]:
    """The number of the table, uint8, and of the low bits, int32, of each integer [n]."""
    kinds = scales.classes()
    bits = (kinds - OWN + OCTAVE).clamp_(min=0) // OCTAVE
    shape = columns.outer, columns.count, columns.inner
    table = (kinds - OCTAVE * bits).to(torch.uint8)
    return table.expand(shape).reshape(-1), bits.int().expand(shape).reshape(-1)
