"""The codec autoencoder: a linear map to fewer features, and one back, both trained with the model (2301.02654).

payload     | payload of the first `rank` features of x, through the codec `values` |

The two maps are weights of the neighbouring stages, so they are layers and no part of this codec. The last layer of the
sending stage writes the narrow activation into the first features of a tensor as wide as before, and zeros into the
others; this codec sends the first features alone. So passes without compression send a tensor of the same shape.

The first layer of the receiving stage reads the first features alone, so all others have a gradient of zero. Whatever
the codec of the gradients is, it gets the first features alone too: `FirstFeatures`.

Features are the last dimension of a tensor, and the channels [N, C, H, W] of images.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compress.codec import Codec, CodecError, Key, require_floating, require_int, size_of
from thinwire.compress.codecs.blockwise import Blockwise
from thinwire.compress.codecs.cast import HighBytes
from thinwire.compress.progress import Progress
from thinwire.errors import attempt


class Narrow(Codec):
    """A codec that sends the first features of a tensor through another codec; the others are decoded as zeros."""

    @property
    @abstractmethod
    def _count(self) -> int:
        """How many features it sends, if there are so many."""

    @property
    @abstractmethod
    def _through(self) -> Codec:
        """The codec that sends them."""

    @property
    def varies(self) -> bool:
        """Whether a payload may be shorter than `nbytes`."""
        return self._through.varies

    def used(self, payload: Tensor) -> int:
        """How many bytes of a payload are sent."""
        return self._through.used(payload)

    def entropy_bits(self, payload: Tensor, shape: Sequence[int]) -> float:
        """The least bits for the features that are sent."""
        return self._through.entropy_bits(payload, self._shape(shape))

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The size of the features that are sent."""
        require_floating(self, dtype)
        return size_of(self._through, self._shape(shape), dtype) if prod(shape) else 0

    def error_bound(self, x: Tensor) -> Tensor:
        """The bound of the other codec for what is sent, and `|x|` for the rest."""
        return self._bound(x, self._through.error_bound(self._part(x.detach())))

    def error_bound_within(self, magnitudes: Tensor) -> Tensor:
        """As `error_bound`, for any tensor of at most these `magnitudes`."""
        return self._bound(magnitudes, self._through.error_bound_within(self._part(magnitudes.detach())))

    def _bound(self, x: Tensor, of_part: Tensor) -> Tensor:
        bound = x.detach().abs().float()
        self._part(bound).copy_(of_part.expand(self._shape(x.shape)))
        return bound

    def _encode(self, x: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        self._through.encode(self._part(x), out, key, shared)

    def _decode(self, payload: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        part = torch.empty(self._shape(out.shape), dtype=out.dtype, device=out.device)
        self._through.decode(payload, part, key, shared)
        out.zero_()
        self._part(out).copy_(part)

    def _part(self, x: Tensor) -> Tensor:
        """A view of the features that are sent."""
        return x.narrow(_features(x.shape), 0, self._shape(x.shape)[_features(x.shape)]) if x.dim() else x

    def _shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of `_part`."""
        if not len(shape):
            return ()
        place = _features(shape)
        return (*shape[:place], min(self._count, shape[place]), *shape[place + 1 :])


def _features(shape: Sequence[int]) -> int:
    """The dimension of the features."""
    return 1 if len(shape) == 4 else len(shape) - 1


@dataclass(frozen=True, repr=False)
class FirstFeatures(Narrow):
    """The codec of the gradients at a boundary with an autoencoder: the user's own, for the first features alone.

    It is written as the user's own codec, and no expression names it.
    """

    name: ClassVar[str] = "first features"

    count: int
    """How many features it sends."""
    through: Codec
    """The codec that the user has chosen."""

    @property
    def _count(self) -> int:
        return self.count

    @property
    def _through(self) -> Codec:
        return self.through

    def __str__(self) -> str:
        return str(self.through)

    __repr__ = __str__

    @property
    def warm_starts(self) -> bool:
        """Whether the other codec starts from its last message."""
        return self.through.warm_starts

    def next_shared(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """What the other codec shares for the next message."""
        return self.through.next_shared(payload, self._shape(shape), dtype)

    def at(self, progress: Progress | None) -> "FirstFeatures":
        """With the other codec as it is at a point in training."""
        now = self.through.at(progress)
        return self if now is self.through else dataclasses.replace(self, through=now)

    @cached_property
    def variants(self) -> tuple[Codec, ...]:
        """With every codec that the other one becomes."""
        return tuple(dataclasses.replace(self, through=variant) for variant in self.through.variants)

    def unscaled(self) -> "FirstFeatures":
        """With the other codec as feedback uses it."""
        return dataclasses.replace(self, through=self.through.unscaled())


@dataclass(frozen=True, repr=False)
class Autoencoder(Narrow):
    """`autoencoder(rank)`: a learned linear map to `rank` features, and one back.

    This is what crosses the wire. The maps are layers: `thinwire.models.autoencoder`.
    """

    name: ClassVar[str] = "autoencoder"
    channels: ClassVar[tuple[str, ...]] = ("activations",)
    instead: ClassVar[str] = "gradients beside it are as narrow already: give them any codec of their own, such as q(8)"
    takes_feedback: ClassVar[bool] = False
    learns: ClassVar[bool] = True

    rank: int
    """The features that are sent."""
    values: str = field(default="bf16", kw_only=True)
    """How they are sent: `none`, `bf16`, `fp16`, or a quantizer such as `q(8)`."""

    def __post_init__(self) -> None:
        attempt(
            lambda: require_int(self, "rank", self.rank, 1, None),
            lambda: object.__setattr__(self, "values", str(_codec_of(self.values))),
        )

    @property
    def _count(self) -> int:
        return self.rank

    @cached_property
    def _through(self) -> Codec:
        return _codec_of(self.values)

    def bound_to(self, activations: Codec) -> Codec:
        """Itself: it is for activations."""
        return self

    def of_gradients(self, wanted: Codec) -> Codec:
        """The wanted codec, for the first features alone."""
        return FirstFeatures(self.rank, wanted)


def _codec_of(values: object) -> Codec:
    """The codec that an expression names: a number format or a quantizer."""
    from thinwire.compress.expression import parse  # it imports all codecs, this one too

    if isinstance(values, str):
        try:
            codec = parse(values)
        except CodecError:
            codec = None
        if isinstance(codec, Blockwise | HighBytes):
            return codec
    given = f'"{values}"' if isinstance(values, str) else str(values)
    raise CodecError(
        f'autoencoder\'s values must be "none", "bf16", "fp16", or a quantizer such as "q(8)", got {given}'
    )
