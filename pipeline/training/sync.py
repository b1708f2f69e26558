"""What pipelines exchange around the optimizer's step, in two forms, chosen at the start of a run.

Sync         before the step, the gradients of all replicas, or of the only one, are added up: all take the same step
StepAlone    each replica takes steps of its own; after every so many, all exchange what their weights moved
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from thinwire.compress import PassKind, Progress
from thinwire.pipeline.errors import CheckpointError
from thinwire.pipeline.options import OptimizerOptions, PipelineOptions
from thinwire.pipeline.processes.collectives import AsyncNotes, NoteKind
from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.replicas.exchange import Replicas
from thinwire.pipeline.replicas.local_steps import HELD, StageCopies
from thinwire.pipeline.replicas.shared import SharedWeights
from thinwire.pipeline.saving.checkpoint_folder import SavedStage
from thinwire.pipeline.saving.state import module_of
from thinwire.pipeline.stages.compressed_stage import CompressedStage
from thinwire.pipeline.training.optimization import ends_of, make_optimizer


@dataclass(frozen=True)
class PipelineBatch:
    """The samples that one pipeline has in a step."""

    pipeline: int
    """Which of several pipelines it is."""
    ids: Tensor
    """Its samples, int64 [samples], in the order of the passes."""
    targets: Tensor | None
    """Those of its samples; None except in the process of the last stage."""
    counted: Tensor | None
    """The targets over which its loss is a mean; None except in the process of the last stage."""
    first: int
    """The place of its first pass among those of the step in this process."""


@dataclass(eq=False)
class Sync:
    """The gradients of all replicas are added up, and all take the same step."""

    stages: Sequence[CompressedStage]
    """Those of this process."""
    where: Placement
    replicas: Replicas
    """Those of these stages."""
    passes: int
    """Passes of each replica in a step, of equally many samples."""
    optimizers: Sequence[Optimizer]
    """Those whose state belongs to the weights that a checkpoint holds, one for each stage."""
    losses_of_others: AsyncNotes | None
    """Carries the losses of other replicas while gradients travel, between last stages. None if no other process has
    replicas, or each replica steps alone."""

    def __post_init__(self) -> None:
        self._progress = Progress(0, 1)
        self._losses: list[Tensor] = []

    def counterparts(self, *, begins: bool) -> list[tuple[int, int]]:
        """The pairs of processes of different replicas that wait for each other before the clocks are read again."""
        return self.where.counterparts

    def begin(self, progress: Progress) -> None:
        """Make room for what other processes send in the step that begins."""
        self._progress, self._losses = progress, []
        if self.losses_of_others is not None:
            self.losses_of_others.expect()

    def batches(self, kind: PassKind, ids: Tensor, targets: Tensor | None) -> Iterator[PipelineBatch]:
        """The samples of each replica here, in turn; after each one comes `after_backward`.

        `ids` and `targets` are of all samples of the batch; targets are None except in the process of the last stage.
        """
        here, count = self.replicas.here, self.replicas.count
        # passes have their numbers in the whole batch, because dropout and codecs draw by them
        self.skip(kind, self.passes * here.start)
        for replica in here:
            self._enter(replica)
            own = None if targets is None else targets.chunk(count)[replica]
            yield PipelineBatch(
                pipeline=replica,
                ids=ids.chunk(count)[replica],
                targets=own,
                counted=self._counted(targets, own),
                first=self.first_pass(replica),
            )
        self.skip(kind, self.passes * (count - here.stop))

    def after_backward(self, own: PipelineBatch, losses: Sequence[Tensor]) -> None:
        """Take the losses of a pipeline, and send its gradients, which the parameters hold."""
        self._losses += losses
        self.replicas.statistics.use(None)
        self.replicas.submit(own.pipeline, self._progress)

    def stepping(self, pipeline: int | None) -> Sequence[Optimizer]:
        """The optimizers that step after the backward of one pipeline, or with None after that of all; maybe none."""
        return self.optimizers if pipeline is None else []

    def before_step(self) -> None:
        """Give the parameters the sum of the gradients of all replicas; collective."""
        if self.losses_of_others is not None:
            self.losses_of_others.send([float(loss) for loss in self._losses])
        self.replicas.add_up(self._progress)

    def after_step(self) -> None:
        """Exchange what the step has moved, if that is due; collective."""

    def losses(self) -> list[float]:
        """Those to report of the step that is done: of all replicas, in the process that reports; collective."""
        others = [] if self.losses_of_others is None else self.losses_of_others.receive()
        return [*(float(loss) for loss in self._losses), *chain(*others)]

    def end(self, progress: Progress) -> None:
        """Exchange what is left after the last step: nothing, unless replicas step alone; collective."""

    def skip(self, kind: PassKind, count: int) -> None:
        """Count passes that other pipelines run: dropout and codecs draw by the place of a pass among all of them."""
        for stage in self.stages:
            stage.skip(kind, count)

    def first_pass(self, replica: int) -> int:
        """The place of a replica's first pass among those of a step in this process. Slots by position depend on it."""
        return self.passes * (replica - self.replicas.here.start)

    def scorer(self, batch: int) -> int | None:
        """The replica here that scores a batch of an evaluation, by the number of the batch; None if none here does.

        Replicas take batches in turn.
        """
        replica = batch % self.replicas.count
        return replica if replica in self.replicas.here else None

    def state_dict(self, stage: int) -> dict[str, Tensor]:
        """Copies of what is remembered for a stage, besides its optimizer."""
        return self.replicas.state_dict(stage)

    def load_state_dict(self, stage: int, saved: SavedStage) -> None:
        """Take what `state_dict` returned. CheckpointError if something is missing."""
        self.replicas.load_state_dict(stage, saved.tensors("replicas/"))

    def load_recut(self, stage: int, parts: Sequence[SavedStage]) -> None:
        """Take the weights and optimizers of the replicas here from all parts of a checkpoint of another cut.

        CheckpointError if something is missing.
        """

    def _enter(self, replica: int) -> None:
        """What comes before the passes of a replica."""
        self.replicas.statistics.enter(replica)

    def _counted(self, targets: Tensor | None, own: Tensor | None) -> Tensor | None:
        """The targets that the loss is a mean over: of the whole batch, and those of one replica."""
        return targets


