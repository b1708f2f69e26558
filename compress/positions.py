"""Positions: which k of a sample's n elements are sent, and the set of them in about as few bytes as it can take.

Positions are int64 [N, k]: for each of N samples, k places among its n elements, in ascending order. They are found by
magnitude or drawn at random. In a payload, those of all samples are one set of K = N*k among T = N*n elements, in the
shorter of two forms, whose lengths follow from K and T alone:

    bitmap         | T bits: bit p is 1 for each p |
    Elias-Fano     | w low bits of each p | K + ((T-1) >> w) bits: bit (p >> w) + i is 1 for the i-th p |

with w = floor(log2(T / K)), and in no bytes where K = T. Low bits are packed codes (see bits.py), beyond 8 bits first
the lowest 8 of each. At K/T = 50, 30, 20, 10, 5 and 2 % a position costs 2.00, 3.33, 4.25, 5.25, 6.25 and 7.56 bits;
its entropy H(K/T) / (K/T) is 2.00, 2.94, 3.61, 4.69, 5.73 and 7.07.

On a CPU the work is NumPy's, whose partition is 20 times as fast as torch's topk and whose bits are packed 20 times as
fast as ours; on other devices it is torch's. Both give the same positions and bytes.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.compress.bits import pack, packed_size, unpack

_BLOCK = 1 << 18
"""Elements that are partitioned at a time: a copy of more leaves the cache, and takes memory that the system may clear
and take back each time, which costs more than the partition."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def magnitude_bits(x: Tensor) -> Tensor:
    """Return integers ordered as ``|x|``, for floating ``x`` of any shape: int32, or int64 for float64.

    They are the bits of ``x`` without its sign. NaN is larger than infinity; among NaNs, the mantissa decides.
    """
    bits = x.view(_INTEGERS[x.itemsize])
    if x.itemsize < 4:
        bits = bits.int()
    return bits & ((1 << (8 * x.itemsize - 1)) - 1)


def largest(magnitude: Tensor, k: int) -> Tensor:
    """Return the positions [N, k] of the ``k`` largest of each row of integers [N, n]; of equals, the first."""
    samples, n = magnitude.shape
    if samples == 0 or k in (0, n):
        return torch.arange(k, device=magnitude.device).repeat(samples, 1)
    if _for_numpy(magnitude):
        return _largest_by_partition(magnitude, k)
    order = magnitude.sort(dim=1, descending=True, stable=True).indices
    return order[:, :k].sort(dim=1).values


