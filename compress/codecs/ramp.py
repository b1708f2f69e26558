"""Codecs that change while training goes on, written `q(8 -> 4, over="2 epochs")`, such as milder ones at the start.

The number goes from the first to the last in steps of one, spread evenly over the time: of 8 -> 4 there are four, so
each of 8, 7, 6 and 5 bits is used for a quarter of it, and 4 bits from then on. Both ends know the step, and with it
the codec of each message, before a byte is sent.
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.compress.codec import Codec, CodecError, Key, expression_of
from thinwire.compress.progress import Progress

_DURATION = re.compile(r"([1-9]\d*) (epochs?|steps?)")
MOST_VARIANTS = 256
"""The most codecs that one codec may become. Both ends know the bytes of each before training."""


@dataclass(frozen=True, repr=False)
class Ramp(Codec):
    """A codec whose first argument, a whole number, goes from one value to another.

    Used without a point in training, it is the codec at the end.
    """

    name: ClassVar[str] = "ramp"

    first: Codec
    """The codec at the start."""
    last: Codec
    """The codec at the end, the same but for its first argument."""
    over: str
    """How long the change takes, from the start of training: "2 epochs" or "500 steps"."""

    def __post_init__(self) -> None:
        start, stop = self._ends
        whole = type(start) is int and type(stop) is int and start != stop and self._always_written
        CodecError.require(
            (whole and self.last == self._with(stop), f"only a whole number that comes first may change, got {self}"),
            (
                isinstance(self.over, str) and _DURATION.fullmatch(self.over) is not None,
                f'over must be like "2 epochs" or "500 steps", got {self.over!r}: {self}',
            ),
        )
        CodecError.require(
            (abs(start - stop) < MOST_VARIANTS, f"a codec may change up to {MOST_VARIANTS - 1} times, got {self}")
        )
        assert self.variants[0] == self.first, "each of them is a codec"

    def __str__(self) -> str:
        start, stop = self._ends
        written = expression_of(self.last)
        rest = written.removeprefix(f"{self.last.name}({stop}").removesuffix(")")
        return f'{self.last.name}({start} -> {stop}{rest}, over="{self.over}")'

    __repr__ = __str__

    @cached_property
    def variants(self) -> tuple[Codec, ...]:
        """Every codec that it becomes, in order."""
        start, stop = self._ends
        numbers = range(start, stop, 1 if start < stop else -1)
        return (*(self._with(number) for number in numbers), self.last)

    def at(self, progress: Progress | None) -> Codec:
        """The codec at a point in training; CodecError if that is not known."""
        if progress is None:
            raise CodecError(
                f"{self} depends on how far training is: say it with "
                "stage.begin(Pass(progress=thinwire.compress.Progress(...))) before each pass"
            )
        number, unit = self.over.split()
        total = int(number) * (progress.steps_per_epoch if unit.startswith("epoch") else 1)
        variants = self.variants
        changes = len(variants) - 1
        return variants[min(changes, progress.step * changes // total)]

    def check_channel(self, channel: str) -> None:
        """Raise CodecError if the codec cannot be used on this channel."""
        self.last.check_channel(channel)

    @property
    def warm_starts(self) -> bool:
        """Whether the codec warm-starts."""
        return self.last.warm_starts

    @property
    def varies(self) -> bool:
        """Whether a payload may be shorter than `nbytes`."""
        return self.last.varies

    def used(self, payload: Tensor) -> int:
        """How many bytes of a payload are sent."""
        return self.last.used(payload)

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The size of a payload at the end."""
        return self.last.nbytes(shape, dtype)

    def error_bound(self, x: Tensor) -> Tensor:
        """The largest error at the end."""
        return self.last.error_bound(x)

    def error_bound_within(self, magnitudes: Tensor) -> Tensor:
        """The largest error at the end, of any tensor of at most these `magnitudes`."""
        return self.last.error_bound_within(magnitudes)

    def entropy_bits(self, payload: Tensor, shape: Sequence[int]) -> float:
        """The least bits for a payload at the end."""
        return self.last.entropy_bits(payload, shape)

    def is_finite(self, payload: Tensor, decoded: Tensor) -> bool:
        """Whether no decoded element is NaN or infinity."""
        return self.last.is_finite(payload, decoded)

    def next_shared(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """What both ends share for the next message, at the end."""
        return self.last.next_shared(payload, shape, dtype)

    def _encode(self, x: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        self.last.encode(x, out, key, shared)

    def _decode(self, payload: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        self.last.decode(payload, out, key, shared)

    @property
    def _field(self) -> str:
        """The name of the number that changes."""
        return next((field.name for field in dataclasses.fields(self.first)), "")  # type: ignore[arg-type]

    @property
    def _always_written(self) -> bool:
        """Whether an expression of the codec begins with the number, as it does if the number has no default."""
        return dataclasses.fields(self.first)[0].default is dataclasses.MISSING  # type: ignore[arg-type]

    @property
    def _ends(self) -> tuple[Any, Any]:
        """The first and the last number."""
        return getattr(self.first, self._field, None), getattr(self.last, self._field, None)

    def _with(self, number: int) -> Codec:
        """The codec with another number."""
        codec: Codec = dataclasses.replace(self.first, **{self._field: number})  # type: ignore[type-var]
        return codec
