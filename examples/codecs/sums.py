"""A sum of two codecs: the second sends what the first one loses.

    thinwire simulate quickstart --codec 'sums.Sum("topk(0.01)", "q(4)")/q(8)'     in this folder

It helps where the two are unlike: `topk` takes the few largest elements, and what is left suits a finer grid;
`low_rank.LowRank` takes what the rows of an activation have in common, and what is left suits a coarse grid.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compress import Codec, CodecError, Key, parse
from thinwire.compress.codecs.cast import saturating_copy


@dataclass(frozen=True, repr=False)
class Sum(Codec):
    """`first` sends the tensor, and `second` the difference to what that decodes to, one payload behind the other."""

    first: str
    second: str

    def __post_init__(self) -> None:
        for codec in (parse(self.first), parse(self.second)):
            if codec.feedback or codec.codec.reuses_indices or codec.codec.varies:
                raise CodecError(f"{self.name} takes codecs of a fixed size, without feedback or reuse, got {codec}")

    @property
    def _codecs(self) -> tuple[Codec, Codec]:
        return parse(self.first).codec.unscaled(), parse(self.second).codec

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The size of both payloads; the second codec gets float32."""
        first, second = self._codecs
        return first.nbytes(shape, dtype) + second.nbytes(shape, torch.float32)

    def error_bound(self, x: Tensor) -> Tensor:
        """The largest error of the second codec for any difference that the first one may leave, and roundings."""
        first, second = self._codecs
        left = first.error_bound(x).float().expand(x.shape)
        rounding = (x.float().abs() + left) * torch.finfo(torch.float32).eps
        of_second = second.error_bound_within(left + rounding).expand(x.shape)
        reach = x.float().abs() + of_second
        return of_second + 4 * rounding + reach * torch.finfo(x.dtype).eps + torch.finfo(x.dtype).tiny

    def _encode(self, x: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        first, second = self._codecs
        start = first.nbytes(x.shape, x.dtype)
        first.encode(x, out[:start], key)
        decoded = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        first.decode(out[:start], decoded, key)
        second.encode(x.float() - decoded.float(), out[start:], key.of("rest"))

    def _decode(self, payload: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        first, second = self._codecs
        start = first.nbytes(out.shape, out.dtype)
        first.decode(payload[:start], out, key)
        rest = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        second.decode(payload[start:], rest, key.of("rest"))
        saturating_copy(rest.add_(out), out)
