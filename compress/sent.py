"""How much of a payload is really sent, for codecs whose payloads vary: predictions and `auto` need a number."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from thinwire.compress.codec import NO_KEY, Codec, size_of

_MOST_ELEMENTS = 1 << 20


def sent_share(codec: Codec, shape: Sequence[int], dtype: torch.dtype, like: Tensor | None = None) -> float:
    """The share of `nbytes` that a tensor takes; 1 unless the codec varies.

    Of a large tensor some rows of the first dimension are measured.

    Args:
        codec: the codec.
        shape, dtype: those of the tensor that is coded.
        like: a tensor as it was sent, or some of its rows; None measures Gaussian data of this shape.
    """
    if not codec.varies:
        return 1.0
    return _gaussian_share(codec, tuple(shape), dtype) if like is None else _share(codec, some_rows(like).to(dtype))


def some_rows(x: Tensor) -> Tensor:
    """As many rows of the first dimension as are enough to measure a codec on."""
    return x[: _rows(x.shape)] if x.dim() else x


@lru_cache(maxsize=256)
def _gaussian_share(codec: Codec, shape: tuple[int, ...], dtype: torch.dtype) -> float:
    shape = (min(shape[0], _rows(shape)), *shape[1:]) if shape else shape
    return _share(codec, torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(dtype))


def _rows(shape: Sequence[int]) -> int:
    return max(1, _MOST_ELEMENTS // max(1, torch.Size(shape[1:]).numel()))


def _share(codec: Codec, x: Tensor) -> float:
    payload = torch.empty(size_of(codec, x.shape, x.dtype), dtype=torch.uint8)
    codec.encode(x, payload, NO_KEY)
    return codec.used(payload) / len(payload) if len(payload) else 1.0
