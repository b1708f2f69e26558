"""q's option outliers=F: the largest elements of each row are sent apart, after LLM.int8 (2208.07339).

payload     | outliers, bf16 | their indices | payload of the rest |        packed as indices.py says

Rows are those of `per="row"`. Of a row's n elements the max(1, round(F*n)) of largest magnitude are outliers; of equals
the first. They are sent in bf16 for its range: in fp16 a gradient's outliers may become zero, an activation's may be
above 65504. Their places in the rest get a value that does not widen the grid: the value nearest to zero between the
least and the largest of the block's rest.

NaN counts as larger than any number. So if a row has no more NaN and infinities than outliers, they are decoded as they
are, and change nothing around them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compress.codec import Key, tensor_bytes
from thinwire.compress.codecs.cast import rounding_bound, saturating_copy
from thinwire.compress.codecs.granularity import Blocks, blocks_per
from thinwire.compress.codecs.indices import (
    indices_size,
    largest_magnitudes,
    pack_indices,
    put_values,
    unpack_indices,
    values_at,
)
from thinwire.compress.codecs.quantizer import Quantizer


@dataclass(frozen=True)
class OutliersApart(Quantizer):
    """A quantizer of each row without its outliers."""

    inner: Quantizer
    fraction: float
    """The share of each row's elements that are outliers."""
    blocks: Callable[[Sequence[int]], Blocks]
    """The blocks of the inner quantizer."""

    def count(self, n: int) -> int:
        """How many of a row's `n` elements are outliers."""
        return max(1, round(self.fraction * n))

    def nbytes(self, shape: Sequence[int]) -> int:
        """The size of the outliers, of their indices and of the inner payload."""
        return sum(self._sizes(shape)) + self.inner.nbytes(shape)

    def encode(self, x: Tensor, out: Tensor, key: Key) -> None:
        """Write the outliers, their indices, and the inner payload of the rest."""
        rest, indices, outliers = self._split(x)
        values, packed, inner = self._parts(out, x.shape)
        values.copy_(tensor_bytes(outliers.bfloat16()))
        pack_indices(indices, rest.shape[1], packed)
        self.inner.encode(rest.view(x.shape), inner, key)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write the rest, and the outliers in their places, computed in float32."""
        values = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        row = blocks_per("row", values.shape)
        sent, packed, inner = self._parts(payload, values.shape)
        self.inner.decode(inner, values)
        outliers = torch.empty(row.count, self.count(row.inner), dtype=torch.bfloat16, device=values.device)
        tensor_bytes(outliers).copy_(sent)
        indices = unpack_indices(packed, row.count, row.inner, self.count(row.inner))
        put_values(outliers.float(), indices, values)
        if values is not out:
            saturating_copy(values, out)

    def error_bound(self, x: Tensor) -> Tensor:
        """The inner quantizer's bound for the rest, and bf16's for outliers."""
        rest, indices, outliers = self._split(x)
        bound = self.inner.error_bound(rest.view(x.shape)).reshape(rest.shape)
        bound = put_values(rounding_bound(outliers.abs(), torch.bfloat16), indices, bound.clone())
        bound += rounding_bound(put_values(outliers, indices, rest).abs() + bound, x.dtype)
        return bound.view(x.shape)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rest [R, n], with the outliers' places filled, and the outliers' indices and values [R, k]."""
        row, blocks = blocks_per("row", x.shape), self.blocks(x.shape)
        values = x.detach().reshape(row.count, row.inner).float().contiguous()
        indices = largest_magnitudes(values, self.count(row.inner))
        outliers = values_at(indices, values)
        rest = put_values(torch.full_like(outliers, torch.inf), indices, values.clone())
        least = blocks.view(rest).amin((0, 2))
        most = blocks.view(put_values(torch.full_like(outliers, -torch.inf), indices, rest)).amax((0, 2))
        fill = torch.zeros_like(least).clamp_(least, most).masked_fill_(least > most, 0)
        fill = values_at(indices, blocks.spread(fill.unsqueeze(1), rest.shape))
        return put_values(fill, indices, rest), indices, outliers

    def _parts(self, payload: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """A payload's outliers, their indices, and the inner payload."""
        values_size, indices_bytes = self._sizes(shape)
        values, packed, inner = payload.tensor_split([values_size, values_size + indices_bytes])
        return values, packed, inner

    def _sizes(self, shape: Sequence[int]) -> tuple[int, int]:
        """The sizes of the outliers' values and of their indices."""
        row = blocks_per("row", shape)
        k = self.count(row.inner)
        return 2 * row.count * k, indices_size(row.count, row.inner, k)
