"""The codec reuse: a gradient is sent at the indices of the activation of the same micro-batch, which it need not send.

payload     | values |      in the format of the activations' codec
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compress.codec import Codec, CodecError, Key, require_floating
from thinwire.compress.codecs.sparse import Sparse

_NEEDS_INDICES = "reuse needs topk or randk on the activations of the same boundary"


@dataclass(frozen=True, repr=False)
class Reuse(Codec):
    """`reuse`: for gradients, the values at the indices of the activation of the same micro-batch.

    It works only after `bound_to` the activations' codec; before that every use raises CodecError.
    """

    name: ClassVar[str] = "reuse"
    channels: ClassVar[tuple[str, ...]] = ("gradients",)
    instead: ClassVar[str] = "use topk or randk there"
    takes_feedback: ClassVar[bool] = False
    reuses_indices: ClassVar[bool] = True

    def bound_to(self, activations: Codec) -> "BoundReuse":
        """The codec for gradients at the indices of `activations`, which must be topk or randk."""
        if not isinstance(activations, Sparse):
            raise CodecError(f"{_NEEDS_INDICES}, got {activations}")
        return BoundReuse(activations)

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Raise CodecError."""
        raise CodecError(_NEEDS_INDICES)

    def error_bound(self, x: Tensor) -> Tensor:
        """Raise CodecError."""
        raise CodecError(_NEEDS_INDICES)

    def _encode(self, x: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        raise CodecError(_NEEDS_INDICES)

    def _decode(self, payload: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        raise CodecError(_NEEDS_INDICES)


@dataclass(frozen=True, repr=False)
class BoundReuse(Codec):
    """`reuse` at the indices of the activation, which each message gets as `shared`: int64 [N, k].

    Format and scale of the values are those of the activations' codec: this is the derivative of that codec, with fixed
    indices, applied to the gradient.
    """

    name: ClassVar[str] = "reuse"

    activations: Sparse
    """The codec of the activations."""

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The size of the values."""
        require_floating(self, dtype)
        return self.activations.values_size(shape, dtype)

    def error_bound(self, x: Tensor) -> Tensor:
        """`|x|`, more where the activations' codec scales, and the values' own error."""
        return self.activations.bound_at_any_indices(x)

    def _encode(self, x: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        self.activations.encode_values(x, self._indices(shared, x), out, key)

    def _decode(self, payload: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        self.activations.decode_values(payload, self._indices(shared, out), out, key)

    def _indices(self, shared: Tensor | None, x: Tensor) -> Tensor:
        samples, n = self.activations.samples_of(x.shape)
        expected = (samples, self.activations.count(n))
        assert shared is not None and shared.shape == expected, f"reuse needs indices of shape {expected}"
        return shared

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__
