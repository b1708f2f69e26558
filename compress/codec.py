"""What a codec is: the interface that turns tensors into bytes and back.

A codec is a frozen description with pure functions. It never sees a rank, a socket or a stream, it keeps no state, and
its only randomness comes from the Key of the message. Schedules order micro-batches differently, so with a
running generator two runs of one recipe would differ.
"""

import dataclasses
import hashlib
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from math import isfinite
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from thinwire.compress.codebook import Codebook
from thinwire.compress.words import DeviceWords
from thinwire.errors import ThinwireError
from thinwire.errors.calls import call


class CodecError(ThinwireError, ValueError):
    """A codec expression, or a use of a codec, that cannot work."""


class ContractError(CodecError):
    """A codec of the user's own that breaks a rule of codecs; a codec that refuses a tensor raises CodecError."""


Words = Callable[[int], Tensor]
"""A source of random words: called with n, it gives the next n as int64."""


class Key(NamedTuple):
    """Which message a tensor is: the only source of a codec's randomness."""

    seed: int
    """The seed of the run."""
    boundary: int
    """The boundary's index: the cut between stage `boundary` and the next."""
    channel: str
    """`activations` or `gradients`."""
    phase: str
    """`train`, or the kind of evaluation."""
    step: int
    """Index of the pass, counted from 0 in each phase."""
    microbatch: int
    """The micro-batch within the pass."""
    tensor: int = 0
    """The place in the tuple that crosses the boundary."""

    def of(self, name: str) -> "Key":
        """The key of something in the message that draws numbers of its own, by its name."""
        return self._replace(channel=f"{self.channel} {name}")

    @property
    def number(self) -> int:
        """A hash of all fields, of 64 bits and the same in every process."""
        return int.from_bytes(hashlib.blake2b(json.dumps(self).encode(), digest_size=8).digest(), "little")

    def generator(self) -> torch.Generator:
        """A new generator of the host, seeded by the key."""
        return torch.Generator().manual_seed(self.number)

    def words(self, device: torch.device) -> Words:
        """A source of random words of 64 bits: called with n, it gives the next n, int64 on `device`.

        They are NumPy's, because torch draws half as fast. A GPU makes the same ones itself, so that both encode to the
        same bytes.
        """
        if device.type != "cpu":
            return DeviceWords(self.number, device)
        numbers = np.random.PCG64(self.number)
        none = torch.empty(0, dtype=torch.int64)  # NumPy's has a stride of 0, and no view in other integers
        return lambda count: torch.from_numpy(numbers.random_raw(count).view(np.int64)) if count else none


NO_KEY = Key(seed=0, boundary=0, channel="activations", phase="train", step=0, microbatch=0)
"""Of no message: where a codec is tried out, and where nothing is drawn."""


class Described(ABC):
    """A frozen dataclass that an expression describes: a codec, or feedback around one.

    Callers ask what it can do, and do not look at its type. Both kinds have `codec`, `inner` and `feedback`. `str` and
    `repr` are the expression.
    """

    name: ClassVar[str]
    """The name in expressions; by default the import path of the class, such as `my_codecs.Sign`."""
    channels: ClassVar[tuple[str, ...]] = ("activations", "gradients")
    """The channels it can be used on."""
    instead: ClassVar[str] = ""
    """What to use on the other channels, for the error."""

    def __init_subclass__(cls) -> None:
        if "name" not in vars(cls):
            cls.name = f"{cls.__module__}.{cls.__qualname__}"

    def check_channel(self, channel: str) -> None:
        """Raise CodecError if it cannot be used on this channel."""
        if channel not in self.channels:
            allowed = " and ".join(self.channels)
            raise CodecError(f"{self.name} is for {allowed} only, got {self} for {channel}; {self.instead}")

    def of_known_length(self) -> Self:
        """The same, with codecs inside whose payloads all have `nbytes`; what is decoded is the same.

        Raises CodecError if one of them has no such form.
        """
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        inside = {field.name: getattr(self, field.name) for field in fields}
        inside = {name: one.of_known_length() for name, one in inside.items() if isinstance(one, Described)}
        return dataclasses.replace(self, **inside) if inside else self  # type: ignore[type-var]

    def __str__(self) -> str:
        return expression_of(self)

    __repr__ = __str__


