"""How much of a payload is really sent, for codecs whose payloads vary: predictions and `auto` need a number."""

from collections.abc import Sequence
from functools import lru_cache

import torch

from thinwire.compress.codec import Codec, Key, size_of

_KEY = Key(seed=0, boundary=0, channel="activations", phase="train", step=0, microbatch=0)
_MOST_ELEMENTS = 1 << 20


def sent_share(codec: Codec, shape: Sequence[int], dtype: torch.dtype) -> float:
    """The share of `nbytes` that Gaussian data of a shape take; 1 unless the codec varies.

    Of a large tensor some rows of the first dimension are measured.
    """
    return _measured(codec, tuple(shape), dtype) if codec.varies else 1.0


@lru_cache(maxsize=256)
def _measured(codec: Codec, shape: tuple[int, ...], dtype: torch.dtype) -> float:
    rows = torch.Size(shape[1:]).numel()
    shape = (min(shape[0], max(1, _MOST_ELEMENTS // max(1, rows))), *shape[1:]) if shape else shape
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    payload = torch.empty(size_of(codec, shape, dtype), dtype=torch.uint8)
    codec.encode(x, payload, _KEY)
    return codec.used(payload) / len(payload) if len(payload) else 1.0
