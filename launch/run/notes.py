"""What a run says in sentences before it trains, and when auto has chosen codecs."""

from __future__ import annotations

from itertools import chain

from thinwire.compress import parse
from thinwire.compress.stores.space import by_medium
from thinwire.launch.run.assembly import Assembly
from thinwire.launch.run.auto import Choosing
from thinwire.launch.run.console import show_stores
from thinwire.launch.run.reporting import Reporting
from thinwire.launch.run.resume import Resumption
from thinwire.launch.run.room import Room
from thinwire.launch.run.summary import module_of
from thinwire.launch.shared.tables import say
from thinwire.models.batch_norm import batch_norm_warning, batch_norms
from thinwire.models.lora import note_on_lora
from thinwire.models.precision import arithmetic_note
from thinwire.pipeline.options.durations import in_steps
from thinwire.pipeline.processes import collectives


class Notes:
    """The notes of one process of a run. Every process has them, and all call the same methods.

    Args:
        assembly: the stages of this process.
        room: the stores of this process.
        resumption: where the run goes on.
        choosing: what auto chooses.
        reporting: prints.
    """

    def __init__(
        self, assembly: Assembly, room: Room, resumption: Resumption, choosing: Choosing, reporting: Reporting
    ) -> None:
        self._assembly, self._trainer, self._where = assembly, assembly.trainer, assembly.trainer.placement
        self._recipe, self._steps_per_epoch = assembly.prepared.recipe, assembly.prepared.steps_per_epoch
        self._room, self._resumption, self._choosing, self._reporting = room, resumption, choosing, reporting

    def show(self) -> None:
        """Print notes before training starts: where a run goes on, the data, auto, batch normalization, its stores."""
        gathered = collectives.gather(
            self._where, {stage.stage_index: batch_norms(module_of(stage).layers) for stage in self._trainer.stages}
        )
        if gathered is not None and self._trainer.reports:
            recipe, stage = self._recipe, self._trainer.stages[0]
            steps, per_epoch = recipe.training.steps, self._steps_per_epoch
            evaluated = in_steps(recipe.training.evaluate_every, per_epoch)
            say(
                *self._resumption.notes,
                self._reporting.note,
                *self._assembly.prepared.data.notes,
                *(prompts.notes if (prompts := self._assembly.prepared.prompts) else ()),
                note_on_lora(self._assembly.prepared.blueprint),
                *stage.wire.gpus.notes,
                recipe.compression.note_on_auto(steps, per_epoch) if self._choosing.measures else None,
                self._choosing.note,
                recipe.replicas.note_on_steps({"save_every": recipe.save_every, "training.evaluate_every": evaluated}),
                recipe.optimizer.note_on_freezing(steps, per_epoch),
                arithmetic_note(recipe.training.precision, recipe.model.dtype == "bf16", stage.device.type),
                batch_norm_warning([*chain(*gathered)], recipe.pipeline.microbatch_size),
            )
        self._show_stores()

    def choose(self, done: int) -> None:
        """Let auto choose if it has measured enough. Print what it chose, and check the room for its stores."""
        costly = None if self._assembly.prepared.data.held_out is None else self._reporting.costly
        if not self._choosing.choose(last=done == self._recipe.training.steps, costly=costly):
            return
        for choice in self._choosing.choices:
            self._reporting.say(str(choice))
        if any(parse(choice.codec).feedback is not None for choice in self._choosing.choices):
            self._room.check_stores()
            self._show_stores()

    def _show_stores(self) -> None:
        """Print the final size of the feedback stores before training fills them."""
        here = tuple(stage.stage_index for stage in self._trainer.stages)
        gathered = collectives.gather(self._where, dict.fromkeys(here, (here, by_medium(self._room.stores))))
        if gathered is not None and self._trainer.reports:
            show_stores({tuple(stages): taken for stages, taken in gathered})
