"""A codec of your own: every element becomes -s, 0 or +s. A byte holds five elements.

    thinwire simulate quickstart --training.steps 20 --codec 'ef(own_codec.Ternary)/q(8)'     in this folder
    python examples/own_codec.py                                                              the same from Python

A recipe names the class by its import path. The feedback `ef` around it adds the error of one message to the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from thinwire.compress import Codec, CodecError, Key
from thinwire.launch import cli

SCALE_BYTES = 4
"""A float32."""
WEIGHTS = (1, 3, 9, 27, 81)
"""The weights of the five base-3 digits in a byte."""


@dataclass(frozen=True, repr=False)
class Ternary(Codec):
    """The sign of each element above `threshold` times the mean magnitude, and zero for the other elements."""

    threshold: float = 0.7

    def __post_init__(self) -> None:
        if not 0 <= self.threshold < 1:
            raise CodecError(f"Ternary's threshold must be at least 0 and below 1, got {self.threshold}")

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The size of a scale, and of a byte for each five elements; 0 for a tensor without elements."""
        if not dtype.is_floating_point:
            raise CodecError(f"{self} compresses floating-point tensors, got {dtype}; send this tensor with none")
        elements = prod(shape)
        return SCALE_BYTES + -(-elements // len(WEIGHTS)) if elements else 0

    def error_bound(self, x: Tensor) -> Tensor:
        """The error of each decoded element; it and the element are rounded."""
        digits, scale = self._digits(x)
        distance = (x.float().view(-1) - digits * scale).abs().view(x.shape)
        return distance + (distance + scale) * torch.finfo(x.dtype).eps

    def _encode(self, x: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        digits, scale = self._digits(x)
        padding = -len(digits) % len(WEIGHTS)
        rows = torch.cat([digits + 1, digits.new_ones(padding)]).view(-1, len(WEIGHTS))
        out[:SCALE_BYTES] = scale.view(1).view(torch.uint8)
        out[SCALE_BYTES:] = (rows * torch.tensor(WEIGHTS)).sum(1).to(torch.uint8)

    def _decode(self, payload: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        scale = payload[:SCALE_BYTES].clone().view(torch.float32)
        rows = payload[SCALE_BYTES:].int().view(-1, 1) // torch.tensor(WEIGHTS) % 3
        out.copy_(((rows.view(-1)[: out.numel()] - 1) * scale).view(out.shape))

    def _digits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The digit -1, 0 or 1 of each element as float32, and the mean magnitude of the elements that are not 0."""
        flat = x.float().reshape(-1)
        kept = flat.abs() > self.threshold * flat.abs().mean()
        scale = (flat.abs() * kept).sum() / kept.sum().clamp(min=1)
        return flat.sign() * kept, scale


if __name__ == "__main__":
    raise SystemExit(
        cli.main(["simulate", "quickstart", "--training.steps", "20", "--codec", "ef(own_codec.Ternary)/q(8)"])
    )
