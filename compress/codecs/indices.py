"""Indices: which k of a sample's n elements are sent, and how a payload holds them in few bytes.

Indices are int64 [N, k]: k for each of N samples, counted among the T = N*n elements of all samples, ascending. They
are chosen by magnitude or drawn at random. A payload holds them as one set of K = N*k, in the shorter of two forms. The
lengths follow from K and T alone:

    bitmap         | T bits: bit p is 1 for each p |
    Elias-Fano     | w low bits of each p | K' + ((T-1) >> w) bits: bit (p >> w) + i is 1 for the i-th p |

Elias-Fano lists the smaller side: the K' = K indices, or if K > T/2 the K' = T - K others. w = floor(log2(T / K')). If
K = T, the set takes no bytes. Low bits are packed as codes (see bits.py); if w is above 8, the lowest 8 of each come
first.

At K/T = 90, 80, 50, 30, 20, 10, 5 and 2 % an index costs 0.58, 1.06, 2.00, 3.33, 4.25, 5.25, 6.25 and 7.56 bits; its
entropy H(K/T) / (K/T) is 0.52, 0.90, 2.00, 2.94, 3.61, 4.69, 5.73 and 7.07.

On a CPU NumPy does the work: it selects and packs bits 20 times as fast as torch (selection.py) and bits.py. On other
devices torch does it, and the host does not look: it knows how many indices there are. So there a
payload with wrong indices is not refused, but decodes to values in wrong places; the checksum of a frame notices it
before.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from thinwire.compress.codec import CodecError, Words
from thinwire.compress.codecs.coding.bits import pack, packed_size, unpack
from thinwire.compress.codecs.selection import places_of_largest

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def magnitude_bits(x: Tensor) -> Tensor:
    """Integers in the same order as `|x|`, for floating `x` of any shape: int32, or int64 for float64.

    They are the bits of `x` without its sign. NaN is larger than infinity; among NaNs, the mantissa decides.
    """
    bits = x.view(_INTEGERS[x.itemsize])
    if x.itemsize < 4:
        bits = bits.int()
    return bits & _without_sign(x)


def largest(integers: Tensor, k: int) -> Tensor:
    """The indices [N, k] of the `k` largest of each row of integers [N, n]; of equals the first."""
    return _largest_masked(integers, -1, k)


def largest_magnitudes(x: Tensor, k: int) -> Tensor:
    """The indices [N, k] of the `k` largest `magnitude_bits` of each row of floating `x` [N, n]."""
    return _largest_masked(x.view(_INTEGERS[x.itemsize]), _without_sign(x), k)


def values_at(indices: Tensor, x: Tensor) -> Tensor:
    """The elements of `x` at `indices` [N, k], in the same shape."""
    return x.reshape(-1).index_select(0, indices.view(-1)).view(indices.shape)


def put_values(values: Tensor, indices: Tensor, x: Tensor) -> Tensor:
    """Write `values` [N, k] into contiguous `x` at `indices` [N, k], and return it."""
    x.view(-1).scatter_(0, indices.view(-1), values.view(-1))
    return x


def random_indices(words: Words, samples: int, n: int, k: int) -> Tensor:
    """`k` of `n` indices for each sample, every set of k equally likely: int64 [samples, k].

    They follow from the arguments alone, on every machine and in every version of NumPy: PCG64 never changes.
    """
    # Each element draws a 32-bit number, the k largest win; equal numbers change the odds by 2**-32 at most.
    draws = words((samples * n + 1) // 2).view(torch.int32)
    return largest(draws[: samples * n].view(samples, n), k)


def indices_size(samples: int, n: int, k: int) -> int:
    """Bytes of the indices of all samples, `k` of `n` each."""
    count, total = samples * k, samples * n
    if count in (0, total):
        return 0
    return min(packed_size(total, 1), _elias_fano_size(smaller_side(count, total), total))


def pack_indices(indices: Tensor, n: int, out: Tensor) -> None:
    """Write `indices` [N, k] among `n` into `out`: uint8 [indices_size(N, n, k)]."""
    if not len(out):
        return
    total, indices = len(indices) * n, indices.view(-1)
    count = len(indices)
    if not _elias_fano_is_shorter(count, total):
        _pack_ones(indices, total, out)
    elif smaller_side(count, total) == count:
        _pack_elias_fano(indices, total, out)
    else:
        _pack_elias_fano(complement(indices, total), total, out)


def unpack_indices(payload: Tensor, samples: int, n: int, k: int) -> Tensor:
    """The indices [samples, k] among `n` that pack_indices wrote; CodecError if it cannot have written this."""
    count, total = samples * k, samples * n
    if not len(payload):
        indices = torch.arange(count, device=payload.device)
    elif not _elias_fano_is_shorter(count, total):
        indices = _unpack_ones(payload, total, count)
    else:
        listed = smaller_side(count, total)
        indices = _unpack_elias_fano(payload, total, listed)
        if listed < count:
            indices = complement(indices, total)
            check_count(indices, count)
    return indices.view(samples, k)


def _on_host(x: Tensor) -> bool:
    """Whether NumPy may do the work, and the host look at values: for those of a GPU, it would have to wait."""
    return x.device.type == "cpu"


def _without_sign(x: Tensor) -> int:
    """The mask of all bits of floating `x` but the sign."""
    return (1 << (8 * x.itemsize - 1)) - 1


def _largest_masked(integers: Tensor, mask: int, k: int) -> Tensor:
    """The indices [N, k] of the `k` largest `integers & mask` of each row; of equals, the first."""
    samples, n = integers.shape
    if samples == 0 or k in (0, n):
        return torch.arange(samples * k, device=integers.device).view(samples, k)
    if _on_host(integers):
        return torch.from_numpy(places_of_largest(integers.numpy(), mask, k))
    return _by_threshold(integers & mask, k)


def _by_threshold(integers: Tensor, k: int) -> Tensor:
    """As `_largest_masked`, without a sort, and without a look of the host: by what is above the k-th largest."""
    samples, n = integers.shape
    # with sorted=False, topk on a GPU is a radix select; its places are not used, because of equals it takes any
    if 2 * k <= n:
        least = integers.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    else:
        least = integers.topk(n - k + 1, dim=1, largest=False, sorted=False).values.amax(1, keepdim=True)
    above, equal = integers > least, integers == least
    missing = k - above.sum(1, keepdim=True)
    marks = above | (equal & (equal.cumsum(1, dtype=torch.int32) <= missing))
    return _places_of(marks.reshape(-1), samples * k).view(samples, k)


def low_width(count: int, total: int) -> int:
    """floor(log2(total / count)): the low bits of an index that are sent as they are."""
    return (total // count).bit_length() - 1


def _elias_fano_size(count: int, total: int) -> int:
    width = low_width(count, total)
    low = sum(packed_size(count, bits) for _, bits in pieces(width))
    return low + packed_size(count + ((total - 1) >> width), 1)


def _elias_fano_is_shorter(count: int, total: int) -> bool:
    return _elias_fano_size(smaller_side(count, total), total) < packed_size(total, 1)


def smaller_side(count: int, total: int) -> int:
    """How many indices Elias-Fano lists: those of the set, or if they are fewer the others."""
    return min(count, total - count)


def complement(indices: Tensor, total: int) -> Tensor:
    """The indices below `total` that are not in `indices`, ascending."""
    missing = torch.ones(total, dtype=torch.bool, device=indices.device)
    missing.index_fill_(0, indices, False)
    return _places_of(missing, total - len(indices))


def _pack_elias_fano(indices: Tensor, total: int, out: Tensor) -> None:
    """Write ascending `indices` below `total` into `out`."""
    count = len(indices)
    width = low_width(count, total)
    out = pack_low_bits(indices, width, out)
    high = (indices >> width).add_(torch.arange(count, device=indices.device))
    _pack_ones(high, count + ((total - 1) >> width), out)


def _unpack_elias_fano(payload: Tensor, total: int, count: int) -> Tensor:
    """`count` ascending indices below `total`; CodecError if they are not in the payload."""
    width = low_width(count, total)
    low, rest = unpack_low_bits(payload, width, count)
    indices = _unpack_ones(rest, count + ((total - 1) >> width), count)
    indices.sub_(torch.arange(count, device=payload.device)).bitwise_left_shift_(width).bitwise_or_(low)
    if not _on_host(payload):
        return indices.clamp_(0, total - 1)  # a GPU that is asked for another index computes nothing more
    if int(indices.max()) >= total:
        raise CodecError(f"a payload's indices must be below {total}, got {int(indices.max())}")
    return indices


def pieces(width: int) -> Iterator[tuple[int, int]]:
    """Yield the pieces of `width` low bits, the lowest first: the first bit and the number of bits of each."""
    for shift in range(0, width, 8):
        yield shift, min(8, width - shift)


def pack_low_bits(numbers: Tensor, width: int, out: Tensor) -> Tensor:
    """Write the `width` low bits of each number into `out`; the rest of `out`."""
    for shift, bits in pieces(width):
        size = packed_size(len(numbers), bits)
        low = (numbers >> shift if shift else numbers).to(torch.uint8)
        pack(low.bitwise_and_((1 << bits) - 1), bits, out[:size])
        out = out[size:]
    return out


def unpack_low_bits(payload: Tensor, width: int, count: int) -> tuple[Tensor, Tensor]:
    """The `width` low bits of `count` numbers at the start of a payload, int64 [count]; the rest of the payload."""
    low = torch.zeros(count, dtype=torch.int64, device=payload.device)
    for shift, bits in pieces(width):
        size = packed_size(count, bits)
        low |= unpack(payload[:size], bits, count).long() << shift
        payload = payload[size:]
    return low, payload


def _pack_ones(indices: Tensor, length: int, out: Tensor) -> None:
    """Write `length` bits, those at `indices` 1, into `out`."""
    if _on_host(indices):
        bits = np.zeros(length, np.bool_)
        bits[indices.numpy()] = True
        out.copy_(torch.from_numpy(np.packbits(bits, bitorder="little")))
    else:
        ones = torch.zeros(length, dtype=torch.uint8, device=indices.device).index_fill_(0, indices, 1)
        pack(ones, 1, out)


def _unpack_ones(payload: Tensor, length: int, count: int) -> Tensor:
    """The places of the ones among the first `length` bits of `payload`: int64 [count]."""
    if _on_host(payload):
        bits = np.unpackbits(payload.numpy(), count=length, bitorder="little").view(np.bool_)
        indices = torch.from_numpy(np.flatnonzero(bits))
    else:
        indices = _places_of(unpack(payload, 1, length), count)
    check_count(indices, count)
    return indices


def _places_of(marks: Tensor, count: int) -> Tensor:
    """The places of the marks that are not zero, ascending; there should be `count`."""
    if _on_host(marks):
        return marks.nonzero().squeeze(1)
    places: Tensor = torch.nonzero_static(marks, size=count, fill_value=0)
    return places.squeeze(1)


def check_count(indices: Tensor, count: int) -> None:
    """Raise CodecError unless there are `count` indices."""
    if len(indices) != count:
        raise CodecError(f"a payload must hold {count} indices, got {len(indices)}")
