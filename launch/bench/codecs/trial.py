"""Measurement of codecs and feedback, in turns with memcpy: quality and speed, and the tables of both.

Speed is in GB/s of the tensor, not of the payload. The speed of memcpy in the same minutes stands beside it: absolute
numbers say little if other work shares the machine.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.compress import Codec, Decoder, Encoder, Feedback, Key, Microbatch, SlotCounts
from thinwire.compress.stores.memory import MemoryStore
from thinwire.launch.shared.tables import Table
from thinwire.models.precision import threads
from thinwire.pipeline.devices.device import seconds_now
from thinwire.pipeline.frames import CHANNELS

MEMCPY_BYTES = 2**28
GIVEN_BACK_BYTES = 30 * 10**6
CALLS = 4
"""Calls of each act in its turn. Only the last one is timed, because the first ones fill the cache again: after memcpy,
the first six calls of q(4) on 4 MB took 1.5, 0.8, 0.6, 0.55, 0.5 and 0.5 ms."""


@dataclass(frozen=True, kw_only=True)
class Processor:
    """The processor that runs codecs."""

    device: str
    """`cpu` or `cuda`."""
    threads: int | None = None
    """Threads of the CPU; None on a GPU."""

    def __str__(self) -> str:
        return f"{self.threads} thread{'s' * (self.threads != 1)}" if self.threads else "GPU"


def processors(counts: Sequence[int]) -> list[Processor]:
    """The processors to measure on: the CPU with these numbers of threads, and the GPU if there is one."""
    gpu = [Processor(device="cuda")] if torch.cuda.is_available() else []
    return [*(Processor(device="cpu", threads=count) for count in counts), *gpu]


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The speed of one codec on one kind of data on one processor, in GB/s (10**9 bytes) of the tensor."""

    processor: Processor
    encode: float
    decode: float
    memcpy: float
    """GB/s of a copy of 256 MiB, measured in turns with the codecs."""


@dataclass(frozen=True, kw_only=True)
class Quality:
    """The size and the noise of a codec on some data. They do not depend on the processor."""

    bits_per_element: float
    of_entropy: float
    """Payload bits over `Codec.entropy_bits`."""
    snr_db: float | None
    """Signal to noise; None where every value comes back exactly."""


@dataclass(frozen=True, kw_only=True)
class CodecResult:
    """The quality and the speeds of one codec on one kind of data."""

    data: str
    codec: str
    quality: Quality
    speeds: tuple[Speed, ...]


@dataclass(frozen=True, kw_only=True)
class FeedbackSpeed(Speed):
    """The speed of one feedback rule. Encoding is all work of the sender, its buffers included."""

    own: float
    """Time of the feedback itself at both ends, over the time of its codec. The codec encodes once and decodes twice:
    the sender decodes its own payload, to keep the same buffer as the receiver."""


@dataclass(frozen=True, kw_only=True)
class FeedbackResult:
    """The size and the speeds of one feedback rule on one kind of data, after the first visit of every slot."""

    data: str
    method: str
    bits_per_element: float
    speeds: tuple[FeedbackSpeed, ...]


class Trial:
    """One codec and the messages that it encodes one after another. Each message has its own buffers."""

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