@dataclass(eq=False)
class StepAlone(Sync):
    """Each replica takes steps of its own, and no one waits for another before the exchange."""

    copies: Mapping[int, StageCopies]
    """The weights and optimizers of each replica here, by stage."""
    shared: SharedWeights
    steps: int
    """Those of the whole training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._held = 0  # steps after which the common weights here were exchanged

    def counterparts(self, *, begins: bool) -> list[tuple[int, int]]:
        """As those of Sync, before the first step: later, no replica waits for another to read a clock."""
        return super().counterparts(begins=begins) if begins else []

    def _enter(self, replica: int | None) -> None:
        """Give the modules the weights and statistics of a replica, or with None the common ones."""
        for copies in self.copies.values():
            copies.use(replica)
        self.replicas.statistics.use(replica)

    def _counted(self, targets: Tensor | None, own: Tensor | None) -> Tensor | None:
        return own

    def after_backward(self, own: PipelineBatch, losses: Sequence[Tensor]) -> None:
        """Take the losses of the first pipeline, which are reported."""
        self._losses = self._losses or [*losses]

    def stepping(self, pipeline: int | None) -> Sequence[Optimizer]:
        """The optimizers of each pipeline, after its own backward."""
        return [] if pipeline is None else [copies.optimizers[pipeline] for copies in self.copies.values()]

    def before_step(self) -> None:
        """Nothing: each replica has taken its step."""

    def after_step(self) -> None:
        """Exchange what the weights moved, if that is due."""
        self._enter(None)
        done = self._progress.step + 1
        if done % self.replicas.options.sync.every == 0 or done == self.steps:
            self._exchange(self._progress)

    def end(self, progress: Progress) -> None:
        """Exchange if replicas have moved since the last exchange, as after a resume that has no step left."""
        if self._held != progress.step + 1:
            self.begin(progress)
            self._exchange(progress)

    def _exchange(self, progress: Progress) -> None:
        """Move the common weights by the average of what all replicas moved, and give them to all; collective."""
        # 1. Send what the replicas here moved their weights by, and their statistics.
        for replica in self.replicas.here:
            for copies in self.copies.values():
                copies.put_moves(replica)
            self.replicas.submit(replica, progress)
        with torch.no_grad():
            self.replicas.add_up(progress)
            for copies in self.copies.values():
                copies.average(self.replicas.count)
            # 2. Copies of shared weights went through codecs apart, and must stay equal.
            self.shared.average_gradients(progress, len(self.replicas.here))
            for copies in self.copies.values():
                copies.step()
        self._held = progress.step + 1

    def state_dict(self, stage: int) -> dict[str, Tensor]:
        """As that of Sync, with the weights, optimizers and statistics of the replicas here."""
        own = self.copies[stage].state_dict() | self.replicas.statistics.state_dict(stage)
        return super().state_dict(stage) | own | {HELD: torch.tensor(self._held)}

    def load_state_dict(self, stage: int, saved: SavedStage) -> None:
        """Take what `state_dict` returned. CheckpointError if something is missing."""
        self.load_recut(stage, [saved])
        super().load_state_dict(stage, saved)

    def load_recut(self, stage: int, parts: Sequence[SavedStage]) -> None:
        """Take the weights and optimizers of the replicas here from all parts of a checkpoint of another cut."""
        self.copies[stage].load_state_dict(parts)
        self.replicas.statistics.load_state_dict(stage, parts)
        found = [each for part in parts for each in part.tensors("replicas/", {HELD}).values()]
        if not found:
            raise CheckpointError("the checkpoint does not say which exchange its common weights are from")
        self._held = int(found[0])


def sync_of(
    stages: Sequence[CompressedStage],
    where: Placement,
    replicas: Replicas,
    pipeline: PipelineOptions,
    optimizer: OptimizerOptions,
    shared: SharedWeights,
    steps: int,
) -> Sync:
    """What pipelines exchange in a training of so many steps, with the optimizers of the stages."""
    ends = {parameter for stage in stages for parameter in ends_of(stage)}
    passes = pipeline.accumulation
    if replicas.options.step_alone:
        make = partial(make_optimizer, options=optimizer, ends=ends)
        copies = {
            stage.stage_index: StageCopies(
                {name: each for name, each in module_of(stage).full_parameters().items() if each.requires_grad},
                replicas.here,
                make,
                replicas.options.sync,
            )
            for stage in stages
        }
        outer = [each.outer for each in copies.values()]
        return StepAlone(stages, where, replicas, passes, outer, None, copies, shared, steps)

    def summands(parameter: Parameter) -> int:
        """How many tensors a gradient is the sum of: one of each replica, and of each stage with the parameter."""
        return replicas.count * shared.copies_of(parameter)

    optimizers = [make_optimizer(stage.submod.parameters(), optimizer, summands, ends) for stage in stages]

    def losses(process: int) -> str:
        """What goes from a process to the one that reports, in words."""
        if process == dist.get_rank():
            return f"replica {where.replica} was sending replica 0 its losses"
        return f"replica {where.replica} was waiting for the losses of replica {where.replica_of(process)}"

    notes = None
    if where.num_replicas > 1:  # and no simulation of all
        notes = AsyncNotes(where.across, NoteKind.LOSSES, losses, stages[0].wire.timeout, where.reporter)
    return Sync(stages, where, replicas, passes, optimizers, notes)
