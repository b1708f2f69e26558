"""Indices by the gaps between them, for the option code="entropy" of topk.

    | symbols of all gaps, as in symbols.py | low bits of all gaps |

Indices are those of indices.py, counted over all samples, of the smaller side: K' of T. A gap is how many elements lie
between an index and the one before it. Its symbol is 4 * w + (gap >> w), where w, the number of its low bits, is 0
below 8, and else what leaves the three highest bits. Low bits are a little-endian stream as in bits.py.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.compress.codec import CodecError
from thinwire.compress.codecs.coding.symbols import decode_symbols, encode_symbols
from thinwire.compress.codecs.indices import check_count, complement, smaller_side

_HIGH_BITS = 3
_OF_WIDTH = 1 << (_HIGH_BITS - 1)
"""Symbols of each number of low bits."""


def pack_gaps(indices: Tensor, n: int) -> Tensor:
    """The coded `indices` [N, k] among `n`, at least one and not all: uint8 [any length], on a CPU."""
    total, listed = len(indices) * n, indices.cpu().view(-1)
    if smaller_side(len(listed), total) < len(listed):
        listed = complement(listed, total)
    gaps = listed.diff(prepend=listed.new_full((1,), -1)).sub_(1)
    widths = (torch.frexp(gaps.double()).exponent.long() - _HIGH_BITS).clamp_(min=0)
    symbols = (gaps >> widths).add_(_OF_WIDTH * widths).to(torch.uint8)
    bits = np.zeros(int(widths.sum()), np.bool_)
    for bit, which, places in _places(widths.numpy()):
        bits[places] = gaps.numpy()[which] >> bit & 1
    return torch.cat([encode_symbols(symbols), torch.from_numpy(np.packbits(bits, bitorder="little"))])


def unpack_gaps(payload: Tensor, samples: int, n: int, k: int) -> Tensor:
    """The indices [samples, k] among `n` that `pack_gaps` coded; CodecError if these bytes are no such code."""
    count, total = samples * k, samples * n
    listed = smaller_side(count, total)
    if not listed:
        raise CodecError(f"a payload must not code the indices of all {total} elements, or of none")
    symbols, low = decode_symbols(payload.cpu(), listed)
    widths = (symbols.long() // _OF_WIDTH).sub_(1).clamp_(min=0)
    widest, most, wanted = int(widths.max()), total.bit_length(), int(widths.sum())
    if widest > most:  # more would shift a gap below zero
        raise CodecError(f"a payload's gaps among {total} elements must have at most {most} low bits, got {widest}")
    gaps = symbols - _OF_WIDTH * widths << widths
    if len(low) != (wanted + 7) // 8:
        raise CodecError(f"a payload's gaps must have {wanted} low bits, and {len(low)} bytes are there")
    bits = np.unpackbits(low.numpy(), bitorder="little")
    for bit, which, places in _places(widths.numpy()):
        gaps.numpy()[which] |= bits[places].astype(np.int64) << bit
    indices = (gaps.clamp(max=total) + 1).cumsum(0).sub_(1)
    if int(indices[-1]) >= total:
        raise CodecError(f"a payload's indices must be below {total}, got {int(indices[-1])}")
    if listed < count:
        indices = complement(indices, total)
    check_count(indices, count)
    return indices.view(samples, k).to(payload.device)


def _places(widths: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
    """For each bit, which numbers of these widths have it, and where it is in the stream."""
    starts = widths.cumsum() - widths
    for bit in range(int(widths.max())):
        which = np.flatnonzero(widths > bit)
        yield bit, which, starts[which] + bit
