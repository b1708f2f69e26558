"""What a user can choose about the pipeline, as dataclasses: the fields of a recipe, with their checks."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, Self

from thinwire.compress import CodecError, Method, parse
from thinwire.compress.stores.files import is_on_disk
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.frames import CHANNELS, ChannelName
from thinwire.pipeline.schedules import SCHEDULES

AUTO = "auto"
"""In a codec's place: chosen from the candidates once compute and links are measured."""

_DURATION = re.compile(r"\d+ (epochs?|steps?)")


@dataclass(frozen=True, kw_only=True)
class BoundaryOptions:
    """What one boundary does differently; a channel left out keeps the common codec."""

    activations: str | None = None
    """Codec of this boundary's activations."""
    gradients: str | None = None
    """Codec of this boundary's gradients."""


@dataclass(frozen=True, kw_only=True)
class CompressionOptions:
    """Which codec each channel uses, as expressions such as q(4) or q(2, per="row"), or auto."""

    activations: str = "q(4)"
    """Codec of the activations, sent forward; auto takes one of the candidates once compute and links are measured."""
    gradients: str = "q(8)"
    """Codec of the gradients, sent back; or auto."""
    boundaries: dict[int, BoundaryOptions] = field(default_factory=dict)
    """Overrides by boundary index; boundary i is the cut between stages i and i+1."""
    candidates: list[str] = field(default_factory=lambda: ["none", "bf16", "q(8)", "q(6)", "q(4)", "q(3)", "q(2)"])
    """Codecs that auto chooses from, the mildest first."""
    measure: str = "5 steps"
    """How long auto sends everything as it is and measures, before it chooses: "5 steps" or "1 epoch"."""
    warmup: str = "0 steps"
    """How long nothing is compressed at first: "20 epochs" or "500 steps"."""
    warmup_fill: bool = True
    """Whether feedback fills its buffers while warming up; 2401.07788 starts with empty ones."""
    store_folder: str = ""
    """Folder on each stage's own disk for stores with store="disk", in which a run makes one of its own name; empty:
    the run's output folder."""

    def __post_init__(self) -> None:
        mistakes = []
        for where, channel, expression in self._expressions():
            if _is_auto(expression):
                continue
            try:
                parse(expression).check_channel(channel)
            except CodecError as error:
                mistakes.append(f"{where}: {error}")
        if not mistakes:
            mistakes += self._mistakes_of_reuse()
        mistakes += _misspelt("compression.warmup", self.warmup)
        mistakes += self._mistakes_of_auto()
        if mistakes:
            raise OptionsError(mistakes)

    def _mistakes_of_reuse(self) -> list[str]:
        """To be asked where every expression names a codec or auto."""
        mistakes = []
        for where, pair in self._pairs().items():
            gradients = _method(pair["gradients"]).codec
            if not _is_auto(pair["activations"]):
                try:
                    gradients.bound_to(parse(pair["activations"]).codec)
                except CodecError as error:
                    mistakes.append(f"{where}.gradients: {error}")
            elif gradients.reuses_indices:
                mistakes.append(
                    f"{where}.gradients: reuse needs to know the activation's codec; name it in place of auto"
                )
        return mistakes

    def _mistakes_of_auto(self) -> list[str]:
        mistakes = _misspelt("compression.measure", self.measure)
        if not mistakes and _duration(self.measure)[0] < 1:
            mistakes.append(f"compression.measure must be at least 1 step, got {self.measure!r}")
        if not self.candidates:
            mistakes.append("compression.candidates must name a codec at least, such as none, got []")
        wanted = {channel for _, channel, expression in self._expressions() if _is_auto(expression)}
        for index, expression in enumerate(self.candidates):
            try:
                method = parse(expression)
                for channel in sorted(wanted):
                    method.check_channel(channel)
                if method.codec.reuses_indices:
                    raise CodecError("reuse needs a topk or randk that was chosen before it; give gradients: reuse")
            except CodecError as error:
                mistakes.append(f"compression.candidates.{index}: {error}")
        return mistakes

    def _pairs(self) -> dict[str, dict[ChannelName, str]]:
        """What both channels go through, in general and at each boundary of its own, by where that stands."""
        own = {
            f"compression.boundaries.{index}": {channel: self._expression(index, channel) for channel in CHANNELS}
            for index in self.boundaries
        }
        return {"compression": {"activations": self.activations, "gradients": self.gradients}, **own}

    def _expressions(self) -> list[tuple[str, ChannelName, str]]:
        """Where each expression stands, its channel, and the expression."""
        overrides = {f"compression.boundaries.{index}": override for index, override in self.boundaries.items()}
        return [
            (f"{where}.{channel}", channel, expression)
            for where, group in {"compression": self, **overrides}.items()
            for channel in CHANNELS
            if (expression := getattr(group, channel)) is not None
        ]

    def warms_up(self, step: int, epoch: int) -> bool:
        """Whether an optimizer step, counted from 0, belongs to the warm-up."""
        number, in_epochs = _duration(self.warmup)
        return (epoch if in_epochs else step) < number

    def method(self, boundary: int, channel: ChannelName) -> Method:
        """What one channel of one boundary goes through; a codec that auto has not chosen yet is none."""
        return _method(self._expression(boundary, channel))

    def methods(self, num_boundaries: int, channel: ChannelName) -> list[Method]:
        """What one channel of each boundary goes through, as `method` has it; every expression is read once."""
        read = cache(_method)
        return [read(self._expression(boundary, channel)) for boundary in range(num_boundaries)]

    @property
    def on_disk(self) -> list[str]:
        """The fields whose method keeps its buffers on disk, by dotted name."""
        return [where for where, _, expression in self._expressions() if is_on_disk(_method(expression))]

    @property
    def automatic(self) -> list[str]:
        """The fields that say auto, by dotted name."""
        return [where for where, _, expression in self._expressions() if _is_auto(expression)]

    def is_automatic(self, boundary: int, channel: ChannelName) -> bool:
        """Whether the codec of one channel of one boundary is still to be chosen."""
        return _is_auto(self._expression(boundary, channel))

    def steps_measured(self, steps_per_epoch: int) -> int:
        """Steps after which auto chooses."""
        number, in_epochs = _duration(self.measure)
        return number * steps_per_epoch if in_epochs else number

    def chosen(self, choices: Mapping[tuple[int, ChannelName], str]) -> Self:
        """The same with a codec for every channel that was automatic, by boundary and channel."""
        boundaries = dict(self.boundaries)
        for (boundary, channel), expression in choices.items():
            boundaries[boundary] = replace(boundaries.get(boundary, BoundaryOptions()), **{channel: expression})
        pair = (self.activations, self.gradients)
        activations, gradients = ("none" if _is_auto(common) else common for common in pair)  # no boundary's any more
        return replace(self, activations=activations, gradients=gradients, boundaries=boundaries)

    def before_choice(self) -> Self:
        """The same with none for every channel that is still automatic: what is sent while auto measures."""
        return self.chosen(
            {
                (index, channel): "none"
                for index in self.boundaries
                for channel in CHANNELS
                if self.is_automatic(index, channel)
            }
        )

    def without_auto(self, command: str) -> Self:
        """Itself; OptionsError where a command that measures no links would have to choose."""
        if not self.automatic:
            return self
        raise OptionsError(
            f"{command} needs codecs by name, because auto is chosen while thinwire train measures; got auto for "
            f"{', '.join(self.automatic)}; name codecs such as q(4)/q(8), or those in a run's summary.json"
        )

    def _expression(self, boundary: int, channel: ChannelName) -> str:
        override: str | None = getattr(self.boundaries.get(boundary), channel, None)
        common: str = getattr(self, channel)
        return override if override is not None else common


