"""Comparisons of what must be equal: buffers at both ends of a channel, and the weights of replicas."""

from __future__ import annotations

from thinwire.launch.run.parts.part import RunPart
from thinwire.models.digest import tensor_lines, weights_digest
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.saving.state import module_of
from thinwire.pipeline.training.trainer import StepRecord, Trainer


class EqualityCheck(RunPart):
    """After each epoch and at the end, compares the buffers of all ends, and the replicas, where the recipe asks."""

    def after_step(self, done: int, record: StepRecord | None) -> None:
        """Raise MismatchError, in every process, if what must be equal is not."""
        ends = done % self._prepared.sampler.steps_per_epoch == 0 or done == self._recipe.training.steps
        if self._recipe.debug.check_buffers and ends:
            digests = {stage.stage_index: stage.digests() for stage in self._trainer.stages}
            collectives.compare(self._trainer.placement, digests)
            compare_replicas(self._trainer)


def compare_replicas(trainer: Trainer) -> None:
    """Raise MismatchError if the replicas of a stage hold other weights. Collective."""
    where = trainer.placement
    if where.num_replicas > 1:
        lines = {stage.stage_index: tensor_lines(module_of(stage).saved_state()) for stage in trainer.stages}
        collectives.compare_replicas(where, {stage: weights_digest(found) for stage, found in lines.items()})
