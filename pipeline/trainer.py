"""The training loop of one process of a pipeline. The process holds one stage, several, or (in a simulation) all.

Every process follows the same sampler, so all know the samples of every micro-batch without a message. Only the process
of the first stage reads inputs; only the process of the last stage reads targets.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from thinwire.compress import PassKind, Progress
from thinwire.compress.transfer import put
from thinwire.models.data.samples import Samples
from thinwire.models.tasks import Task
from thinwire.pipeline.checkpoint import Checkpoints, StageState
from thinwire.pipeline.checkpoint_folder import Manifest, SavedStage
from thinwire.pipeline.devices.device import put_all
from thinwire.pipeline.meters import spending
from thinwire.pipeline.optimization import WholeBatchLoss, clip, lr_factor, make_optimizer, squared_norm
from thinwire.pipeline.options import OptimizerOptions, PipelineOptions, TrainingOptions
from thinwire.pipeline.passes import Pass
from thinwire.pipeline.precision.loss_scale import LossScale
from thinwire.pipeline.process import Placement, StageNumbers
from thinwire.pipeline.replicas.exchange import ALONE, Replicas
from thinwire.pipeline.replicas.local import LocalSteps
from thinwire.pipeline.replicas.losses import LossesOfOthers
from thinwire.pipeline.replicas.membership.steps import steps_of
from thinwire.pipeline.replicas.quantized_adam import QuantizedAdam
from thinwire.pipeline.replicas.shares import Shares, by_pass
from thinwire.pipeline.replicas.step_exchanges import StepExchanges
from thinwire.pipeline.shared import SharedWeights
from thinwire.pipeline.stage import CompressedStage
from thinwire.pipeline.state import collect, restore, restore_model, stores_of
from thinwire.pipeline.tracing.record import StepRecord
from thinwire.pipeline.tracing.spans import Work
from thinwire.pipeline.tracing.tracer import Tracer


class Batches(Protocol):
    """The order of samples: a pure function of the step."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps in one pass through the training data."""

    def batch(self, step: int) -> Any:
        """The batch of a step: `ids` int64 [B], `valid` bool [B]."""