def random_positions(seed: int, samples: int, n: int, k: int) -> Tensor:
    """Return ``k`` of ``n`` positions for each sample, any k as likely as any others: int64 [samples, k].

    They follow from the arguments alone, on every machine and with every version of NumPy, whose PCG64 is fixed.
    """
    # The largest of 32-bit numbers drawn for each element; equal ones tilt the odds by 2**-32 at most.
    draws = np.random.PCG64(seed).random_raw((samples * n + 1) // 2).view(np.int32)
    return largest(torch.from_numpy(draws[: samples * n]).view(samples, n), k)


def positions_size(samples: int, n: int, k: int) -> int:
    """Return how many bytes ``k`` of ``n`` positions take for each sample."""
    count, total = samples * k, samples * n
    if count in (0, total):
        return 0
    return min(packed_size(total, 1), _elias_fano_size(count, total))


def pack_positions(positions: Tensor, n: int, out: Tensor) -> None:
    """Write ``positions`` [N, k] among ``n`` into ``out``: uint8 [positions_size(N, n, k)]."""
    if not len(out):
        return
    places = (positions + _first_places(positions, n)).view(-1)
    count, total = places.numel(), len(positions) * n
    if not _elias_fano_is_shorter(count, total):
        _pack_ones(places, total, out)
        return
    width = _low_width(count, total)
    for shift, bits in _pieces(width):
        size = packed_size(count, bits)
        low = (places >> shift if shift else places).to(torch.uint8)
        pack(low.bitwise_and_((1 << bits) - 1), bits, out[:size])
        out = out[size:]
    high = (places >> width).add_(torch.arange(count, device=places.device))
    _pack_ones(high, count + ((total - 1) >> width), out)


def unpack_positions(payload: Tensor, samples: int, n: int, k: int) -> Tensor:
    """Return the positions [samples, k] among ``n`` that pack_positions wrote."""
    if not len(payload):
        return torch.arange(k, device=payload.device).repeat(samples, 1)
    count, total = samples * k, samples * n
    if not _elias_fano_is_shorter(count, total):
        places = _unpack_ones(payload, total, count)
    else:
        width = _low_width(count, total)
        low = torch.zeros(count, dtype=torch.int64, device=payload.device)
        for shift, bits in _pieces(width):
            size = packed_size(count, bits)
            low |= unpack(payload[:size], bits, count).long() << shift
            payload = payload[size:]
        places = _unpack_ones(payload, count + ((total - 1) >> width), count)
        places = places.sub_(torch.arange(count, device=payload.device)).bitwise_left_shift_(width).bitwise_or_(low)
    positions = places.view(samples, k)
    return positions.sub_(_first_places(positions, n))


def _for_numpy(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _largest_by_partition(magnitude: Tensor, k: int) -> Tensor:
    rows = magnitude.numpy()
    samples, n = rows.shape
    least = np.concatenate([_least_kept(some, k) for some in np.array_split(rows, _num_blocks(rows))])
    padded, kept = _padded(samples, n, k)
    np.greater_equal(rows, least, out=kept)
    places = np.flatnonzero(padded)
    if len(places) > samples * k + padded.size - kept.size:
        larger = rows > least
        room = k - np.count_nonzero(larger, axis=1, keepdims=True)
        # torch's, because it is eight times as fast as NumPy's
        rank = torch.from_numpy(rows == least).cumsum(1, dtype=torch.int32).numpy()
        kept &= larger | (rank <= room)
        places = np.flatnonzero(padded)
    positions = torch.from_numpy(places[: samples * k]).view(samples, k)
    return positions.sub_(_first_places(positions, n))


def _num_blocks(rows: NDArray[Any]) -> int:
    return max(1, min(len(rows), rows.size // _BLOCK))


def _least_kept(rows: NDArray[Any], k: int) -> NDArray[Any]:
    """Return the k-th largest of each row: [N, 1]."""
    n = rows.shape[1]
    # Where one value is half of a row, say the zeros after a ReLU, NumPy's partition takes 40 times as long and more
    # than sorting: its vectorised form gets no further with a pivot that is the smallest value.
    sample = np.sort(rows.reshape(-1)[:: rows.size // 1024 + 1])
    quarter = len(sample) // 4
    repetitive = (sample[quarter:] == sample[: len(sample) - quarter]).any()
    ordered = np.sort(rows, axis=1) if repetitive else np.partition(rows, n - k, axis=1)
    return ordered[:, n - k, None]


def _padded(samples: int, n: int, k: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return room for a mask [N, n] with k ones to a row, and for the mask alone: the rest are ones.

    NumPy searches for ones with a method for sparse arrays where at most a tenth are, which takes three times as long
    at a tenth. So many ones keep it from that.
    """
    size, ones = samples * n, samples * k
    padded = np.empty(size + max(0, (size - 10 * ones) // 9 + 1), np.bool_)
    padded[size:] = True
    return padded, padded[:size].reshape(samples, n)


def _first_places(positions: Tensor, n: int) -> Tensor:
    """Return where each sample begins among the elements of all: int64 [N, 1]."""
    return torch.arange(0, len(positions) * n, n, device=positions.device).unsqueeze(1)


def _low_width(count: int, total: int) -> int:
    return (total // count).bit_length() - 1


def _elias_fano_size(count: int, total: int) -> int:
    width = _low_width(count, total)
    low = sum(packed_size(count, bits) for _, bits in _pieces(width))
    return low + packed_size(count + ((total - 1) >> width), 1)


def _elias_fano_is_shorter(count: int, total: int) -> bool:
    return _elias_fano_size(count, total) < packed_size(total, 1)


def _pieces(width: int) -> Iterator[tuple[int, int]]:
    """Yield the bytes that ``width`` low bits are packed as, the lowest first: where each begins, and its bits."""
    for shift in range(0, width, 8):
        yield shift, min(8, width - shift)


def _pack_ones(places: Tensor, length: int, out: Tensor) -> None:
    """Write ``length`` bits, those at ``places`` 1, into ``out``."""
    if _for_numpy(places):
        bits = np.zeros(length, np.bool_)
        bits[places.numpy()] = True
        out.copy_(torch.from_numpy(np.packbits(bits, bitorder="little")))
    else:
        ones = torch.zeros(length, dtype=torch.uint8, device=places.device).index_fill_(0, places, 1)
        pack(ones, 1, out)


def _unpack_ones(payload: Tensor, length: int, count: int) -> Tensor:
    """Return where the ones are among the first ``length`` bits of ``payload``: int64 [count]."""
    if _for_numpy(payload):
        bits = np.unpackbits(payload.numpy(), count=length, bitorder="little").view(np.bool_)
        places = torch.from_numpy(np.flatnonzero(bits))
    else:
        places = unpack(payload, 1, length).nonzero().squeeze(1)
    assert len(places) == count, f"a payload of {count} positions holds {len(places)}"
    return places
