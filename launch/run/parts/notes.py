"""What a run says before its first step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from thinwire.launch.run.assembly import Assembly
from thinwire.launch.run.parts.best import Best
from thinwire.launch.run.parts.part import RunPart
from thinwire.launch.shared.tables import say
from thinwire.models.batch_norm import batch_norm_warning, batch_norms
from thinwire.models.lora import note_on_lora
from thinwire.models.precision import arithmetic_note
from thinwire.pipeline.options.durations import in_steps
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.saving.state import module_of


class Notes(RunPart):
    """Notes on where the run goes on, the data and batch normalization."""

    def __init__(self, assembly: Assembly, found: Sequence[str], best: Best) -> None:
        """`found` are sentences on the checkpoint that the run goes on from."""
        super().__init__(assembly)
        self._found, self._best = found, best

    def begin(self) -> None:
        """Print the notes, in the process that reports."""
        trainer, prepared, recipe = self._trainer, self._prepared, self._recipe
        norms = collectives.gather(
            self._where, {stage.stage_index: batch_norms(module_of(stage)) for stage in trainer.stages}
        )
        if norms is not None and trainer.reports:
            steps, per_epoch = recipe.training.steps, prepared.sampler.steps_per_epoch
            evaluated = in_steps(recipe.training.evaluate_every, per_epoch)
            say(
                *self._found,
                self._best.note,
                *prepared.notes,
                note_on_lora(prepared.blueprint),
                *trainer.stages[0].wire.notes,
                recipe.compression.note_on_warmup(steps, per_epoch),
                recipe.replicas.note_on_steps({"save_every": recipe.save_every, "training.evaluate_every": evaluated}),
                recipe.optimizer.note_on_warmup(steps),
                recipe.optimizer.note_on_freezing(steps, per_epoch),
                arithmetic_note(recipe.training.precision, recipe.model.dtype == "bf16", trainer.stages[0].device.type),
                batch_norm_warning([*chain(*norms)], recipe.pipeline.microbatch_size),
            )
