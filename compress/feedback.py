"""Feedback: rules around a codec. They keep what was sent, so a later message corrects the error of an earlier one.

Each rule is three formulas over a message's input x, the buffer b kept for its slot, and the decoded payload c = C(u):

                u, what the codec sees     what the receiver uses     the next b        who keeps b
    ef          x + d b                    c                          u - c             the sender
    efmixed     x + d b, at mixed indices  c                          u - c             the sender
    ef21        x - b                      b + c                      b + c             both ends
    aqsgd       x - b                      b + c                      S(b + c)          both ends

d is 1 unless the option `decay` says otherwise. A buffer belongs to a slot: a position in the batch (accumulation
pass, micro-batch, row), or a sample id. Everything here is a frozen description with pure functions; coder.py keeps
the buffers.

EF: Seide et al., in 2401.07788 section 2.4; EF21: Richtarik et al., ibid.; EF-mixed: ibid.; AQ-SGD: Algorithm 1 of
2206.01299.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from thinwire.compress.codec import Codec, CodecError, Described, Key, require_choice
from thinwire.compress.codecs.cast import Uncompressed
from thinwire.compress.codecs.sparse import TopK, mixed_indices
from thinwire.compress.stores.store import FORMATS, Loan
from thinwire.errors import attempt

Slot = Literal["position", "sample"]
Medium = Literal["memory", "device", "disk"]


@dataclass(frozen=True, repr=False)
class Feedback(Described):
    """A rule around a codec."""

    receiver_keeps: ClassVar[bool]
    """Whether the receiver keeps the buffer too."""
    forgets: ClassVar[bool] = False
    """Whether `advance` does not read the buffer, so that `decoded` may lie in its place."""
    codec: Codec
    """The codec that turns u into a payload."""
    slot: Slot = field(default="position", kw_only=True)
    """What a buffer is kept for: a position in the batch, or a sample id."""
    store: Medium = field(default="memory", kw_only=True)
    """Where the buffers live: in the host's memory, in that of the stage's own device, or on disk."""
    store_bits: int = field(default=32, kw_only=True)
    """Bits of a buffer's value: 32, 16, 8 or 4."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # what a class says of its own formulas does not hold for those that a subclass puts in their place
        own = vars(cls)
        if "advance" in own:
            cls.forgets = own.get("forgets", False)

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise CodecError(f"{self.name} goes around a codec, got {self.codec}; write {self.name}(q(4)), for example")
        allowed = ", ".join(map(str, FORMATS))
        attempt(
            lambda: CodecError.require(
                (self.codec.takes_feedback, f"{self.name} cannot go around {self.codec}; drop {self.name}"),
                (
                    not self.codec.entries,
                    f"{self.name} cannot go around {self.codec}, since its rows are differences; drop codebook, or "
                    f"write it into first of aqsgd",
                ),
                (
                    type(self.store_bits) is int and self.store_bits in FORMATS,
                    f"{self.name}'s store_bits must be one of {allowed}, got {self.store_bits}",
                ),
            ),
            lambda: require_choice(self, "slot", self.slot, get_args(Slot)),
            lambda: require_choice(self, "store", self.store, get_args(Medium)),
        )

    @property
    def entries(self) -> int:
        """How many rows both ends keep to predict those of first visits by; 0 if none."""
        return self.opening.entries if self.opening else 0

    @property
    def inner(self) -> Codec:
        """The codec as feedback uses it: without the scaling that makes it unbiased."""
        return self.codec.unscaled()

    @property
    def feedback(self) -> Feedback:
        """Itself; None for a codec."""
        return self

    @property
    def remembers_evaluation(self) -> bool:
        """Whether evaluation by sample keeps buffers of its own."""
        return True

    @property
    def opening(self) -> Codec | None:
        """The codec of a slot's first visit, whose decoded values become the buffer; None if it is a visit as any."""
        return None

    @abstractmethod
    def write_message(self, x: Tensor, buffer: Tensor, out: Tensor) -> None:
        """Write u, float32, to `out`."""

    @abstractmethod
    def receive(self, decoded: Tensor, buffer: Tensor) -> None:
        """Turn `decoded` into what the receiver uses, in place: also its next buffer, if it keeps one."""

    @abstractmethod
    def advance(self, message: Tensor, decoded: Tensor, buffer: Tensor) -> None:
        """Turn the sender's `buffer` into the next one, in place."""

    def encode(self, x: Tensor, loan: Loan, out: Tensor, key: Key) -> Tensor:
        """Write the payload of C(u) and return u, new and contiguous."""
        message = self._message(x, loan)
        self.inner.encode(message, out, key)
        return message

    def _message(self, x: Tensor, loan: Loan) -> Tensor:
        message = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        for part, buffer, u in zip(loan.split(x.float()), loan.parts, loan.split(message), strict=True):
            self.write_message(part, buffer, u)
        return message


