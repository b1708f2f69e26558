"""The trials of codecs and feedback, in turns with memcpy: the size and noise of each, and its speed.

Speed is in GB/s of the tensor, not of the payload. The speed of memcpy in the same minutes stands beside it: absolute
numbers say little if other work shares the machine.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.compress import Codec, Decoder, Encoder, Feedback, Key, Method, Microbatch, SlotCounts
from thinwire.compress.stores.memory import MemoryStore
from thinwire.launch.shared.tables import Table, Value
from thinwire.models.precision import threads

MEMCPY_BYTES = 2**28
GIVEN_BACK_BYTES = 30 * 10**6
CALLS = 4
"""Calls of each trial in its turn. Only the last one is timed, because the first ones fill the cache again: after
memcpy, the first six calls of q(4) on 4 MB took 1.5, 0.8, 0.6, 0.55, 0.5 and 0.5 ms."""


@dataclass(frozen=True, kw_only=True)
class Quality:
    """The size and the noise of a codec on some data."""

    bits_per_element: float
    of_entropy: float
    """Payload bits over `Codec.entropy_bits`."""
    snr_db: float | None
    """Signal to noise; None where every value comes back exactly."""


class CodecTrial:
    """One codec and the messages that it encodes one after another. Each message has its own buffers."""

    def __init__(self, codec: Codec, messages: Sequence[Tensor]) -> None:
        self.codec, self.messages = codec, messages
        self.payloads = [
            torch.empty(codec.nbytes(message.shape, message.dtype), dtype=torch.uint8) for message in messages
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


class FeedbackTrial:
    """Feedback at both ends of a channel, after the first visit of every slot.

    Two tensors visit a slot in turns: with one tensor alone, there would be no difference to send.
    """

    def __init__(self, method: Feedback, messages: Sequence[Tensor]) -> None:
        self._visits, self._next = [messages, [message.roll(1, -1) for message in messages]], 0
        self._decoded = [torch.empty_like(message) for message in messages]
        self._encoders = [Encoder(method, message, **_memory(message)) for message in messages]
        self._decoders = [Decoder(method, message, **_memory(message)) for message in messages]
        self._microbatches = [_microbatch(len(message)) for message in messages]
        for _ in self._visits:  # first visits may send more; the second ones are as long as all later ones
            self._payloads = self._new_payloads()
            self.encode()
            self.decode()
        self._payloads = self._new_payloads()

    @property
    def nbytes(self) -> int:
        """Bytes of all payloads of the visit that was encoded last, as they are sent."""
        ends = zip(self._encoders, self._payloads, self._microbatches, strict=True)
        return sum(encoder.used(payload, encoder.plan(microbatch)) for encoder, payload, microbatch in ends)

    def encode(self) -> None:
        """Do all work of the sender for every message; buffers included."""
        visit = self._visits[self._next % len(self._visits)]
        self._next += 1
        for index, (encoder, microbatch) in enumerate(zip(self._encoders, self._microbatches, strict=True)):
            plan = encoder.plan(microbatch)
            encoder.settle(encoder.encode(visit[index], self._payloads[index], _key(index), plan))

    def decode(self) -> None:
        """Do all work of the receiver for every message that was just encoded."""
        for index, (decoder, microbatch) in enumerate(zip(self._decoders, self._microbatches, strict=True)):
            decoder.decode(self._payloads[index], self._decoded[index], _key(index), decoder.plan(microbatch))

    def _new_payloads(self) -> list[Tensor]:
        ends = zip(self._encoders, self._microbatches, strict=True)
        return [torch.empty(encoder.plan(microbatch).nbytes, dtype=torch.uint8) for encoder, microbatch in ends]


def quality(codec: Codec, messages: Sequence[Tensor]) -> Quality:
    """The quality of a codec on `messages`, each encoded alone."""
    trial = CodecTrial(codec, messages)
    trial.encode()
    trial.decode()
    bits = sum(8 * codec.used(payload) for payload in trial.payloads)
    bound = sum(
        codec.entropy_bits(payload, message.shape) for message, payload in zip(messages, trial.payloads, strict=True)
    )
    noise = sum(
        float((message.double() - decoded.double()).square().sum())
        for message, decoded in zip(messages, trial.decoded, strict=True)
    )
    signal = sum(float(message.double().square().sum()) for message in messages)
    return Quality(
        bits_per_element=bits / _elements(messages),
        of_entropy=bits / bound,
        snr_db=10 * math.log10(signal / noise) if noise else None,
    )


def measure(methods: Sequence[Method], messages: Sequence[Tensor], count: int, rounds: int) -> Table:
    """A row for each codec and each rule of feedback: size, noise and speed on these messages, which have one shape.

    `count` is the number of threads. In each of `rounds` rounds memcpy and all methods take turns.
    """
    # Make glibc keep freed memory, as it does in every process that trains. In a fresh process, each large temporary is
    # mapped again and pays for its page faults. This ends when a block of almost 32 MB is freed, the largest size that
    # glibc learns from.
    torch.ones(GIVEN_BACK_BYTES, dtype=torch.uint8)
    trials = [
        FeedbackTrial(method.feedback, messages) if method.feedback else CodecTrial(method.codec, messages)
        for method in methods
    ]
    with threads(count):
        memcpy, seconds = timed(trials, count, rounds)
    size = _elements(messages) * messages[0].element_size() / 1e9
    rows = [
        [str(method), *_noise(method, trial, messages), *(size / each for each in spent)]
        for method, trial, spent in zip(methods, trials, seconds, strict=True)
    ]
    return Table(
        f"codecs with {count} thread{'s' * (count > 1)}: Gaussian {'x'.join(map(str, messages[0].shape))}",
        ["codec", "bits", "x bound", "SNR, dB", "encode, GB/s", "decode, GB/s"],
        rows,
        f"x bound: bytes over the entropy bound. GB/s are of the tensor; memcpy ran at "
        f"{MEMCPY_BYTES / memcpy / 1e9:.1f}. An empty SNR: all values came back exactly, or a rule remembers what it "
        f"sent.",
    )


def _noise(method: Method, trial: CodecTrial | FeedbackTrial, messages: Sequence[Tensor]) -> Sequence[Value]:
    """Bits an element, payload over its bound, and signal to noise."""
    if isinstance(trial, FeedbackTrial):
        return [8 * trial.nbytes / _elements(messages), None, None]
    found = quality(method.codec, messages)
    return [found.bits_per_element, found.of_entropy, found.snr_db]


def timed(
    trials: Sequence[CodecTrial | FeedbackTrial], count: int, rounds: int
) -> tuple[float, list[tuple[float, float]]]:
    """Median seconds of memcpy, and of encode and decode of each trial, in turns with a warm cache.

    With one thread, the clock is processor time. Without other work, it equals the time that passes. With other work,
    long calls are interrupted and short calls often are not, so the time that passes would make memcpy look slow.
    """
    clock = time.process_time if count == 1 else time.perf_counter
    source = torch.ones(MEMCPY_BYTES, dtype=torch.uint8)
    target = torch.ones_like(source)
    acts: list[tuple[Callable[[], object], ...]] = [(lambda: target.copy_(source),)]
    acts += [(trial.encode, trial.decode) for trial in trials]
    spent: list[list[list[float]]] = [[[] for _ in own] for own in acts]
    for _ in range(rounds):
        for own, times in zip(acts, spent, strict=True):
            last = [0.0] * len(own)
            for _ in range(CALLS):
                for index, act in enumerate(own):
                    started = clock()
                    act()
                    last[index] = clock() - started
            for each, seconds in zip(times, last, strict=True):
                each.append(seconds)
    [[memcpy], *found] = [[statistics.median(each) for each in times] for times in spent]
    return memcpy, [(encode, decode) for encode, decode in found]


def _elements(messages: Sequence[Tensor]) -> int:
    return sum(message.numel() for message in messages)


def _memory(message: Tensor) -> dict[str, Any]:
    """The arguments of an end beside its method: the number of slots, and stores in memory."""
    rows = len(message)
    return {
        "counts": SlotCounts(positions=rows, samples=rows),
        "make_store": lambda layout, purpose: MemoryStore(layout),
    }


def _microbatch(rows: int) -> Microbatch:
    """A micro-batch of training with its samples in random order, as from a sampler."""
    samples = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    return Microbatch("train", range(rows), samples)


def _key(index: int) -> Key:
    return Key(seed=0, boundary=0, channel="activations", phase="train", step=0, microbatch=index)
