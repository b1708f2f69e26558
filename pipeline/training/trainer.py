"""The training loop of one process of a pipeline. The process holds one stage, several, or (in a simulation) all.

Every process follows the same sampler, so all know the samples of every micro-batch without a message. Only the process
of the first stage reads inputs; only the process of the last stage reads targets.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from thinwire.compress import PassKind, Progress
from thinwire.errors import ThinwireWarning
from thinwire.models.data.clients import Turns
from thinwire.models.data.sampler import Sampler
from thinwire.models.data.samples import Samples
from thinwire.models.tasks import Task
from thinwire.pipeline.errors import NonFiniteError
from thinwire.pipeline.measuring.meters import Section, spending
from thinwire.pipeline.measuring.step_traffic import StageExchanged, StepTraffic
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.stages.compressed_stage import CompressedStage
from thinwire.pipeline.training.optimization import Update, norm_of
from thinwire.pipeline.training.runner import Runner
from thinwire.pipeline.training.sync import PipelineBatch, Sync
from thinwire.pipeline.wire.passes import Pass


@dataclass(frozen=True)
class StepRecord:
    """The record of one optimizer step. `loss` is None except in the process that reports."""

    step: int
    epoch: int
    loss: float | None
    """If replicas step alone, that of the first one, as is the norm."""
    lr: float
    grad_norm: float | None
    """Of all stages, before it is clipped. None in a process that does not report, unless the step needs it."""
    seconds: float
    samples: int
    """Samples of all replicas."""
    sections: dict[Section, float]
    bytes: int
    """Bytes of the frames that all stages of the first replica sent, in the process that reports; elsewhere those that
    the stages there sent. In a simulation those of all replicas."""
    uncompressed: int
    """Bytes of the tensors in those frames, uncompressed."""
    exchanged: Sequence[StageExchanged] = ()
    """What each stage of the first replica exchanged with the others, in the process that reports; empty if nothing."""


@dataclass(kw_only=True, eq=False)
class Trainer:
    """Trains the stages of this process in step with all the others.

    Attributes:
        reports: whether this process logs and prints for all.
        traffic: what the stages send and exchange in a step.
    """

    runner: Runner
    """The stages of this process and their schedule."""
    placement: Placement
    """Where all stages live."""
    samples: Samples
    """The training data."""
    sampler: Sampler | Turns
    """The order of the training data."""
    task: Task
    """Counts valid targets."""
    sync: Sync
    """What pipelines exchange around the step, and whose optimizers step when."""
    update: Update
    """The optimizer's step of all stages."""
    causal: bool = False
    """Whether no output for a token depends on later ones: padding behind samples then stays off the wire."""
    done: int = 0
    """Optimizer steps that are done. Codecs that change while training goes on depend on it."""
    stopped: bool = False
    """Whether training ends before its last step, alike in all processes; set it after an evaluation."""
    asked: Callable[[], bool] | None = None
    """Whether this process was asked to stop; if it is not None, each step ends with asking all processes."""
    anyone_asked: bool = False
    """Whether any was, when the last step ended."""

    def __post_init__(self) -> None:
        self.reports = self.runner.has_last and self.placement.last_process == self.placement.reporter
        meters = {stage.stage_index: stage.meter for stage in self.stages}
        self.traffic = StepTraffic(meters, self.placement, self.stages[0].wire.timeout)

    @property
    def stages(self) -> Sequence[CompressedStage]:
        """The stages of this process, in stage order."""
        return self.runner.stages

    @property
    def progress(self) -> Progress:
        """How far training is."""
        return Progress(self.done, self.sampler.steps_per_epoch)

    def train(self, after_step: Callable[[StepRecord], None], first: int = 0) -> None:
        """Run all optimizer steps from `first` on. `after_step` is called after each; it may raise to end training."""
        self.done = first
        while (step := self.done) < self.update.steps and not self.stopped:
            if (step - first).bit_count() <= 1:  # after 0, 1, 2, 4, 8 ... steps
                self.read_clocks(begins=step == first)
            after_step(self.train_step(step))
        if not self.stopped:
            self.sync.end(Progress(self.done - 1, self.sampler.steps_per_epoch))

    def read_clocks(self, *, begins: bool = True) -> None:
        """Compare the clocks of processes that wait for each other, so that waiting can be distinguished.

        Collective, between two steps; `begins` says whether none has been done yet.
        """
        self.stages[0].wire.clocks.read([*self.placement.neighbours, *self.sync.counterparts(begins=begins)])

    def train_step(self, step: int) -> StepRecord:
        """Take one optimizer step, counted from 0."""
        self.done = step
        meters = [stage.meter for stage in self.stages]
        started, before = time.perf_counter(), spending(meters)
        # 1. Make room for what other processes send in this step: it arrives while this one works.
        self.sync.begin(self.progress)
        self.update.expect()
        self.traffic.begin()
        # 2. Forward and backward, all micro-batches. There is one pipeline, except in a simulation of replicas.
        batch, compression = self.sampler.batch(step), self.stages[0].wire.compression
        kind: PassKind = "warmup" if compression.warms_up(self.progress) else "train"
        targets = self.samples.targets(batch.ids) if self.runner.has_last else None
        self.runner.set_mode(trains=True)
        squares: list[Mapping[int, float]] = []
        for own in self.sync.batches(kind, batch.ids, targets):
            if own.counted is not None:
                counted = self.task.num_valid(own.counted)
                if not counted:
                    said = "a step has no target that counts, so it trains nothing; check the labels of the data"
                    warnings.warn(said, ThinwireWarning, stacklevel=2)
                self.runner.loss.begin(counted)
            losses = self._forward_and_backward(kind, own, batch.epoch)
            self.update.to_momentum(self.progress, self.sync.optimizers)
            self.sync.after_backward(own, losses)
            squares += self._step(own.pipeline)
        # 3. Make room for the next step's activations: what follows waits for other processes, one latency or more.
        for stage in self.stages if step + 1 < self.update.steps else ():
            stage.post_ahead()
        # 4. The step by the gradients of all, unless each pipeline has taken its own.
        self.sync.before_step()
        squares += self._step(None)
        self.sync.after_step()
        losses_of_all = self.sync.losses()
        self._require_finite(step, "loss", losses_of_all)
        self.done = step + 1
        if self.asked is not None:  # here, for its wait belongs to the step: another stage may be slower
            with meters[0].section("neighbour", "waiting for the step of all stages"):
                self.anyone_asked = collectives.anyone(self.placement, self.asked())
        here = {stage: float(square) for stage, square in squares[0].items()}
        nbytes, uncompressed, exchanged, of_stages = self.traffic.end(here)
        grad_norm = norm_of(of_stages) if len(of_stages) == self.placement.num_stages else None
        self._require_finite(step, "gradient norm", [] if grad_norm is None else [grad_norm])
        seconds, spent = time.perf_counter() - started, spending(meters)
        return StepRecord(
            step=step,
            epoch=batch.epoch,
            loss=math.fsum(losses_of_all) if self.reports else None,
            lr=self.update.lr(step),
            grad_norm=grad_norm,
            seconds=seconds,
            samples=len(batch.ids),
            sections={name: spent[name] - before[name] for name in spent},
            bytes=nbytes,
            uncompressed=uncompressed,
            exchanged=exchanged if self.reports else (),
        )

    def _step(self, pipeline: int | None) -> list[Mapping[int, float]]:
        """Step the optimizers whose turn it is after the backward of a pipeline, or of all.

        Returns the squares of the norms of their gradients, by stage; none if none steps.
        """
        optimizers = self.sync.stepping(pipeline)
        together = len(self.sync.replicas.here) if pipeline is None else 1
        return [self.update.step(self.progress, optimizers, together)] if optimizers else []

    def _require_finite(self, step: int, what: str, numbers: Sequence[float]) -> None:
        """Raise NonFiniteError if a loss or the gradient norm is not finite; a frame need not show it.

        The weights have moved, but no checkpoint of this step has been written yet.
        """
        if self.stages[0].wire.options.nonfinite == "send":
            return
        if bad := [number for number in numbers if not math.isfinite(number)]:
            raise NonFiniteError(
                f"the {what} of step {step + 1} is {bad[0]}; lower the learning rate, or go on with wire.nonfinite send"
            )

    def lengths(self, samples: Samples, ids: Tensor) -> Tensor | None:
        """How many tokens of samples cross, int64 [B]; None if all do."""
        lengths = samples.lengths if self.causal else None
        return None if lengths is None else lengths[ids]

    def _forward_and_backward(self, kind: PassKind, own: PipelineBatch, epoch: int) -> list[Tensor]:
        """All passes of one pipeline: the micro-batches' losses on the last stage."""
        inputs = self.samples.inputs(own.ids, epoch) if self.runner.has_first else None
        losses: list[Tensor] = []
        count = self.sync.passes
        by_pass = ([None] * count if each is None else each.chunk(count) for each in (own.ids, inputs, own.targets))
        for index, (ids, pass_inputs, pass_targets) in enumerate(zip(*by_pass, strict=True)):
            lengths = self.lengths(self.samples, ids)
            coming = Pass(kind=kind, accumulation=own.first + index, sample_ids=ids, lengths=lengths)
            losses += self.runner.run(coming, self.samples.side(ids), pass_inputs, pass_targets)
        return losses
