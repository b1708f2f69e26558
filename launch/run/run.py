"""One process of a run: it trains its stages, and calls what saves and reports after each step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import chain
from typing import Any

import torch.distributed as dist

from thinwire.launch.plan.prepared import Prepared
from thinwire.launch.run.assembly import Assembly, assemble
from thinwire.launch.run.folders import claim_folder
from thinwire.launch.run.heartbeat import Doing
from thinwire.launch.run.outputs import writing
from thinwire.launch.run.reporting import Reporting
from thinwire.launch.run.resume import Resumption
from thinwire.launch.run.room import Room
from thinwire.launch.run.saving import Saves
from thinwire.launch.run.summary import module_of
from thinwire.launch.shared.progress import counting
from thinwire.launch.shared.tables import say
from thinwire.models.batch_norm import batch_norm_warning, batch_norms
from thinwire.models.lora import note_on_lora
from thinwire.models.precision import arithmetic_note
from thinwire.pipeline.errors import EvaluationStoppedError
from thinwire.pipeline.options.durations import in_steps
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.training.trainer import StepRecord


class Run:
    """A run as one process sees it.

    Args:
        prepared: the recipe and its data.
        where: where the stages live.
        leaving: held by a thread that ends this process at once. The first step is not done then: a process that said
            it saves, and ended, had the others wait for its part of the checkpoint until `wire.timeout`.
    """

    def __init__(
        self,
        prepared: Prepared,
        where: Placement,
        leaving: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._leaving = leaving or nullcontext()
        self.recipe, self._asked = prepared.recipe, False
        self.assembly: Assembly = assemble(prepared, where, dist.get_rank())
        self.trainer = self.assembly.trainer
        with writing(self.recipe.folder):
            runs = claim_folder(self.recipe, where)
        self._room = Room(self.assembly)
        self._room.check()
        self._resumption = Resumption(self.assembly, runs)
        saved = self._resumption.saved
        self._resumption.restore()
        if saved:
            with self._resumption.reading():
                self.trainer.update.scale.load_state_dict(saved["loss_scale"])
        self.reporting = Reporting(self.assembly, self._resumption, self._is_asked)
        self._saves = Saves(self.assembly, self._resumption, self.reporting, self._is_asked)
        self._callbacks = (
            self.reporting.evaluate_if_due,
            self._saves.best_if_better,
            self._saves.compare_if_due,
            # last: they must hold the changes by this step's evaluation
            self._saves.weights_if_due,
            self._saves.checkpoint_if_due,
        )
        self.trainer.asked = self._is_asked if self.recipe.checkpoint.wanted else None
        self._done: int | None = None

    def go(self) -> None:
        """Train, evaluate with compression on and off, save, and report."""
        self.reporting.begin()
        self._say_notes()
        self.reporting.look_before_training()
        first = self._resumption.first
        with self.reporting.live():
            if self.reporting.unfinished:  # the run was stopped in the evaluation after this step
                self._finish_step(first)
            self.trainer.stopped = self.reporting.is_out_of_patience
            self.trainer.train(self._after_step, first)
        with counting(self.trainer.reports):
            self._end()

    def _say_notes(self) -> None:
        """Print notes before training starts: where the run goes on, the data, batch normalization, stores."""
        trainer, prepared, recipe = self.trainer, self.assembly.prepared, self.recipe
        norms = collectives.gather(
            trainer.placement, {stage.stage_index: batch_norms(module_of(stage).layers) for stage in trainer.stages}
        )
        if norms is not None and trainer.reports:
            steps, per_epoch = recipe.training.steps, prepared.steps_per_epoch
            evaluated = in_steps(recipe.training.evaluate_every, per_epoch)
            say(
                *self._resumption.notes,
                self.reporting.note,
                *prepared.data.notes,
                *(prepared.prompts.notes if prepared.prompts else ()),
                note_on_lora(prepared.blueprint),
                *trainer.stages[0].wire.gpus.notes,
                recipe.compression.note_on_warmup(steps, per_epoch),
                recipe.replicas.note_on_steps({"save_every": recipe.save_every, "training.evaluate_every": evaluated}),
                recipe.optimizer.note_on_warmup(steps),
                recipe.optimizer.note_on_freezing(steps, per_epoch),
                arithmetic_note(recipe.training.precision, recipe.model.dtype == "bf16", trainer.stages[0].device.type),
                batch_norm_warning([*chain(*norms)], recipe.pipeline.microbatch_size),
            )
        self._room.show_stores()

    def _after_step(self, record: StepRecord) -> None:
        done = self.trainer.done
        with self._leaving:
            self._done = done
        self.reporting.log_step(done, record)
        self._finish_step(done)

    def _finish_step(self, done: int) -> None:
        """What is due after a step: an evaluation, a save, a checkpoint, a stop."""
        with self._stopping(done):
            for callback in self._callbacks:
                callback(done)
        if self.reporting.is_out_of_patience and not self.trainer.stopped:
            self.trainer.stopped = True
            self.reporting.say_end(done)
        if self.doing_now is Doing.TRAINING and self.trainer.anyone_asked:
            self._saves.stop(done)

    @contextmanager
    def _stopping(self, done: int) -> Iterator[None]:
        """Where a process is asked to stop during an evaluation inside, all do, with a checkpoint."""
        try:
            yield
        except EvaluationStoppedError:
            self._saves.stop(done)

    def _end(self) -> None:
        """Evaluate, save and report after the last step."""
        steps = self.trainer.done if self.trainer.stopped else self.recipe.training.steps
        with self._stopping(steps):
            self.reporting.evaluate(steps)
            self._saves.best_if_better(steps)
        summary = self._saves.weights(steps)
        self._saves.finish(steps)
        for stage in self.trainer.stages:
            stage.close()
        self.discard_stores()
        self.reporting.finish(summary)

    @property
    def doing(self) -> str:
        """What this process does or waits for, in words."""
        words = [stage.meter.doing for stage in self.trainer.stages]
        return "; ".join(word for word in words if word) or "between two sections of its work"

    @property
    def doing_now(self) -> Doing:
        """What the heartbeat of this process reports."""
        if self._done is None:
            return Doing.BUILDING
        trains = self._done < self.recipe.training.steps and not self.trainer.stopped
        return Doing.TRAINING if trains else Doing.ENDING

    def ask_to_stop(self) -> bool:
        """Have all processes write a checkpoint and stop after the step under way; whether checkpoints are wanted."""
        self._asked = self.recipe.checkpoint.wanted
        return self._asked

    def _is_asked(self) -> bool:
        return self._asked

    def save_and_stop(self) -> bool:
        """Have all stages write a checkpoint and stop after the step under way, or after the last one end as planned.

        Waits for nothing. False before the first step is done and where no checkpoints are wanted: then it changes
        nothing.
        """
        return self._done is not None and self.ask_to_stop()

    def finish_writing(self, seconds: float) -> None:
        """Wait so long at most for a checkpoint that is being written: the run fails, and can go on from it."""
        self._resumption.checkpoints.finish_writing(seconds)

    def discard_stores(self) -> None:
        """Delete the files of this process's stores, if the disk allows it. Call it at the end, after errors too."""
        for wire, _ in self.trainer.stages[0].all_ends:
            with suppress(OSError):
                wire.discard_stores()
