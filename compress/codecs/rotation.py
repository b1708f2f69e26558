"""q's option rotate="hadamard": each row turned before it is quantized, so that outliers are spread over it.

A grid must reach to the largest element of its block, so a few outliers leave coarse steps to all others. Turned, every
element is a sum of all with random signs: about Gaussian, whatever the row was (2506.01352 does so, among others).

    row of n elements     cut into pieces of powers of two, the largest first: 768 = 512 + 256, 7 = 4 + 2 + 1
    piece of m elements   y = H (d * x) / sqrt(m),    x = d * (H y) / sqrt(m)

H is the Walsh-Hadamard matrix of order m in natural order, [[H, H], [H, -H]] of the next smaller one, and d are signs.
Both directions are orthonormal and change no size. The signs are the first n bits of SHAKE-256 of a constant, bit k
being bit k % 8 of byte k // 8 and 1 meaning minus: the same for every row and message, so neither end remembers them.

H is applied as log2(m) rounds of sums and differences of two, and decoding ends with one multiplication: every machine
gets the same bits. A row is what `per="row"` means; every granularity of the scale then applies to turned elements.
"""

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from thinwire.compress.codec import Key
from thinwire.compress.codecs.cast import rounding_bound
from thinwire.compress.codecs.granularity import blocks_per
from thinwire.compress.codecs.quantizer import Wrapper

_SIGNS_OF = b"thinwire hadamard"
_CHUNK = 2**17
_NARROW = 64


class Rotated(Wrapper):
    """A quantizer of turned rows; its payload is the inner one's."""

    def nbytes(self, shape: Sequence[int]) -> int:
        """The size of the inner payload."""
        return self.inner.nbytes(shape)

    def encode(self, x: Tensor, out: Tensor, key: Key) -> None:
        """Write the inner payload of the turned rows."""
        self.inner.encode(_turned(x), out, key)

    def _decode_float32(self, payload: Tensor, values: Tensor) -> None:
        self.inner.decode(payload, values)
        turn_back_(_rows(values))

    def error_bound(self, x: Tensor) -> Tensor:
        """The bound of each piece of a row.

        An element's error is the sum of those of its turned piece, with some signs, over sqrt(m). It is as large as the
        sum of their bounds only if all conspire: typical errors are sqrt(m) times smaller.
        """
        turned = _turned(x)
        inner, turned = _rows(self.inner.error_bound(turned)), _rows(turned)
        bound = torch.empty_like(inner)
        for start, size in pieces(turned.shape[1]):
            part, errors = turned[:, start : start + size], inner[:, start : start + size]
            rounding = size.bit_length() * torch.finfo(torch.float32).eps
            length = part.double().norm(dim=1) + errors.double().norm(dim=1)
            total = errors.double().sum(1) / size**0.5 + 2 * rounding * length
            bound[:, start : start + size] = total.unsqueeze(1)
        bound += rounding_bound(_rows(x.detach()).float().abs() + bound, x.dtype)
        return bound.view(x.shape)


def turn(rows: Tensor) -> Tensor:
    """The float32 `rows` [R, n], each turned."""
    turned = torch.empty_like(rows, memory_format=torch.contiguous_format)
    for part, factors in _parts(rows.shape, rows.device):
        turned[part] = _sums_and_differences(rows[part] * factors)
    return turned


def turn_back_(rows: Tensor) -> None:
    """Undo `turn` on float32 `rows` [R, n], in place."""
    for part, factors in _parts(rows.shape, rows.device):
        torch.mul(_sums_and_differences(rows[part]), factors, out=rows[part])


def pieces(n: int) -> Iterator[tuple[int, int]]:
    """Yield where each piece of a row of `n` begins, and its size."""
    start = 0
    for exponent in reversed(range(n.bit_length())):
        if n >> exponent & 1:
            yield start, 1 << exponent
            start += 1 << exponent


def signs(n: int) -> Tensor:
    """The first `n` signs, +-1 as float32."""
    stream = bytearray(hashlib.shake_256(_SIGNS_OF).digest((n + 7) // 8))
    bits = torch.frombuffer(stream, dtype=torch.uint8).unsqueeze(1) >> torch.arange(8, dtype=torch.uint8) & 1
    return 1 - 2 * bits.view(-1)[:n].float()


def _parts(shape: Sequence[int], device: torch.device) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
    """Yield what is turned at once, a few rows of one piece, as indices, and its signs over sqrt(m)."""
    row_signs = signs(shape[1]).to(device)
    for start, size in pieces(shape[1]):
        columns = slice(start, start + size)
        factors = row_signs[columns] * size**-0.5
        rows = max(1, _CHUNK // size)  # what lies in the cache is turned twice as fast
        for first in range(0, shape[0], rows):
            yield (slice(first, first + rows), columns), factors


def _sums_and_differences(x: Tensor) -> Tensor:
    """H x for each row of `x`, float32 [R, m]."""
    # Neighbours are set far apart first: torch adds elements one by one where their distance is short.
    narrow = min(_NARROW, x.shape[1])
    columns = x.reshape(-1, narrow).t().clone(memory_format=torch.contiguous_format)
    columns = _rounds(columns, columns.shape[1], columns.numel())
    return _rounds(columns.t().contiguous().view(x.shape), narrow, x.shape[1])


def _rounds(x: Tensor, distance: int, stop: int) -> Tensor:
    """`x` after each round from that of elements `distance` apart to that of `stop` / 2; overwrites it."""
    out = torch.empty_like(x)
    while distance < stop:
        upper, lower = x.view(-1, 2, distance).unbind(1)
        sums, differences = out.view(-1, 2, distance).unbind(1)
        torch.add(upper, lower, out=sums)
        torch.sub(upper, lower, out=differences)
        x, out = out, x
        distance *= 2
    return x


def _turned(x: Tensor) -> Tensor:
    return turn(_rows(x.detach()).float()).view(x.shape)


def _rows(x: Tensor) -> Tensor:
    blocks = blocks_per("row", x.shape)
    return x.reshape(blocks.count, blocks.inner)