class Codec(Described):
    """A frozen description of how a tensor becomes bytes.

    Subclasses are frozen dataclasses with `repr=False`. Their fields are the arguments of the expression. Fields
    without a default come first and are written by position. The others are written by name, if not the default.
    """

    takes_feedback: ClassVar[bool] = True
    """Whether feedback can go around it."""
    takes_indices: ClassVar[bool] = False
    """Whether it can send values at given indices, so that efmixed can choose them."""
    reuses_indices: ClassVar[bool] = False
    """Whether it needs the indices of the same micro-batch's activation: bind it with `bound_to` before use."""
    feedback: ClassVar[None] = None
    """None; for feedback, itself."""

    @property
    def varies(self) -> bool:
        """Whether a payload may be shorter than `nbytes`."""
        return False

    def used(self, payload: Tensor) -> int:
        """How many bytes of a payload [nbytes] are sent; decoding reads no others.

        Raises CodecError if the payload says something impossible.
        """
        return len(payload)

    @property
    def entries(self) -> int:
        """How many rows both ends keep to predict others by, in a channel; 0 if none."""
        return 0

    def predicting(self, codebook: Codebook) -> "Codec":
        """The codec of one channel, which predicts by the entries of a codebook, where `entries` asks for one."""
        return self

    @property
    def codec(self) -> "Codec":
        """Itself; for feedback, the codec inside."""
        return self

    @property
    def inner(self) -> "Codec":
        """Itself; for feedback, the codec as feedback uses it."""
        return self

    def bound_to(self, activations: "Codec") -> "Codec":
        """The codec for gradients, given the codec of the same boundary's activations.

        Raises CodecError if this one reuses indices and the other has none to share.
        """
        return self

    def of_known_length(self) -> Self:
        """The codec whose payloads all have `nbytes`, and are decoded to the same values; itself unless it `varies`.

        Raises CodecError if there is none.
        """
        made = super().of_known_length()
        if made.varies:
            raise CodecError(f"payloads of {self} vary in length, and it has no form in which they do not")
        return made

    def unscaled(self) -> "Codec":
        """The codec without the scaling that makes it unbiased: feedback uses this one."""
        return self

    def indices(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, key: Key) -> Tensor | None:
        """The indices, int64 [N, k], of the values in a payload; None unless the codec shares indices."""
        return None

    @abstractmethod
    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The exact size in bytes of a tensor's payload, or the largest if it `varies`; both ends know it in advance.

        Raises CodecError if the codec does not take the dtype.
        """

    def encode(self, x: Tensor, out: Tensor, key: Key, shared: Tensor | None = None) -> None:
        """Write the payload of `x` into `out`. `x` may have any strides and is not changed.

        `out` is uint8 [nbytes(x.shape, x.dtype)], contiguous, at any alignment.
        `shared` is a tensor that both ends hold already: the indices of the activation for `reuse`; others need none.
        """
        self._check_payload(out, x)
        if x.numel():
            call_method(self, "_encode", x.detach(), out, key, shared)

    def decode(self, payload: Tensor, out: Tensor, key: Key, shared: Tensor | None = None) -> None:
        """Write the decoded tensor into `out`, which is contiguous and has the sender's shape and dtype."""
        self._check_payload(payload, out)
        assert out.is_contiguous(), "a tensor is decoded into contiguous memory"
        if out.numel():
            call_method(self, "_decode", payload, out.detach(), key, shared)

    @abstractmethod
    def error_bound(self, x: Tensor) -> Tensor:
        """The largest error of each decoded element, as float32 that broadcasts to the shape of `x`."""

    def error_bound_within(self, magnitudes: Tensor) -> Tensor:
        """The largest error of each element of any tensor of at most these `magnitudes`; it broadcasts to their shape.

        A codec that sends values through another one needs it. If `error_bound` may be less for a tensor of larger
        magnitudes, a codec has to override this.
        """
        return self.error_bound(magnitudes)

    @abstractmethod
    def _encode(self, x: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None: ...

    @abstractmethod
    def _decode(self, payload: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None: ...

    def _check_payload(self, payload: Tensor, x: Tensor) -> None:
        assert payload.dtype == torch.uint8 and payload.dim() == 1 and payload.is_contiguous(), "a payload is bytes"
        nbytes = size_of(self, x.shape, x.dtype)
        assert payload.numel() == nbytes, f"{self} needs {nbytes} bytes for {tuple(x.shape)}, got {len(payload)}"


@lru_cache(maxsize=4096)
def size_of(codec: Codec, shape: Sequence[int], dtype: torch.dtype) -> int:
    """A payload's exact size in bytes. CodecError if the codec refuses the dtype, or gives no such number."""
    nbytes: int = call_method(codec, "nbytes", shape, dtype)
    if type(nbytes) is not int or nbytes < 0:
        where = _words((shape, dtype))
        raise ContractError(
            f"{codec.name}'s nbytes must return the number of bytes, an int, got {nbytes!r} for {where}"
        )
    return nbytes


def call_method(codec: Codec, method: str, *arguments: Any) -> Any:
    """The result of a codec's method. ContractError, in one sentence, if a codec of the user's own fails in it."""
    step = getattr(codec, method)
    if type(codec).__module__.startswith("thinwire."):  # a failure there is our own mistake
        return step(*arguments)
    where, takes = f"for {_words(arguments)}", _parameters(method)
    return call(step, *arguments, name=f"{codec.name}'s {method}", takes=takes, error=ContractError, where=where)


@cache
def _parameters(method: str) -> str:
    """What a method of codecs takes, in words: (self, shape, dtype)."""
    return f"({', '.join(inspect.signature(getattr(Codec, method)).parameters)})"


def _words(arguments: Sequence[Any]) -> str:
    """The first tensor that a method is given, in words: float32 [2, 3]."""
    first, *rest = arguments
    dtype, shape = (first.dtype, first.shape) if isinstance(first, Tensor) else (rest[0], first)
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def expression_of(described: Described) -> str:
    """The expression of a codec or of feedback around one: a dataclass with a `name`."""
    fields = dataclasses.fields(described)  # type: ignore[arg-type]
    values = {field.name: getattr(described, field.name) for field in fields}
    required = [values[field.name] for field in fields if field.default is dataclasses.MISSING]
    given = [field for field in fields if values[field.name] not in (None, field.default)]
    changed = {field.name: values[field.name] for field in given if field.default is not dataclasses.MISSING}
    if changed:  # only then: a class may write itself into the error by which it refuses its arguments
        with suppress(CodecError):  # as q(16), which needs a step
            plain = type(described)(*required)
            changed = {name: value for name, value in changed.items() if value != getattr(plain, name)}
    arguments = [literal(value) for value in required]
    arguments += [f"{name}={literal(value)}" for name, value in changed.items()]
    return f"{described.name}({', '.join(arguments)})" if arguments else described.name


def require_floating(codec: Codec, dtype: torch.dtype) -> None:
    """Raise CodecError unless `dtype` is floating and has at least 16 bits: lossy codecs take nothing else."""
    if not dtype.is_floating_point or dtype.itemsize < 2:
        wanted = "floating-point tensors of at least 16 bits"
        raise CodecError(f"{codec} compresses {wanted}, got {dtype}; send this tensor with none")


def require_int(codec: Codec, argument: str, value: object, low: int, high: int | None) -> None:
    """Raise CodecError unless `value` is an int (not a bool) from `low` to `high`; `high=None` is no limit."""
    allowed = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if type(value) is not int or value < low or (high is not None and value > high):
        raise CodecError(f"{codec.name}'s {argument} must be {allowed}, got {literal(value)}")


def require_choice(described: Described, argument: str, value: object, choices: Sequence[str]) -> None:
    """Raise CodecError unless `value` is one of `choices`."""
    if value not in choices:
        allowed = ", ".join(literal(choice) for choice in choices)
        raise CodecError(f"{described.name}'s {argument} must be one of {allowed}, got {literal(value)}")


def is_finite(x: Tensor) -> bool:
    """Whether no element is NaN or infinity; the sum shows it in one pass, unless it overflows."""
    if x.is_complex():
        x = torch.view_as_real(x)
    if not x.is_floating_point():
        return True
    # to name the dtype takes as long as to sum a short message
    total = x.sum() if x.dtype == torch.float32 else x.sum(dtype=torch.float32)
    return isfinite(total.item()) or bool(x.isfinite().all())


def tensor_bytes(x: Tensor) -> Tensor:
    """The bytes of `x` as one-dimensional uint8, a view where `x` is contiguous."""
    # one element of any stride counts as contiguous, but not as bytes
    flat = x.contiguous().view(-1) if x.numel() != 1 else x.as_strided((1,), (1,))
    return flat.view(torch.uint8)


def literal(value: object) -> str:
    """An argument as expressions write it."""
    return json.dumps(value) if isinstance(value, str) else str(value)
