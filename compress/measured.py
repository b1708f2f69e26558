"""A codec measured on a tensor: how much it loses, and how much of a payload that varies is sent.

Feedback that sends differences (EF21, AQ-SGD) converges only around a contractive codec, |x - C(x)| <= c |x| with c
below 1; the theorem of 2206.01299 asks for c below sqrt(1/2).

A small c is not all. Where a classifier reads one token, that token has nearly all of the gradient. If all tokens
share a scale, it is that token's scale, and a grid without zero gives the others its smallest step, which may be a
thousand times what they had: c is 0.05, and nothing is learned.
"""

from functools import lru_cache

import torch
from torch import Tensor

from thinwire.compress.codec import NO_KEY, Codec, size_of

_MOST_ELEMENTS = 1 << 20


def contraction(codec: Codec, x: Tensor) -> float:
    """The measured c = |x - C(x)| / |x| in the Euclidean norm for this `x`; 0 if both are 0, NaN if not finite.

    Another tensor, or for a codec that rounds by chance another key, may give a larger c.
    """
    error, norm = (x.detach().double() - _there_and_back(codec, x).double()).norm(), x.detach().double().norm()
    return (error / norm).item() if error else 0.0


def swamped(codec: Codec, x: Tensor) -> float:
    """The share of `x`'s elements that this codec changes by more than their own size."""
    x = x.detach()
    return ((_there_and_back(codec, x) - x).abs() > x.abs()).float().mean().item()


def _there_and_back(codec: Codec, x: Tensor) -> Tensor:
    payload = torch.empty(codec.nbytes(x.shape, x.dtype), dtype=torch.uint8, device=x.device)
    decoded = torch.empty_like(x, memory_format=torch.contiguous_format)
    codec.encode(x, payload, NO_KEY)
    codec.decode(payload, decoded, NO_KEY)
    return decoded


@lru_cache(maxsize=256)
def sent_share(codec: Codec, shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """The share of `nbytes` that Gaussian data of this shape take; 1 unless the codec varies.

    Of a large shape some rows of the first dimension are measured.
    """
    if not codec.varies:
        return 1.0
    rows = max(1, _MOST_ELEMENTS // max(1, torch.Size(shape[1:]).numel()))
    shape = (min(shape[0], rows), *shape[1:]) if shape else shape
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(dtype)
    payload = torch.empty(size_of(codec, x.shape, x.dtype), dtype=torch.uint8)
    codec.encode(x, payload, NO_KEY)
    return codec.used(payload) / len(payload) if len(payload) else 1.0
