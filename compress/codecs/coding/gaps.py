"""Indices by the gaps between them, for the option code="entropy" of topk.

    | w low bits of each gap | symbols, Huffman-coded |

Indices are those of indices.py, counted over all samples, of the smaller side: K' of T. A gap is how many elements lie
between an index and the one before it. Its upper part, gap >> w, is as many symbols of 255 as fit into it, and one for
the rest. w = max(0, floor(log2(T / K')) - 3), so that upper parts are about 8 to 16. Low bits are packed as in
indices.py. For indices at random this takes 1.01 times their entropy, for others less.
"""

import torch
from torch import Tensor

from thinwire.compress.codec import CodecError
from thinwire.compress.codecs.coding.bits import packed_size
from thinwire.compress.codecs.coding.huffman import huffman, unhuffman
from thinwire.compress.codecs.indices import (
    check_count,
    complement,
    low_width,
    pack_low_bits,
    pieces,
    smaller_side,
    unpack_low_bits,
)

_FULL = 255
_UPPER_BITS = 3


def pack_gaps(indices: Tensor, n: int) -> Tensor:
    """The coded `indices` [N, k] among `n`, at least one and not all: uint8 [any length], on a CPU."""
    total, listed = len(indices) * n, indices.cpu().view(-1)
    if smaller_side(len(listed), total) < len(listed):
        listed = complement(listed, total)
    width = _width(len(listed), total)
    gaps = listed.diff(prepend=listed.new_full((1,), -1)).sub_(1)
    low = torch.empty(_low_size(len(listed), width), dtype=torch.uint8)
    pack_low_bits(gaps, width, low)
    return torch.cat([low, huffman(_symbols(gaps >> width))])


def unpack_gaps(payload: Tensor, samples: int, n: int, k: int) -> Tensor:
    """The indices [samples, k] among `n` that `pack_gaps` coded; CodecError if these bytes are no such code."""
    count, total = samples * k, samples * n
    listed = smaller_side(count, total)
    if not listed:
        raise CodecError(f"a payload must not code the indices of all {total} elements, or of none")
    width = _width(listed, total)
    size = _low_size(listed, width)
    if len(payload) <= size:
        raise CodecError(f"a payload must hold more than {size} bytes of indices, got {len(payload)}")
    coded = payload.cpu()
    upper = _uppers(unhuffman(coded[size:], listed + (total >> width) // _FULL), listed)
    gaps = (upper << width) | unpack_low_bits(coded[:size], width, listed)
    indices = (gaps + 1).cumsum(0).sub_(1)
    if int(indices[-1]) >= total:
        raise CodecError(f"a payload's indices must be below {total}, got {int(indices[-1])}")
    if listed < count:
        indices = complement(indices, total)
    check_count(indices, count)
    return indices.view(samples, k).to(payload.device)


def _width(count: int, total: int) -> int:
    """How many low bits of a gap are sent as they are."""
    return max(0, low_width(count, total) - _UPPER_BITS)


def _low_size(count: int, width: int) -> int:
    return sum(packed_size(count, bits) for _, bits in pieces(width))


def _symbols(upper: Tensor) -> Tensor:
    """The symbols of the upper parts of gaps, int64 [K]: uint8 [K or more]."""
    if int(upper.max()) < _FULL:
        return upper.to(torch.uint8)
    full = upper // _FULL
    ends = (full + 1).cumsum(0) - 1
    symbols = torch.full((int(ends[-1]) + 1,), _FULL, dtype=torch.uint8)
    symbols[ends] = (upper - full * _FULL).to(torch.uint8)
    return symbols


def _uppers(symbols: Tensor, count: int) -> Tensor:
    """The upper parts of `count` gaps, int64, from their symbols."""
    is_end = symbols != _FULL
    ends = is_end.nonzero().squeeze(1) if len(symbols) > count else torch.arange(len(symbols))
    check_count(ends, count)
    if len(symbols) == count:
        return symbols.long()
    if int(ends[-1]) != len(symbols) - 1:
        raise CodecError("a payload's indices must end with the rest of a gap")
    return symbols.long().cumsum(0)[ends].diff(prepend=torch.zeros(1, dtype=torch.int64))
