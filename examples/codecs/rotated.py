"""Rows are rotated before another codec sends them, and back after, so that outliers are spread over the row.

    thinwire simulate quickstart --codec 'rotated.Rotated("q(4)")/q(8)'     in this folder

It helps where too many elements of a row are large to send them apart: a grid must reach the largest one, so they give
all others coarse steps. After the rotation every element is a sum of all with random signs: about Gaussian, whatever
the row was (2506.01352 does so, too). Of pretrained language models `q(8, step=0.2)` loses less in fewer bits.

    row of n elements     cut into pieces of powers of two, the largest first: 768 = 512 + 256, 7 = 4 + 2 + 1
    piece of m elements   y = H (d * x) / sqrt(m),    x = d * (H y) / sqrt(m)

H is the Walsh-Hadamard matrix of order m in natural order, [[H, H], [H, -H]] of the next smaller one, and d are signs.
Both directions are orthonormal, so they change no norm. The signs are the first n bits of SHAKE-256 of a constant. Bit
k is bit k % 8 of byte k // 8, and 1 means minus. Every row and message has the same signs, so neither end stores them.

H is applied as log2(m) rounds of sums and differences of two, and decoding ends with one multiplication, so every
machine gets the same bits. On the way back, a piece with an element of 2**96 or more is divided by 2**32, so that no
sum overflows where the result does not. Rows are those of `per="row"`.

payload     | that of the other codec for the rotated tensor, float32 |
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from thinwire.compress import Codec, CodecError, Key, parse
from thinwire.compress.codec import require_floating
from thinwire.compress.codecs.cast import infinite_beyond, rounding_bound, saturating_copy
from thinwire.compress.codecs.granularity import blocks_per

_SIGNS_OF = b"thinwire hadamard"
_CHUNK = 2**17
_NARROW = 64
_HUGE, _SHRUNK = 2.0**96, 2.0**-32


@dataclass(frozen=True, repr=False)
class Rotated(Codec):
    """`rotated.Rotated(of)`: the codec `of`, an expression such as "q(4)", for rotated rows.

    An element's error is a sum of the errors of its rotated piece, with signs, over sqrt(m). Typical errors are those
    of the other codec for the rotated row. One NaN or infinity spoils its row, and what the other codec spoils with it.
    """

    of: str

    def __post_init__(self) -> None:
        found = parse(self.of)
        if found.feedback or found.codec.reuses_indices:
            raise CodecError(f"{self.name} takes a codec without feedback or reuse, got {found}")

    @property
    def _other(self) -> Codec:
        return parse(self.of).codec

    @property
    def varies(self) -> bool:
        """Whether a payload may be shorter than `nbytes`."""
        return self._other.varies

    def used(self, payload: Tensor) -> int:
        """How many bytes of a payload are sent."""
        return self._other.used(payload)

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The size of the payload of the rotated tensor."""
        require_floating(self, dtype)
        return self._other.nbytes(shape, torch.float32)

    def error_bound(self, x: Tensor) -> Tensor:
        """The sum of the bounds of each rotated piece over sqrt(m), and roundings."""
        if not x.numel():
            return torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        turned = _turned(x)
        return self._spread(x.detach(), _rows(turned), _rows(self._other.error_bound(turned).expand(x.shape)))

    def error_bound_within(self, magnitudes: Tensor) -> Tensor:
        """The bound for rotated elements of any tensor of at most these magnitudes: of sqrt(n) times the largest."""
        if not magnitudes.numel():
            return torch.zeros(magnitudes.shape, dtype=torch.float32, device=magnitudes.device)
        most = magnitudes.detach().float().amax() * (1 + blocks_per("row", magnitudes.shape).inner ** 0.5)
        turned = most.expand(magnitudes.shape)
        errors = self._other.error_bound_within(turned).expand(magnitudes.shape)
        return self._spread(magnitudes.detach(), _rows(turned), _rows(errors))

    def _spread(self, x: Tensor, turned: Tensor, errors: Tensor) -> Tensor:
        """The bounds of x whose rotated rows may have these errors."""
        bound = torch.empty_like(errors, memory_format=torch.contiguous_format)
        for start, size in pieces(turned.shape[1]):
            part, own = turned[:, start : start + size], errors[:, start : start + size]
            rounding = size.bit_length() * torch.finfo(torch.float32).eps
            length = part.double().norm(dim=1) + own.double().norm(dim=1)
            total = own.double().sum(1) / size**0.5 + 2 * rounding * length
            bound[:, start : start + size] = total.unsqueeze(1)
        magnitude = _rows(x).float().abs()
        bound += rounding_bound(magnitude + bound, x.dtype)
        return infinite_beyond(bound, magnitude, x.dtype).view(x.shape)

    def _encode(self, x: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        self._other.encode(_turned(x), out, key)

    def _decode(self, payload: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        values = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        self._other.decode(payload, values, key)
        turn_back_(_rows(values))
        saturating_copy(values, out)


def turn(rows: Tensor) -> Tensor:
    """The float32 `rows` [R, n], each rotated."""
    turned = torch.empty_like(rows, memory_format=torch.contiguous_format)
    for part, scaled_signs in _parts(rows):
        turned[part] = _sums_and_differences(rows[part] * scaled_signs)
    return turned


def turn_back_(rows: Tensor) -> None:
    """Undo `turn` on float32 `rows` [R, n], in place."""
    for part, scaled_signs in _parts(rows):
        values = rows[part]
        largest = torch.maximum(values.amax(1), values.amin(1).neg_()).unsqueeze_(1)
        shrunk = torch.ones_like(largest).masked_fill_(largest >= _HUGE, _SHRUNK)
        torch.mul(_sums_and_differences(values * shrunk), scaled_signs, out=values).div_(shrunk)


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
    row_signs = signs(rows.shape[1]).to(rows.device)
    for start, size in pieces(rows.shape[1]):
        columns, some = slice(start, start + size), max(1, _CHUNK // size)  # twice as fast if the rows fit the cache
        for first in range(0, len(rows), some):
            yield (slice(first, first + some), columns), row_signs[columns] * size**-0.5


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
    return x.reshape(blocks_per("row", x.shape).count, prod(x.shape) // blocks_per("row", x.shape).count)