class Trainer:
    """Trains the stages of this process in step with all the others.

    Args:
        stages: this process's stages, in stage order.
        schedule: a schedule of torch.distributed.pipelining over them, its loss function a WholeBatchLoss.
        loss: that loss function.
        placement: where all stages live.
        samples, sampler: the training data and its order.
        task: counts valid targets.
        shared: weights that several stages hold, or None.
        replicas: those of these stages.
        trace: how many of the last steps the tracer keeps.

    Attributes:
        scale: the factor of the loss, alike on all stages.
        done: optimizer steps that are done. Codecs that change while training goes on depend on it.
        exchanges: those with other replicas.
    """

    def __init__(
        self,
        *,
        stages: Sequence[CompressedStage],
        schedule: Any,
        loss: WholeBatchLoss,
        placement: Placement,
        samples: Samples,
        sampler: Batches,
        task: Task,
        pipeline: PipelineOptions,
        optimizer: OptimizerOptions,
        training: TrainingOptions,
        shared: SharedWeights | None = None,
        replicas: Replicas = ALONE,
        trace: int = 0,
    ) -> None:
        self.stages, self.schedule, self.loss, self.placement = list(stages), schedule, loss, placement
        self.samples, self.sampler, self.task = samples, sampler, task
        self._options, self._training, self._shared = optimizer, training, shared
        self.replicas, self._shares = replicas, Shares(replicas.options.passes(pipeline.accumulation))
        self.has_first = any(stage.is_first for stage in stages)
        self.has_last = any(stage.is_last for stage in stages)
        self.reports = self.has_last and placement.replica == 0
        timeout = timedelta(seconds=stages[0].wire.options.timeout)
        self.exchanges = StepExchanges(self.stages, placement, replicas.count)
        self._squares = StageNumbers(placement, "the gradient norm", timeout)
        travels = self.has_last and placement.num_replicas > 1 and not replicas.options.step_alone
        self._losses = LossesOfOthers(placement, timeout, travels=travels)
        self.scale = LossScale(active=training.precision == "fp16")
        self._local: LocalSteps | None = None
        self._optimizers: list[Optimizer]
        if replicas.options.step_alone:
            make = partial(make_optimizer, options=optimizer)
            self._local = steps_of(replicas, self._shares, pipeline.pass_size)(stages, replicas, make, shared)
            self._optimizers = self._local.outer
        else:
            self._optimizers = [make_optimizer(stage.submod.parameters(), optimizer, self._parts) for stage in stages]
        self.tracer = Tracer({stage.stage_index: stage.meter for stage in self.stages}, trace)
        for stage in self.stages:
            stage.keep_outputs = False
        self._trains: bool | None = None
        self.done = 0

    def begin(self, done: int) -> int:
        """The step that comes after `done` steps; a replica that comes back may take that of the others."""
        self.done = done if self._local is None else self._local.begin(done, self._training.steps)
        return self.done

    def train(self, after_step: Callable[[StepRecord], None], first: int = 0) -> None:
        """Run all optimizer steps from `first` on, calling `after_step` after each."""
        self.tracer.read_clock(self.placement.reporter)
        self.done = first
        while (step := self.done) < self._training.steps:
            if (step - first).bit_count() <= 1:  # after 0, 1, 2, 4, 8 ... steps
                self.read_clocks(of_replicas=step == first or self._local is None)
            with self.tracer.step(step):
                record = self.train_step(step)
            after_step(record)
        self.tracer.read_clock(self.placement.reporter)

    def read_clocks(self, *, of_replicas: bool = True) -> None:
        """Compare the clocks of neighbours, and of replicas, so that waiting can be told apart.

        Collective, between two steps, over a pipeline or over all replicas.
        """
        pairs = self.placement.counterparts if of_replicas else []
        self.stages[0].wire.clocks.read([*self.placement.neighbours, *pairs])

    def train_step(self, step: int) -> StepRecord:
        """Take one optimizer step, counted from 0."""
        self.done = step
        skipped = self.scale.skipped
        meters = [stage.meter for stage in self.stages]
        started, before = time.perf_counter(), spending(meters)
        self._expect()
        batch = self.sampler.batch(step)
        targets = self.samples.targets(batch.ids) if self.has_last else None
        self.set_mode(trains=True)
        warms_up = self.stages[0].wire.compression.warms_up(step, self.sampler.steps_per_epoch)
        kind: PassKind = "warmup" if warms_up else "train"
        # pass numbers are those of the whole batch: dropout and codecs draw by them, so not by replica
        self.skip(kind, self._shares.before(self.replicas.here.start))
        losses, grad_norm = self._passes_and_update(step, kind, batch, targets)
        self.done = step + 1 if self._local is None else self._local.step_after(step)
        exchanged = self.exchanges.end(step)
        seconds, spent = time.perf_counter() - started, spending(meters) - before
        return StepRecord(
            step=step,
            epoch=batch.epoch,
            loss=math.fsum(losses) if self.reports else None,
            lr=self._options.lr * lr_factor(step, self._training.steps, self._options),
            grad_norm=grad_norm,
            seconds=seconds,
            samples=len(batch.ids),
            sections=spent.sections,
            bytes=spent.bytes,
            uncompressed=spent.uncompressed,
            skipped=self.scale.skipped > skipped,
            exchanged=exchanged,
        )

    def _expect(self) -> None:
        """Make room for what other processes tell this one in the step that begins: it arrives while this one works."""
        self.exchanges.begin()
        if self._takes_norm:
            self._squares.expect()
        self._losses.expect()

    @property
    def _takes_norm(self) -> bool:
        """Whether a step takes the norm of the gradients of all stages."""
        return self._options.max_grad_norm is not None or self.scale.active

    def _passes_and_update(
        self, step: int, kind: PassKind, batch: Any, targets: Tensor | None
    ) -> tuple[list[float], float | None]:
        """The passes of the replicas here, and what follows them: the losses to report, and the gradient norm."""
        if self._local is not None:
            return self._step_alone(self._local, step, kind, batch, targets)
        # before any pass: the share of a micro-batch divides by the targets of the whole batch, of all replicas
        if targets is not None:
            self.loss.begin(self.task.num_valid(targets), factor=self.scale.factor)
        losses: list[Tensor] = []
        for replica in self.replicas.here:
            with self.replicas.statistics.of(replica, self.progress):
                losses += self._run_replica(replica, kind, batch, targets)
            self._to_momentum()
            self.replicas.submit(replica, self.progress)
        self.skip(kind, self._shares.behind(self.replicas.here.stop))
        self._losses.tell(losses)
        self.replicas.finish(self.progress)
        norm = self._update(step, self._optimizers)
        return [*map(float, losses), *self._losses.hear()], norm

    def _step_alone(
        self, local: LocalSteps, step: int, kind: PassKind, batch: Any, targets: Tensor | None
    ) -> tuple[list[float], float | None]:
        """A step of each replica here by itself, and the exchange if it is due; of the first one losses and norm.

        No replica waits for another before the exchange.
        """
        found = []
        for replica in self.replicas.here:
            local.use(replica)
            if targets is not None:
                self.loss.begin(self.task.num_valid(self._shares.part(targets, replica)))
            losses = self._run_replica(replica, kind, batch, targets)
            norm = self._update(step, local.optimizers(replica))
            found.append(([float(loss) for loss in losses], norm))
        local.use(None)
        self.skip(kind, self._shares.behind(self.replicas.here.stop))
        local.after_step(step + 1, self._training.steps, self.progress)
        return found[0]

    def first_pass(self, replica: int) -> int:
        """The place of a replica's first pass among those of a step in this process. Slots by position depend on it."""
        return self._shares.before(replica) - self._shares.before(self.replicas.here.start)

    def set_mode(self, *, trains: bool) -> None:
        """Put the modules into the mode of training or of evaluation, if they are not in it: the walk takes time."""
        if self._trains == trains:
            return
        self._trains = trains
        for stage in self.stages:
            stage.submod.train(trains)

    def use_ends_of(self, replica: int) -> None:
        """Let the next passes go through the codecs of a replica."""
        for stage in self.stages:
            stage.use(replica)

    def skip(self, kind: PassKind, count: int) -> None:
        """Count passes that other replicas run."""
        for stage in self.stages:
            stage.skip(kind, count)

    def run(self, coming: Pass, side: dict[str, Tensor], inputs: Tensor | None, targets: Tensor | None) -> list[Tensor]:
        """One pass through the schedule: the micro-batches' losses on the last stage.

        Args:
            coming: which pass, with the ids of its samples.
            side: its side inputs.
            inputs: None except in the process of the first stage.
            targets: None except in the process of the last stage.
        """
        losses: list[Tensor] = []
        # all stages before the schedule: it may run any of them first
        for stage in self.stages:
            stage.begin(coming)
        device = self.stages[0].device
        args = () if inputs is None else (put(inputs, device),)
        kwargs = {} if targets is None else {"target": put(targets, device), "losses": losses}
        act = self.schedule.step if coming.trains else self.schedule.eval
        act(*args, **kwargs, **put_all(side, device))
        # wait for sends only now: they ran while the stages computed
        for stage in self.stages:
            stage.flush()
        return [loss.detach() for loss in losses]

    @property
    def progress(self) -> Progress:
        """How far training is."""
        return Progress(self.done, self.sampler.steps_per_epoch)

    def collect(self) -> dict[int, StageState]:
        """Copies of the state of every stage of this process, by its part of a checkpoint, between two steps.

        Collective over replicas that step alone: it waits for what is under way between them.
        """
        if self._local is not None:
            self._local.settle()
        return {
            self.placement.part(stage.stage_index): collect(stage, optimizer, self._state_of_replicas(stage))
            for stage, optimizer in zip(self.stages, self._optimizers, strict=True)
        }

    def _state_of_replicas(self, stage: CompressedStage) -> dict[str, Tensor]:
        local = {} if self._local is None else self._local.state_dict(stage.stage_index)
        return self.replicas.state_dict(stage.stage_index) | local

    def resume(self, checkpoints: Checkpoints, manifest: Manifest) -> None:
        """Go on from a checkpoint of the same cut, with all state. CheckpointError if it is damaged."""
        self.done = manifest.step
        for stage, optimizer in zip(self.stages, self._optimizers, strict=True):
            part = self.placement.part(stage.stage_index)
            saved = SavedStage(checkpoints.folder, manifest.step, part)
            checkpoints.resume(manifest, part, stores_of(stage, saved))
            restore(stage, optimizer, saved)
            if self._local is not None:
                self._local.load_state_dict(stage.stage_index, [saved])
                self._local.load_flight(stage.stage_index, saved)
            self.replicas.load_state_dict(stage.stage_index, saved.tensors("replicas/"))

    def resume_model(self, folder: Path, manifest: Manifest) -> None:
        """Go on from a checkpoint of any cut: weights, optimizer, errors between replicas. Boundaries start empty."""
        self.done = manifest.step
        model = [SavedStage(folder, manifest.step, part) for part in manifest.model_parts]
        everything = [SavedStage(folder, manifest.step, part) for part in manifest.parts]
        for stage, optimizer in zip(self.stages, self._optimizers, strict=True):
            restore_model(stage, optimizer, model)
            stage.passes = dict(model[0].values["passes"])  # alike in all stages; random numbers follow from them
            self.replicas.load_recut(stage, everything, self._shared)
            if self._local is not None:
                self._local.load_state_dict(stage.stage_index, everything)

    def _run_replica(self, replica: int, kind: PassKind, batch: Any, targets: Tensor | None) -> list[Tensor]:
        """All passes of one replica: the micro-batches' losses on the last stage.

        Args:
            replica: the replica; its samples are a part of the batch.
            kind: of its passes.
            batch: the whole batch.
            targets: those of the whole batch; None except in the process of the last stage.
        """
        self.use_ends_of(replica)
        ids, count = self._shares.part(batch.ids, replica), self._shares.passes[replica]
        inputs = self.samples.inputs(ids, batch.epoch) if self.has_first else None
        own_targets = None if targets is None else self._shares.part(targets, replica)
        first = self.first_pass(replica)
        losses: list[Tensor] = []
        parts = zip(ids.chunk(count), by_pass(inputs, count), by_pass(own_targets, count), strict=True)
        for index, (part_ids, part_inputs, part_targets) in enumerate(parts):
            coming = Pass(kind=kind, accumulation=first + index, sample_ids=part_ids, progress=self.progress)
            losses += self.run(coming, self.samples.side(part_ids), part_inputs, part_targets)
        return self.scale.undo(losses)

    def _parts(self, parameter: Parameter) -> int:
        """In how many parts the gradient of a parameter comes: of each replica, and of each stage that holds it."""
        return self.replicas.count * (1 if self._shared is None else self._shared.copies_of(parameter))

    def _to_momentum(self) -> None:
        """Turn the gradients of one replica into its part of the momentum, if its optimizer wants that to travel."""
        for stage, optimizer in zip(self.stages, self._optimizers, strict=True):
            if isinstance(optimizer, QuantizedAdam):
                optimizer.frozen = self._options.is_frozen(self.progress)
                with stage.meter.section("compute", work=Work("optimizer")):
                    optimizer.to_momentum()

    def _update(self, step: int, optimizers: Sequence[Optimizer]) -> float | None:
        # 1. Sum shared gradients before the norm, which counts the sum once.
        if self._shared is not None:
            self._shared.sum_gradients()
        # 2. Take the factor of the loss out before the norm. Clip before the step, by the norm over all stages.
        for stage in self.stages:
            self.scale.undo_gradients(stage.submod.parameters())
        most = self._options.max_grad_norm
        norm = self._norm() if self._takes_norm else None
        steps = not self.scale.active or self.scale.allows(norm or 0.0)
        if most is not None and norm is not None and steps:
            for stage in self.stages:
                clip(stage.submod.parameters(), norm, most)
        # 3. Step, then clear the gradients for the next batch.
        lr = self._options.lr * lr_factor(step, self._training.steps, self._options)
        for stage, optimizer in zip(self.stages, optimizers, strict=True):
            with stage.meter.section("compute", work=Work("optimizer")), stage.in_memory():
                for group in optimizer.param_groups:
                    group["lr"] = lr
                if steps:
                    optimizer.step()
                optimizer.zero_grad()
        return norm

    def _norm(self) -> float:
        """The norm of the gradients of all stages. Collective."""
        squares = {stage.stage_index: squared_norm(self._counted(stage)) for stage in self.stages}
        with self.stages[0].meter.section("neighbour", "waiting for the gradient norm of all stages", Work("norm")):
            self._squares.tell(squares)
            for stage in self.stages if self.done + 1 < self._training.steps else ():
                stage.post_ahead()
            return math.sqrt(sum(self._squares.hear()))

    def _counted(self, stage: CompressedStage) -> list[Parameter]:
        """A stage's parameters, without copies that an earlier stage counts."""
        shared, index = self._shared, stage.stage_index
        copies = shared.parameters.get(index, ()) if shared is not None and index != shared.holders[0] else ()
        left_out = {id(copy) for copy in copies}
        return [parameter for parameter in stage.submod.parameters() if id(parameter) not in left_out]