@dataclass(frozen=True, repr=False)
class ErrorFeedback(Feedback):
    """`ef(codec)`: the error of one message is added to the slot's next message."""

    name: ClassVar[str] = "ef"
    receiver_keeps: ClassVar[bool] = False
    forgets: ClassVar[bool] = True

    decay: float = field(default=1.0, kw_only=True)
    """The share of an error that the next message gets; SparseLoCo forgets 5 % of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.decay) not in (int, float) or not 0 < self.decay <= 1:
            raise CodecError(f"{self.name}'s decay must be above 0 and at most 1, got {self.decay!r}")
        object.__setattr__(self, "decay", float(self.decay))

    def write_message(self, x: Tensor, buffer: Tensor, out: Tensor) -> None:
        """Write u = x + d b."""
        if self.decay == 1:
            torch.add(x, buffer, out=out)
        else:
            torch.mul(buffer, self.decay, out=out).add_(x)

    def receive(self, decoded: Tensor, buffer: Tensor) -> None:
        """Leave c as it is."""

    def advance(self, message: Tensor, decoded: Tensor, buffer: Tensor) -> None:
        """Turn b into u - c."""
        torch.sub(message, decoded, out=buffer)


@dataclass(frozen=True, repr=False)
class MixedErrorFeedback(ErrorFeedback):
    """`efmixed(topk(..))`: the input chooses half of the indices, the error the other half (2401.07788, 2.4)."""

    name: ClassVar[str] = "efmixed"

    codec: TopK

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.codec.takes_indices:
            raise CodecError(f"efmixed chooses the indices itself, so it goes around topk only, got {self.codec}")

    def encode(self, x: Tensor, loan: Loan, out: Tensor, key: Key) -> Tensor:
        """Write the payload of u at the mixed indices and return u."""
        message = self._message(x, loan)
        grid = self.codec.samples_of(message.shape)
        error = torch.cat(loan.parts).reshape(grid)
        indices = mixed_indices(x.float().reshape(grid), error, self.codec.count(grid[1]))
        self.codec.encode_at(message, indices, out, key)
        return message


@dataclass(frozen=True, repr=False)
class DifferenceFeedback(Feedback):
    """`ef21(codec)`: a message is the change since the slot's last message, and both ends add up the changes."""

    name: ClassVar[str] = "ef21"
    receiver_keeps: ClassVar[bool] = True

    def write_message(self, x: Tensor, buffer: Tensor, out: Tensor) -> None:
        """Write u = x - b."""
        torch.sub(x, buffer, out=out)

    def receive(self, decoded: Tensor, buffer: Tensor) -> None:
        """Turn c into b + c."""
        torch.add(buffer, decoded, out=decoded)

    def advance(self, message: Tensor, decoded: Tensor, buffer: Tensor) -> None:
        """Turn b into b + c; u is not needed, so `decoded` may lie in its place."""
        buffer.add_(decoded)


@dataclass(frozen=True, repr=False)
class ActivationDifference(DifferenceFeedback):
    """`aqsgd(codec)`: EF21 with a slot for each sample; a first visit sends the tensor itself. Activations only."""

    name: ClassVar[str] = "aqsgd"
    channels: ClassVar[tuple[str, ...]] = ("activations",)
    instead: ClassVar[str] = "use ef21 there"

    slot: Slot = field(default="sample", kw_only=True)
    """What a buffer is kept for."""
    first: Codec = field(default=Uncompressed(), kw_only=True)
    """The codec of first visits: `none` as in 2206.01299, or one with fewer bytes, such as `q(8, step=0.1)`."""
    eval_history: bool = field(default=True, kw_only=True)
    """Whether evaluation sends differences to the last evaluation; if not, it applies the codec to x itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.first, Codec) and self.first.takes_feedback):
            raise CodecError(
                f"aqsgd's first must be a codec that reads no other message, got {self.first!r}; write it without "
                f"quotes, first=q(8, step=0.1) for example"
            )
        if type(self.eval_history) is not bool:
            raise CodecError(f"aqsgd's eval_history must be True or False, got {self.eval_history!r}")

    @property
    def remembers_evaluation(self) -> bool:
        """Whether evaluation by sample keeps buffers of its own."""
        return self.eval_history

    @property
    def opening(self) -> Codec:
        """The codec of a sample's first visit."""
        return self.first.unscaled()


Method = Codec | Feedback
"""What a channel applies to its tensors."""
