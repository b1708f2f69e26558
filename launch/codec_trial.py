"""How good and how fast codecs are: each encodes and decodes messages, in turns with all others and with memcpy.

Speed is in GB/s of the tensor, not of the payload, beside that of copying memory in the same minutes: absolute numbers
say little where other work shares the machine.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compress import Codec, Key
from thinwire.compress.sparse import TopK, samples_of

MEMCPY_BYTES = 2**28
GIVEN_BACK_BYTES = 30 * 10**6


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where codecs run."""

    device: str
    """``cpu`` or ``cuda``."""
    threads: int | None = None
    """Threads of the CPU; None on a GPU."""

    def __str__(self) -> str:
        return f"{self.threads} thread{'s' * (self.threads != 1)}" if self.threads else "GPU"


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One codec on one kind of data at one place, in GB/s (10**9 bytes) of the tensor."""

    place: Place
    encode: float
    decode: float
    memcpy: float
    """What copying 256 MiB does, measured in turns with the codecs."""


@dataclass(frozen=True, kw_only=True)
class Quality:
    """What a codec makes of some data, wherever it runs."""

    bits_per_element: float
    of_entropy: float | None
    """Payload bytes over the least that could carry the same; None where no such bound is known."""
    snr_db: float | None
    """Signal to noise; None where every value comes back exactly."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """All that is known about one codec on one kind of data."""

    data: str
    codec: str
    quality: Quality
    speeds: tuple[Speed, ...]


class Trial:
    """One codec with messages to encode one after the other, each with buffers of its own."""

    def __init__(self, codec: Codec, messages: Sequence[Tensor]) -> None:
        self.codec, self.messages = codec, messages
        self.payloads = [
            torch.empty(codec.nbytes(message.shape, message.dtype), dtype=torch.uint8, device=message.device)
            for message in messages
        ]
        self.decoded = [torch.empty_like(message) for message in messages]

    def encode(self) -> None:
        """Encode every message."""
        for index, (message, payload) in enumerate(zip(self.messages, self.payloads, strict=True)):
            self.codec.encode(message, payload, _key(index))

    def decode(self) -> None:
        """Decode every payload."""
        for index, (payload, decoded) in enumerate(zip(self.payloads, self.decoded, strict=True)):
            self.codec.decode(payload, decoded, _key(index))


def entropy_bits(codec: Codec, shape: Sequence[int], dtype: torch.dtype) -> float | None:
    """The bits below which no code can carry what ``codec`` sends of any tensor of ``shape``; None if not known.

    For topk T*H(K/T) for the positions of K among T elements, H the binary entropy, and the values as they are sent.
    """
    if not isinstance(codec, TopK):
        return None
    samples, n = samples_of(shape)
    share = codec.count(n) / n
    entropy = -sum(part * math.log2(part) for part in (share, 1 - share) if part)
    return samples * n * entropy + 8 * codec.values_size(shape, dtype)


def quality(codec: Codec, messages: Sequence[Tensor]) -> Quality:
    """What ``codec`` makes of ``messages``, each encoded by itself."""
    trial = Trial(codec, messages)
    trial.encode()
    trial.decode()
    bits = sum(8 * payload.numel() for payload in trial.payloads)
    bounds = [entropy_bits(codec, message.shape, message.dtype) for message in messages]
    bound = sum(part for part in bounds if part is not None)
    noise = sum(
        float((message.double() - decoded.double()).square().sum())
        for message, decoded in zip(messages, trial.decoded, strict=True)
    )
    signal = sum(float(message.double().square().sum()) for message in messages)
    return Quality(
        bits_per_element=bits / sum(message.numel() for message in messages),
        of_entropy=bits / bound if bound else None,
        snr_db=10 * math.log10(signal / noise) if noise else None,
    )


def speeds(codecs: Sequence[Codec], messages: Sequence[Tensor], place: Place, rounds: int) -> list[Speed]:
    """Time every codec at a place: medians of ``rounds``, in each of which memcpy and all codecs have their turn."""
    trials = [Trial(codec, [message.to(place.device) for message in messages]) for codec in codecs]
    source = torch.ones(MEMCPY_BYTES, dtype=torch.uint8, device=place.device)
    target = torch.ones_like(source)
    acts: list[Callable[[], object]] = [lambda: target.copy_(source)]
    for trial in trials:
        acts += [trial.encode, trial.decode]
    with _threads(place.threads):
        seconds = [statistics.median(times) for times in _in_turns(acts, place, rounds)]
    size = sum(message.numel() * message.element_size() for message in messages)
    rates = [size / spent / 1e9 for spent in seconds[1:]]
    memcpy = MEMCPY_BYTES / seconds[0] / 1e9
    return [
        Speed(place=place, encode=encode, decode=decode, memcpy=memcpy)
        for encode, decode in zip(rates[::2], rates[1::2], strict=True)
    ]


def measure(
    codecs: Sequence[Codec], data: Mapping[str, Sequence[Tensor]], places: Sequence[Place], rounds: int
) -> list[Result]:
    """Measure every codec on every kind of data at every place."""
    _warm_allocator()
    results = []
    for name, messages in data.items():
        at_places = [speeds(codecs, messages, place, rounds) for place in places]
        results += [
            Result(data=name, codec=str(codec), quality=quality(codec, messages), speeds=tuple(found))
            for codec, *found in zip(codecs, *at_places, strict=True)
        ]
    return results


def _in_turns(acts: Sequence[Callable[[], object]], place: Place, rounds: int) -> list[list[float]]:
    """Seconds of each act in each round; each timed call follows one untimed, and so finds caches as it leaves them.

    One thread is charged with its processor time. Without other work that is the time that passes; with it, long calls
    are interrupted and short ones often not, which would set memcpy back against codecs.
    """
    clock = time.process_time if place.threads == 1 else time.perf_counter
    seconds: list[list[float]] = [[] for _ in acts]
    for _ in range(rounds):
        for act, times in zip(acts, seconds, strict=True):
            act()
            _synchronize(place)
            started = clock()
            act()
            _synchronize(place)
            times.append(clock() - started)
    return seconds


def _synchronize(place: Place) -> None:
    if place.device == "cuda":
        torch.cuda.synchronize()


def _warm_allocator() -> None:
    """Have glibc keep memory that is given back, as it does in any process that trains.

    In a fresh one each large temporary is mapped anew and pays for its page faults, until one of almost 32 MB, the most
    that glibc learns from, is freed.
    """
    torch.ones(GIVEN_BACK_BYTES, dtype=torch.uint8)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _key(index: int) -> Key:
    return Key(seed=0, boundary=0, channel="activations", phase="train", step=0, microbatch=index)