class FeedbackTrial:
    """Feedback at both ends of a channel, after the first visit of every slot; and its codec alone.

    Two tensors visit a slot in turns: with one tensor alone, there would be no difference to send. The codec alone gets
    the same two, or its tensor would be in the cache more often than that of feedback.
    """

    def __init__(self, method: Feedback, messages: Sequence[Tensor]) -> None:
        self._visits = [messages, [message.roll(1, -1) for message in messages]]
        self._codec = [Trial(method.inner, [message.float() for message in visit]) for visit in self._visits]
        self._codec[1].decoded = self._codec[0].decoded  # feedback decodes both to one place too
        self._decoded = [torch.empty_like(message) for message in messages]
        self._encoders = [Encoder(method, message, **_memory(message)) for message in messages]
        self._decoders = [Decoder(method, message, **_memory(message)) for message in messages]
        self._microbatches = [_microbatch(len(message)) for message in messages]
        self._calls = dict.fromkeys(("encode", "decode", "codec encode", "codec decode"), 0)
        for _ in self._visits:  # first visits may send more; the second ones are as long as all later ones
            self._payloads = self._new_payloads()
            self.encode()
            self.decode()
        self._payloads = self._new_payloads()

    @property
    def nbytes(self) -> int:
        """Bytes of all payloads of one visit, as they are sent."""
        return sum(
            encoder.used(payload, encoder.plan(microbatch))
            for encoder, payload, microbatch in zip(
                self._encoders, self._last_payloads, self._microbatches, strict=True
            )
        )

    def encode(self) -> None:
        """Do all work of the sender for every message."""
        visit, payloads = self._next("encode")
        self._last_payloads = payloads
        for index, (encoder, microbatch) in enumerate(zip(self._encoders, self._microbatches, strict=True)):
            message, plan = self._visits[visit][index], encoder.plan(microbatch)
            encoder.settle(encoder.encode(message, payloads[index], _key(index), plan))

    def decode(self) -> None:
        """Do all work of the receiver for every message, in the order of encoding."""
        _, payloads = self._next("decode")
        for index, (decoder, microbatch) in enumerate(zip(self._decoders, self._microbatches, strict=True)):
            decoder.decode(payloads[index], self._decoded[index], _key(index), decoder.plan(microbatch))

    def encode_alone(self) -> None:
        """Encode every message of a visit with the codec alone."""
        self._codec[self._next("codec encode")[0]].encode()

    def decode_alone(self) -> None:
        """Decode what `encode_alone` made of a visit."""
        self._codec[self._next("codec decode")[0]].decode()

    def _next(self, act: str) -> tuple[int, list[Tensor]]:
        """The number of the visit, and the payloads of this call. The receiver must get all payloads in order."""
        self._calls[act] += 1
        return self._calls[act] % len(self._visits), self._payloads[self._calls[act] % CALLS]

    def _new_payloads(self) -> list[list[Tensor]]:
        sizes = [
            encoder.plan(microbatch).nbytes
            for encoder, microbatch in zip(self._encoders, self._microbatches, strict=True)
        ]
        return [[torch.empty(size, dtype=torch.uint8) for size in sizes] for _ in range(CALLS)]


def quality(codec: Codec, messages: Sequence[Tensor]) -> Quality:
    """The quality of a codec on `messages`, each encoded alone."""
    trial = Trial(codec, messages)
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
        bits_per_element=bits / sum(message.numel() for message in messages),
        of_entropy=bits / bound,
        snr_db=10 * math.log10(signal / noise) if noise else None,
    )


def speeds(codecs: Sequence[Codec], messages: Sequence[Tensor], processor: Processor, rounds: int) -> list[Speed]:
    """The speed of every codec on a processor: medians of `rounds`. In each round memcpy and all codecs take turns."""
    trials = [Trial(codec, [message.to(processor.device) for message in messages]) for codec in codecs]
    acts = [act for trial in trials for act in (trial.encode, trial.decode)]
    memcpy, seconds = _timed(acts, processor, rounds)
    size = _size(messages)
    return [
        Speed(processor=processor, encode=size / encode, decode=size / decode, memcpy=memcpy)
        for encode, decode in zip(seconds[::2], seconds[1::2], strict=True)
    ]


def feedback_speeds(
    methods: Sequence[Feedback], messages: Sequence[Tensor], processor: Processor, rounds: int
) -> list[FeedbackSpeed]:
    """The speed of both ends of every rule, and of its codec alone, in turns with memcpy as in `speeds`."""
    trials = [FeedbackTrial(method, messages) for method in methods]
    acts = [act for trial in trials for act in (trial.encode, trial.decode, trial.encode_alone, trial.decode_alone)]
    memcpy, seconds = _timed(acts, processor, rounds)
    found, size = [], _size(messages)
    for encode, decode, codec_encode, codec_decode in zip(*(seconds[start::4] for start in range(4)), strict=True):
        codec = codec_encode + 2 * codec_decode
        own = (encode + decode - codec) / codec
        found.append(
            FeedbackSpeed(processor=processor, encode=size / encode, decode=size / decode, memcpy=memcpy, own=own)
        )
    return found


def measure(
    codecs: Sequence[Codec],
    rules: Sequence[Feedback],
    data: Mapping[str, Sequence[Tensor]],
    processors: Sequence[Processor],
    rounds: int,
) -> tuple[list[CodecResult], list[FeedbackResult]]:
    """Measure every codec on every kind of data and every processor, and feedback rules on those that they allow.

    Stores of feedback need a CPU.
    """
    # Make glibc keep freed memory, as it does in every process that trains. In a fresh process, each large temporary is
    # mapped again and pays for its page faults. This ends when a block of almost 32 MB is freed, the largest size that
    # glibc learns from.
    torch.ones(GIVEN_BACK_BYTES, dtype=torch.uint8)
    results, feedback = list[CodecResult](), list[FeedbackResult]()
    for name, messages in data.items():
        of_codecs = [speeds(codecs, messages, processor, rounds) for processor in processors]
        results += [
            CodecResult(data=name, codec=str(codec), quality=quality(codec, messages), speeds=tuple(found))
            for codec, *found in zip(codecs, *of_codecs, strict=True)
        ]
        channel = name.split()[-1]  # a recipe's name may stand before the channel; gaussian data fits every rule
        usable = [rule for rule in rules if channel not in CHANNELS or channel in rule.channels]
        of_rules = [feedback_speeds(usable, messages, one, rounds) for one in processors if one.device == "cpu"]
        elements = sum(message.numel() for message in messages)
        feedback += [
            FeedbackResult(
                data=name,
                method=str(rule),
                bits_per_element=8 * FeedbackTrial(rule, messages).nbytes / elements,
                speeds=tuple(found),
            )
            for rule, *found in zip(usable, *of_rules, strict=True)
        ]
    return results, feedback


