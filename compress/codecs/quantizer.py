"""What q is made of: a quantizer on a grid, and what may be put around it.

The options ``rotate`` and ``outliers`` are quantizers around quantizers. Each changes the tensor before the one inside
sees it, puts what the inside cannot know in front of the inner payload, and undoes the change on what the inside
decodes. So they combine with each other and with every grid, and a quantizer without them runs none of their code.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compress.codec import Key
from thinwire.compress.codecs.cast import saturating_copy


class Quantizer(ABC):
    """A codec's inside, for floating-point tensors with at least one element; see Codec for the arguments."""

    @abstractmethod
    def nbytes(self, shape: Sequence[int]) -> int:
        """Return the exact payload size in bytes, which no dtype changes."""

    @abstractmethod
    def encode(self, x: Tensor, out: Tensor, key: Key) -> None:
        """Write the payload of ``x``, which is left as it is, into ``out``."""

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write the decoded tensor into ``out``, which is contiguous."""

    @abstractmethod
    def error_bound(self, x: Tensor) -> Tensor:
        """Return how far from ``x`` its decoded elements can be, as float32 in the shape of ``x``."""


@dataclass(frozen=True)
class Around(Quantizer):
    """A quantizer around another one."""

    inner: Quantizer

    def decode(self, payload: Tensor, out: Tensor) -> None:  # noqa: D102
        values = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        self._decode_float32(payload, values)
        if values is not out:
            saturating_copy(values, out)

    @abstractmethod
    def _decode_float32(self, payload: Tensor, values: Tensor) -> None:
        """Write the decoded tensor into ``values``: float32 and contiguous."""
