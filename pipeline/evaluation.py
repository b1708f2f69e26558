"""Evaluation, always twice: with compression as in training, and without compression.

The difference between the two is the main practical finding of 2401.07788, so both are always reported. `look` does it
for one batch before training: a pretrained model shows at once whether it bears the codecs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.compress import PassKind
from thinwire.errors.words import were
from thinwire.models.data.samples import Samples
from thinwire.models.tasks import mask_padding
from thinwire.pipeline.errors import EvaluationStoppedError
from thinwire.pipeline.generation import Generator
from thinwire.pipeline.options.compression import MILD
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.training.trainer import Trainer
from thinwire.pipeline.wire.passes import Pass

Compression = Literal["on", "off"]
"""The name of a score in reports: whether the boundaries compressed."""
TOO_MUCH = 0.05
"""Codecs cost too much if the loss with compression is higher than without by more than this share."""
PASS_KINDS: Mapping[Compression, PassKind] = {"on": "eval-on", "off": "eval-off"}


@dataclass(frozen=True)
class Score:
    """The mean loss over the valid targets of the held-out samples, how many there were, and the task's metrics."""

    loss: float
    num_targets: int
    metrics: dict[str, float]
    losses: tuple[float, ...] = field(default=(), compare=False, repr=False)
    """Of each micro-batch, summed over its targets."""

    def values(self) -> dict[str, float]:
        """All values by name: loss, num_targets, and the metrics."""
        return {"loss": self.loss, "num_targets": self.num_targets, **self.metrics}


def evaluate(
    trainer: Trainer,
    samples: Samples,
    batches: Callable[[], Iterable[Any]],
    asked: Callable[[], bool] | None = None,
) -> dict[Compression, Score] | None:
    """Score held-out samples with compression on, then off; None except in the process that reports.

    Replicas share the batches, as `Sync.scorer` says.

    Args:
        trainer: gives stages, schedule and replicas. Its training state and the seconds of its meters do not change.
        batches: makes the batches, each of the shape of training and alike each time; `valid` marks padding.
        asked: says whether this process was asked to stop; None if none ever is, in all processes.

    Raises:
        EvaluationStoppedError: in all processes, after the batch under way, if any was asked. Nothing of it counts.
    """
    stop = _Stop(trainer, asked)
    with undone_if_stopped(trainer), _apart(trainer):
        scores = {name: _score(trainer, kind, samples, batches(), stop) for name, kind in PASS_KINDS.items()}
    return scores if trainer.reports else None


@contextmanager
def undone_if_stopped(trainer: Trainer) -> Iterator[None]:
    """Around an evaluation: where it is stopped, its passes and traffic do not count, because all of it comes again."""
    before = [(stage, dict(stage.passes), stage.meter.state_dict()) for stage in trainer.stages]
    try:
        yield
    except EvaluationStoppedError:
        for stage, passes, measured in before:
            stage.passes = passes
            stage.meter.load_state_dict(measured)
        raise