_CODECS = "enc, dec: GB/s of the tensor, and share of memcpy; x bound: bytes over the entropy bound"
_OWN = "own: time of the feedback itself, over time of its codec, both ends together"


def tables(
    data: Mapping[str, Sequence[Tensor]], codecs: Sequence[CodecResult], feedback: Sequence[FeedbackResult]
) -> list[Table]:
    """For each kind of data a table of the codecs and one of the feedback that were measured on it."""
    return [
        _table(name, messages, of_data)
        for name, messages in data.items()
        for measured in (codecs, feedback)
        if (of_data := [result for result in measured if result.data == name])
    ]


def _table(name: str, messages: Sequence[Tensor], results: Sequence[CodecResult | FeedbackResult]) -> Table:
    speeds, feedback = results[0].speeds, isinstance(results[0], FeedbackResult)
    acts = ("enc", "dec", "own") if feedback else ("enc", "dec")
    columns = ["feedback" if feedback else "codec", "bits", *([] if feedback else ["x bound", "SNR dB"])]
    columns += [f"{act} {speed.processor}" for speed in speeds for act in acts]
    rows = []
    for one in results:
        if isinstance(one, FeedbackResult):
            row = [one.method, f"{one.bits_per_element:.2f}"]
        else:
            found = one.quality
            noise = "exact" if found.snr_db is None else f"{found.snr_db:.1f}"
            row = [one.codec, f"{found.bits_per_element:.2f}", f"{found.of_entropy:.3f}", noise]
        for speed in one.speeds:
            row += [f"{rate:.2f} {rate / speed.memcpy:3.0%}" for rate in (speed.encode, speed.decode)]
            row += [f"{speed.own:.2f}"] if isinstance(speed, FeedbackSpeed) else []
        rows.append(row)
    shape = "x".join(map(str, messages[0].shape))
    memcpy = ", ".join(f"{speed.memcpy:.1f} GB/s with {speed.processor}" for speed in speeds)
    return Table(f"{name}: {len(messages)} of {shape}; memcpy {memcpy}", columns, rows, _OWN if feedback else _CODECS)


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


def _size(messages: Sequence[Tensor]) -> float:
    """Gigabytes of the messages."""
    return sum(message.numel() * message.element_size() for message in messages) / 1e9


def _timed(acts: Sequence[Callable[[], object]], processor: Processor, rounds: int) -> tuple[float, list[float]]:
    """The GB/s of memcpy and the median seconds of each act, measured in turns."""
    source = torch.ones(MEMCPY_BYTES, dtype=torch.uint8, device=processor.device)
    target = torch.ones_like(source)
    with threads(processor.threads or torch.get_num_threads()):
        times = _in_turns([lambda: target.copy_(source), *acts], processor, rounds)
    memcpy, *seconds = [statistics.median(found) for found in times]
    return MEMCPY_BYTES / memcpy / 1e9, seconds


def _in_turns(acts: Sequence[Callable[[], object]], processor: Processor, rounds: int) -> list[list[float]]:
    """Seconds of each act in each round, with a warm cache.

    With one thread, the clock is processor time. Without other work, it equals the time that passes. With other work,
    long calls are interrupted and short calls often are not, so the time that passes would make memcpy look slow.
    """
    clock = time.process_time if processor.threads == 1 else partial(seconds_now, torch.device(processor.device))
    seconds: list[list[float]] = [[] for _ in acts]
    for _ in range(rounds):
        for act, times in zip(acts, seconds, strict=True):
            for _ in range(CALLS - 1):
                act()
            started = clock()
            act()
            times.append(clock() - started)
    return seconds


def _key(index: int) -> Key:
    return Key(seed=0, boundary=0, channel="activations", phase="train", step=0, microbatch=index)