def _method(expression: str) -> Method:
    return parse("none" if _is_auto(expression) else expression)


def split_pair(text: str) -> tuple[str, str]:
    """The two expressions of `activations/gradients`, or the one that stands for both twice; unchecked."""
    activations, _, gradients = text.partition("/")
    return activations.strip(), (gradients or activations).strip()


@dataclass(frozen=True, kw_only=True)
class WireOptions:
    """How frames travel and how they are checked."""

    timeout: float = 300.0
    """Seconds that any wait on another stage may last."""
    checksum: bool = True
    """Protect whole frames with a CRC-32; false protects their headers alone."""
    nonfinite: Literal["raise", "send"] = "raise"
    """What to do with NaN or infinity in a tensor to be sent: stop and name it, or send it on."""

    def __post_init__(self) -> None:
        if not 0.01 <= self.timeout <= 1e6:
            raise OptionsError(f"wire.timeout must be from 0.01 to 1e6 seconds, got {self.timeout}")


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How the model is cut and in what order the work is done."""

    num_stages: int = 4
    """Stages the model is cut into."""
    schedule: str = "gpipe"
    """Order of the work: a schedule of torch.distributed.pipelining (gpipe, 1f1b, looped-bfs, interleaved-1f1b,
    interleaved-zero-bubble, zbv-zero-bubble, dualpipev), 1f1b-wan, which is 1F1B for slow links, or module:name, a
    schedule of your own."""
    stages_per_process: int | None = None
    """Stages each process holds; null takes the schedule's own number (1, or 2 where it interleaves)."""
    layers: list[int] | list[str] | None = None
    """Layers of each stage, or the names of the layers that all stages but the last end with (`thinwire partition`
    lists them); null cuts where the stage with most to compute has least."""
    num_microbatches: int = 4
    """Micro-batches that flow through the pipeline in one go."""
    microbatch_size: int = 4
    """Samples in a micro-batch."""
    accumulation: int = 1
    """Passes through the pipeline before the optimizer steps."""

    def __post_init__(self) -> None:
        mistakes = [
            f"pipeline.{name} must be at least 1, got {value}"
            for name, value in (
                ("num_stages", self.num_stages),
                ("num_microbatches", self.num_microbatches),
                ("microbatch_size", self.microbatch_size),
                ("accumulation", self.accumulation),
            )
            if value < 1
        ]
        try:
            spec = SCHEDULES[self.schedule]
        except OptionsError as error:
            raise OptionsError([*mistakes, *error.mistakes, *self._layers_mistakes()]) from error
        if not mistakes:
            mistakes += spec.mistakes(self.num_stages, self.per_process, self.num_microbatches)
        mistakes += self._layers_mistakes()
        if mistakes:
            raise OptionsError(mistakes)

    def _layers_mistakes(self) -> list[str]:
        if self.layers is None:
            return []
        named = any(isinstance(entry, str) for entry in self.layers)
        if len(self.layers) == self.num_stages - named:
            return []
        wanted = "a name for each stage but the last" if named else "one entry a stage"
        return [f"pipeline.layers must have {wanted}, got {len(self.layers)} for {self.num_stages} stages"]

    @property
    def per_process(self) -> int:
        """Stages a process holds."""
        chosen = self.stages_per_process
        return chosen if chosen is not None else SCHEDULES[self.schedule].stages_per_process

    @property
    def num_processes(self) -> int:
        """Processes the pipeline needs."""
        return self.num_stages // self.per_process

    @property
    def batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.num_microbatches * self.microbatch_size * self.accumulation


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """The optimizer of every stage, and the course of its learning rate."""

    name: Literal["adamw", "sgd"] = "adamw"
    """Which optimizer."""
    lr: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 0.0
    """Weight decay (decoupled for adamw)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """adamw: decay rates of the two moments."""
    eps: float = 1e-8
    """adamw: added to the denominator."""
    momentum: float = 0.9
    """sgd: momentum."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Course of the learning rate after warm-up: flat, straight to zero, or half a cosine to zero."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from zero to its peak."""
    cosine_steps: int | None = None
    """Steps of the half cosine; null means it ends with training (2401.07788 uses twice its length)."""
    max_grad_norm: float | None = None
    """Clip gradients to this norm over all stages; null clips nothing."""

    def __post_init__(self) -> None:
        mistakes = [
            f"optimizer.{name} must be finite and not negative, got {value}"
            for name, value in (
                ("lr", self.lr),
                ("weight_decay", self.weight_decay),
                ("warmup_steps", self.warmup_steps),
                ("max_grad_norm", self.max_grad_norm or 0.0),
            )
            if value < 0 or not math.isfinite(value)
        ]
        if not all(0 <= beta < 1 for beta in self.betas):
            mistakes.append(f"optimizer.betas must be at least 0 and below 1, got {list(self.betas)}")
        if mistakes:
            raise OptionsError(mistakes)


MOST_THREADS = 1024
"""Threads that a stage process may have: as many as the largest machines have cores."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How long to train, and with what numbers."""

    steps: int = 100
    """Optimizer steps."""
    epochs: int | None = None
    """Times through the training data, in place of steps; null counts steps."""
    seed: int = 0
    """Seed of weights, order of samples, dropout and stochastic rounding."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward pass: fp32, or bf16 by autocast."""
    threads: int = 1
    """CPU threads of each stage process; part of the recipe because sums depend on it."""
    evaluate_every: str = "0 steps"
    """How often held-out samples are scored: "1 epoch" or "500 steps"; "0 steps" scores at the end only."""

    def __post_init__(self) -> None:
        mistakes = [
            f"training.{name} must be at least {least}, got {value}"
            for name, value, least in (
                ("steps", self.steps, 0),
                ("epochs", self.epochs, 0),
                ("threads", self.threads, 1),
            )
            if value is not None and value < least
        ]
        if self.threads > MOST_THREADS:
            mistakes.append(f"training.threads must be at most {MOST_THREADS}, got {self.threads}")
        mistakes += _misspelt("training.evaluate_every", self.evaluate_every)
        if mistakes:
            raise OptionsError(mistakes)

    def evaluates_after(self, done: int, steps_per_epoch: int) -> bool:
        """Whether held-out samples are scored once `done` steps are, the end aside."""
        return _is_due(self.evaluate_every, done, steps_per_epoch)


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """What is kept so that a run that stopped goes on as if it never had."""

    every: str = "0 steps"
    """How often a checkpoint is written, beside training: "500 steps" or "1 epoch"; "0 steps" writes none."""
    keep: int = 2
    """How many checkpoints stay; an older one goes once a newer one is whole."""
    folder: str = ""
    """Folder of the checkpoints, on each stage's own disk or shared; empty means checkpoints/ in the run's folder."""
    resume: Literal["auto", "always", "never"] = "auto"
    """Whether to go on from the newest whole checkpoint: if there is one, always (without one the run stops), or never
    (it starts anew, and checkpoints that are there go)."""
    restarts: int = 0
    """How often `thinwire train` starts the stages again from the newest checkpoint after one of them died."""

    def __post_init__(self) -> None:
        mistakes = _misspelt("checkpoint.every", self.every)
        if self.keep < 1:
            mistakes.append(f"checkpoint.keep must be at least 1, got {self.keep}")
        if self.restarts < 0:
            mistakes.append(f"checkpoint.restarts must be at least 0, got {self.restarts}")
        if mistakes:
            raise OptionsError(mistakes)

    @property
    def wanted(self) -> bool:
        """Whether checkpoints are written at all."""
        return _duration(self.every)[0] > 0

    def due_after(self, done: int, steps_per_epoch: int) -> bool:
        """Whether a checkpoint is written once `done` steps are."""
        return _is_due(self.every, done, steps_per_epoch)


@dataclass(frozen=True, kw_only=True)
class DebugOptions:
    """Checks that cost time."""

    check_buffers: bool = False
    """Compare the buffers at both ends of every boundary after each epoch and at the end."""
    trace: int = 0
    """How many of the last training steps to record as a trace, for thinwire trace and thinwire report; 0: none."""

    def __post_init__(self) -> None:
        if self.trace < 0:
            raise OptionsError(f"debug.trace must be at least 0 steps, got {self.trace}")


def _is_auto(expression: str) -> bool:
    return expression.strip() == AUTO


def _misspelt(name: str, duration: str) -> list[str]:
    """What is wrong with a duration, if anything."""
    return (
        [] if _DURATION.fullmatch(duration) else [f'{name} must be like "20 epochs" or "500 steps", got {duration!r}']
    )


def _is_due(duration: str, done: int, steps_per_epoch: int) -> bool:
    """Whether something that happens every so often happens after `done` steps."""
    number, in_epochs = _duration(duration)
    every = number * steps_per_epoch if in_epochs else number
    return done > 0 and every > 0 and done % every == 0


def _duration(duration: str) -> tuple[int, bool]:
    """The number, and whether it counts epochs."""
    number, unit = duration.split()
    return int(number), unit.startswith("epoch")