class _Stop:
    """Whether any process was asked to stop: all report while a batch runs, so that nobody waits for the answer."""

    def __init__(self, trainer: Trainer, asked: Callable[[], bool] | None) -> None:
        self._asked, self._notes = asked, None
        if asked is not None:
            timeout = trainer.stages[0].wire.timeout
            here = trainer.placement.stages_of(dist.get_rank())
            what = f"{were(here)} exchanging with the others, in an evaluation, whether one was asked to stop"
            self._notes = collectives.AsyncNotes(None, collectives.NoteKind.STOP, lambda rank: what, timeout)

    def through(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, up to a stop. This process reports before each, and reads the others' before the next."""
        if self._notes is None or self._asked is None:
            yield from batches
            return
        for batch in batches:
            self._notes.expect()
            self._notes.send(mine := self._asked())
            yield batch
            if any([mine, *self._notes.receive()]):
                raise EvaluationStoppedError


def answers(
    trainer: Trainer,
    generator: Generator,
    prompts: Sequence[tuple[Tensor, int]],
    ends: Collection[int],
    asked: Callable[[], bool] | None = None,
) -> list[dict[Compression, list[int]]]:
    """The most likely tokens after each prompt, with compression on and off; of several replicas, by the first.

    Empty except in the process that reports. Neither training nor the seconds of its meters change.

    Args:
        prompts: token ids, int64 [N], and the most tokens that may follow.
        ends: the tokens that end an answer.
        asked: says whether this process was asked to stop; None if none ever is, in all processes.

    Raises:
        EvaluationStoppedError: in all processes, after the token under way, if any was asked.
    """
    found: list[dict[Compression, list[int]]] = []
    with _apart(trainer), suppress(EvaluationStoppedError):
        if trainer.sync.scorer(0) is not None:
            trainer.runner.set_mode(trains=False)
            for prompt, most in prompts:
                tokens = partial(generator.tokens, prompt, most, ends, asked=asked or (lambda: False))
                found.append({name: list(tokens(kind)) for name, kind in PASS_KINDS.items()})
    if asked is not None and collectives.anyone(trainer.placement, asked()):  # those that wrote nothing hear it here
        raise EvaluationStoppedError
    return found if trainer.reports else []


@dataclass(frozen=True)
class Look:
    """What one held-out batch says of the codecs before training."""

    scores: Mapping[Compression, Score]
    alone: Mapping[int, Score]
    """With the codec of one boundary alone, by its index; empty unless all together cost too much."""

    def values(self) -> dict[str, Any]:
        """All scores, as JSON values."""
        alone = {str(boundary): score.values() for boundary, score in self.alone.items()}
        return {**{mode: score.values() for mode, score in self.scores.items()}, "alone": alone}

    @property
    def advice(self) -> str | None:
        """A sentence if the codecs cost too much."""
        alone = {boundary: score.loss for boundary, score in self.alone.items()}
        return advice(self.scores["on"].loss, self.scores["off"].loss, alone)


def look(trainer: Trainer, samples: Samples, batches: Callable[[], Iterable[Any]]) -> Look | None:
    """Score the first batch before the first step; None except in the process that reports. Collective.

    Where the codecs cost too much together, each boundary is scored alone. Only the traffic of evaluations
    shows afterwards that there was a look: buffers are as empty as before.

    Args:
        trainer, samples, batches: as for `evaluate`; no step was taken.
    """
    with _without_trace(trainer):
        scores = evaluate(trainer, samples, lambda: islice(batches(), 1))
    costly = scores is not None and costs_too_much(scores["on"].loss, scores["off"].loss)
    alone = dict[int, Score]()
    ends = [end for stage in trainer.stages for end in stage.ends.channels]
    boundaries = range(trainer.placement.num_stages - 1) if collectives.anyone(trainer.placement, costly) else ()
    for boundary in boundaries:
        for end in ends:
            end.bypassed = end.channel.boundary != boundary
        with _apart(trainer), _without_trace(trainer):
            alone[boundary] = _score(trainer, "eval-on", samples, islice(batches(), 1), _Stop(trainer, None))
    for end in ends:
        end.bypassed = False
    return Look(scores, alone) if scores is not None else None


def costs_too_much(on: float, off: float) -> bool:
    """Whether the loss with compression says that the codecs cost too much, given the loss without."""
    return math.isfinite(off) and not on <= off * (1 + TOO_MUCH)


def advice(on: float, off: float, alone: Mapping[int, float] = MappingProxyType({})) -> str | None:
    """A sentence if codecs cost too much, with milder ones; None if they do not.

    Args:
        on, off: the held-out losses with compression and without.
        alone: those with the codec of one boundary alone, by its index, where they are known.
    """
    if not costs_too_much(on, off):
        return None
    at_fault = [boundary for boundary, loss in alone.items() if costs_too_much(loss, off)]
    only = len(at_fault) == 1 and len(alone) > 1
    where = f"; boundary {at_fault[0]} alone is at fault, with {alone[at_fault[0]]:.4f} by itself" if only else ""
    return (
        f"the codecs cost too much: the held-out loss is {on:.4f} with compression and {off:.4f} without{where}; "
        f"milder for activations of pretrained models are {' and '.join(MILD)}"
    )


@contextmanager
def _apart(trainer: Trainer) -> Iterator[None]:
    """Do not count the seconds inside as those of training."""
    with ExitStack() as stack:
        for stage in trainer.stages:
            stack.enter_context(stage.meter.apart())
        yield
        # whoever is through first would wait for the others in its next training step
        collectives.barrier(trainer.placement, "waiting for the end of an evaluation")


@contextmanager
def _without_trace(trainer: Trainer) -> Iterator[None]:
    """Count no pass inside, and empty the buffers again that they filled; before the first step all are empty."""
    passes = [dict(stage.passes) for stage in trainer.stages]
    yield
    for stage, before in zip(trainer.stages, passes, strict=True):
        stage.passes = before
        for coder in stage.ends.coders().values():
            coder.buffers.load_state_dict({})


def _score(trainer: Trainer, kind: PassKind, samples: Samples, batches: Iterable[Any], stop: _Stop) -> Score:
    sums: list[float] = []
    counts: list[Tensor] = []
    num_targets = 0
    runner, sync = trainer.runner, trainer.sync
    runner.loss.begin(1, counts)  # sums over batches; divided by the totals below
    runner.set_mode(trains=False)
    with torch.no_grad():
        for index, batch in enumerate(stop.through(batches)):
            replica = sync.scorer(index)
            if replica is None:
                sync.skip(kind, 1)
                continue
            inputs = samples.inputs(batch.ids, batch.epoch) if runner.has_first else None
            targets = mask_padding(samples.targets(batch.ids), batch.valid) if runner.has_last else None
            num_targets += trainer.task.num_valid(targets) if targets is not None else 0
            # so slots by position are those of the replica, in a simulation as in its own process; and rows that only
            # fill up a batch have slots of their own: they are samples of another batch, maybe of another replica
            first, slots = sync.first_pass(replica), torch.arange(len(batch.ids)) + index * len(batch.ids)
            lengths = trainer.lengths(samples, batch.ids)
            coming = Pass(kind=kind, accumulation=first, sample_ids=slots, lengths=lengths)
            losses = runner.run(coming, samples.side(batch.ids), inputs, targets)
            sums += [float(loss) for loss in losses]
    if not runner.has_last:
        return Score(math.nan, 0, {})
    counted = torch.stack(counts).sum(0).tolist() if counts else None
    # every loss, not their sum: fsum of all does not depend on which replica has which. Counts are whole numbers, and
    # many; fractions, as metrics of one's own give, may differ in the last digit
    told = collectives.everyone_across(trainer.placement, [sums, num_targets, counted])
    total = sum(number for _, number, _ in told)
    pieces = tuple(loss for losses, _, _ in told for loss in losses)
    mean_loss = math.fsum(pieces) / max(1, total)
    observed = [each for _, _, each in told if each is not None]
    if not observed:
        return Score(math.nan, 0, {})
    metrics = trainer.task.metrics(mean_loss, torch.tensor(observed, dtype=torch.float64).sum(0))
    return Score(mean_loss, total, metrics, pieces)


def error_of_difference(scores: Mapping[Compression, Score]) -> float | None:
    """The standard error, over the held-out text, of the difference of two losses; None of fewer than two pieces."""
    pieces = [off - on for on, off in zip(scores["on"].losses, scores["off"].losses, strict=True)]
    if len(pieces) < 2 or not all(map(math.isfinite, pieces)):
        return None
    return statistics.stdev(pieces) * math.sqrt(len(pieces)) / max(1, scores["on"].num_targets)
