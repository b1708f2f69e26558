"""q's option rotate="hadamard": each row is rotated before it is quantized, so that outliers are spread over it.

A grid must reach the largest element of its block, so a few outliers give all others coarse steps. After the rotation
every element is a sum of all with random signs: about Gaussian, whatever the row was (2506.01352 does so, too).

    row of n elements     cut into pieces of powers of two, the largest first: 768 = 512 + 256, 7 = 4 + 2 + 1
    piece of m elements   y = H (d * x) / sqrt(m),    x = d * (H y) / sqrt(m)

H is the Walsh-Hadamard matrix of order m in natural order, [[H, H], [H, -H]] of the next smaller one, and d are signs.
Both directions are orthonormal, so they change no norm. The signs are the first n bits of SHAKE-256 of a constant. Bit
k is bit k % 8 of byte k // 8, and 1 means minus. Every row and message has the same signs, so neither end stores them.

H is applied as log2(m) rounds of sums and differences of two, and decoding ends with one multiplication, so every
machine gets the same bits. On the way back, a piece with an element of 2**96 or more is divided by 2**32, so that no
sum overflows where the result does not. Rows are those of `per="row"`; the blocks of the scales are blocks of rotated
elements.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from thinwire.compress.codec import Key
from thinwire.compress.codecs.cast import infinite_beyond, rounding_bound
from thinwire.compress.codecs.fused import cpu
from thinwire.compress.codecs.granularity import blocks_per
from thinwire.compress.codecs.quantizer import Wrapper
from thinwire.compress.transfer import put

Rotate = Literal["hadamard"]
"""How `rotate` rotates the rows."""

_SIGNS_OF = b"thinwire hadamard"
_CHUNK = 2**17
_LONG = 2**16
"""A longer row is rotated once, with the whole tensor, and not again for each part that has some of it."""
_NARROW = 64
_HUGE, _SHRUNK = 2.0**96, 2.0**-32


class Rotated(Wrapper):
    """A quantizer of rotated rows; its payload is the inner one's."""

    def nbytes(self, shape: Sequence[int]) -> int:
        """The size of the inner payload."""
        return self.inner.nbytes(shape)

    def encode(self, x: Tensor, out: Tensor, key: Key) -> None:
        """Write the inner payload of the rotated rows."""
        rows = _rows(x.detach())
        if rows.shape[1] > _LONG:
            self.inner.encode(_turned(x), out, key)
            return

        def made(start: int, stop: int) -> Tensor:
            first = start // rows.shape[1]
            turned = turn(rows[first : -(-stop // rows.shape[1])].float()).view(-1)
            return turned[start - first * rows.shape[1] : stop - first * rows.shape[1]]

        self.inner.encode_made(x.shape, x.device, made, out, key)

    def _decode_float32(self, payload: Tensor, values: Tensor) -> None:
        self.inner.decode(payload, values)
        turn_back_(_rows(values))

    def error_bound(self, x: Tensor) -> Tensor:
        """The bound of each piece of a row.

        An element's error is a sum of the errors of its rotated piece, with signs, over sqrt(m). The bound is the sum
        of all their bounds over sqrt(m); typical errors are sqrt(m) times smaller.
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
        magnitude = _rows(x.detach()).float().abs()
        bound += rounding_bound(magnitude + bound, x.dtype)
        return infinite_beyond(bound, magnitude, x.dtype).view(x.shape)


def reach_of(rotate: Rotate | None, shape: Sequence[int]) -> int:
    """How many times larger than all elements of a non-empty tensor rotation, there and back, may make one."""
    return 1 if rotate is None else blocks_per("row", shape).inner


def turn(rows: Tensor) -> Tensor:
    """The float32 `rows` [R, n], each rotated."""
    return cpu.turn(rows, factors(rows)) if cpu.covers_rows(rows) else turn_eagerly(rows)


def turn_back_(rows: Tensor) -> None:
    """Undo `turn` on float32 `rows` [R, n], in place."""
    if cpu.covers_rows(rows):
        cpu.turn_back_(rows, factors(rows))
    else:
        turn_back_eagerly_(rows)


def turn_eagerly(rows: Tensor) -> Tensor:
    """As `turn`, without a kernel."""
    turned = torch.empty_like(rows, memory_format=torch.contiguous_format)
    for part, scaled_signs in _parts(rows):
        turned[part] = _sums_and_differences(rows[part] * scaled_signs)
    return turned


def turn_back_eagerly_(rows: Tensor) -> None:
    """As `turn_back_`, without a kernel."""
    for part, scaled_signs in _parts(rows):
        values = rows[part]
        largest = torch.maximum(values.amax(1), values.amin(1).neg_()).unsqueeze_(1)
        shrunk = torch.ones_like(largest).masked_fill_(largest >= _HUGE, _SHRUNK)
        torch.mul(_sums_and_differences(values * shrunk), scaled_signs, out=values).div_(shrunk)


def factors(rows: Tensor) -> list[tuple[slice, Tensor]]:
    """The columns of each piece of `rows` [R, n], and its signs over sqrt(m)."""
    row_signs = put(signs(rows.shape[1]), rows.device)
    columns = [slice(start, start + size) for start, size in pieces(rows.shape[1])]
    return [(some, row_signs[some] * (some.stop - some.start) ** -0.5) for some in columns]


def pieces(n: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the size of each piece of a row of `n`."""
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


def _parts(rows: Tensor) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
    """Yield the indices of a few rows of one piece, rotated at once, and their signs over sqrt(m)."""
    for columns, scaled_signs in factors(rows):
        some = max(1, _CHUNK // len(scaled_signs))  # twice as fast if the rows fit the cache
        for first in range(0, len(rows), some):
            yield (slice(first, first + some), columns), scaled_signs


def _sums_and_differences(x: Tensor) -> Tensor:
    """H x for each row of `x`, float32 [R, m]."""
    # Neighbours are moved far apart first: torch adds elements one by one if their distance is short.
    narrow = min(_NARROW, x.shape[1])
    columns = x.reshape(-1, narrow).t().clone(memory_format=torch.contiguous_format)
    columns = _rounds(columns, columns.shape[1], columns.numel())
    return _rounds(columns.t().contiguous().view(x.shape), narrow, x.shape[1])


def _rounds(x: Tensor, distance: int, stop: int) -> Tensor:
    """`x` after the rounds of distance `distance`, twice that, and so on up to `stop` / 2; overwrites `x`."""
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
