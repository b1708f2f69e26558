"""The checkpoints of a run: the state of its stages and of all its parts, written while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from thinwire.launch.folder.policy import checkpoint_folder
from thinwire.launch.folder.weights import discard_after
from thinwire.launch.run.assembly import Assembly
from thinwire.launch.run.parts.equality_check import compare_replicas
from thinwire.launch.run.parts.log import Log
from thinwire.launch.run.parts.part import RunPart
from thinwire.launch.run.parts.saving import require_finite
from thinwire.launch.run.resume import Resumption, header
from thinwire.launch.run.words import words_of_run
from thinwire.launch.shared.exit_codes import StoppedError
from thinwire.pipeline.options.durations import is_due
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.saving.checkpoint import Checkpoints, StageState
from thinwire.pipeline.training.trainer import StepRecord
from thinwire.pipeline.training.training_state import collect, resume, resume_model


class Checkpointing(RunPart):
    """Writes checkpoints after steps in which the recipe asks for them, at the end, and where a run is stopped.

    Attributes:
        saver: the checkpoints as this process writes them.
    """

    def __init__(self, assembly: Assembly, runs: Sequence[str], log: Log, states: Callable[[], dict[str, Any]]) -> None:
        """`runs` are the ids of the run's folders on all hosts; `states` gives the state of each part by its name."""
        super().__init__(assembly)
        self._log, self._states, where = log, states, self._where
        self.saver = Checkpoints(
            checkpoint_folder(self._recipe),
            stages=[where.part(stage.stage_index) for stage in self._trainer.stages],
            num_stages=where.num_parts,
            keep=self._recipe.checkpoint.keep,
            header=header(self._prepared, where),
            words=words_of_run(),
            runs=runs,
            timeout=self._recipe.replicas.longest_wait(self._recipe.wire.timeout),
        )
        self._last: int | None = None
        """The step of the last checkpoint."""

    def restore(self, resumption: Resumption) -> None:
        """Restore the trainer from the checkpoint that was found, and remove what lies after it.

        Raises:
            CheckpointError, StoreError: the checkpoint is damaged.
        """
        manifest = resumption.manifest
        if manifest is None:
            self.saver.discard_after(-1)
            return
        self._last = manifest.step
        if resumption.same_parts:
            resume(self._trainer, self.saver, manifest)
        else:
            resume_model(self._trainer, self.saver.folder, manifest)
            self.saver.go_on_from(manifest)
        if resumption.changes:
            discard_after(self._recipe.folder, manifest.step)

    def after_step(self, done: int, record: StepRecord | None) -> None:
        """Write a checkpoint while training goes on, if the recipe asks for it after so many steps and there is none.

        A run that was stopped in the evaluation after a step goes on there, and comes here again. Another save of the
        step would have only the rows that changed since, in the place of those of the first.

        Raises:
            CheckpointError: one could not be written, long before the next one is due.
            NonFiniteError: a parameter of this process is not finite.
        """
        self.saver.check()
        if self._last != done and is_due(self._recipe.checkpoint.every, done, self._prepared.sampler.steps_per_epoch):
            with self._log.times.spent_on("saving"):
                compare_replicas(self._trainer)
                self._write(done)

    def end(self, done: int) -> None:
        """Write the last checkpoint if the recipe asks for checkpoints, and wait until it is whole."""
        if self._recipe.checkpoint.wanted and self._last != done:
            self._write(done, trains=False)
        self.saver.wait()

    def stop(self, done: int) -> NoReturn:
        """Write a checkpoint in all processes, and raise StoppedError, which says how to go on; collective."""
        self.end(done)
        collectives.barrier(self._where, "waiting for the last checkpoint of all stages")
        raise StoppedError(
            f"after step {done}, and a checkpoint holds it; thinwire train --resume {self._recipe.folder} goes on"
        )

    def _write(self, done: int, *, trains: bool = True) -> None:
        """Write a checkpoint; whether it `trains` on meanwhile."""
        require_finite(self._trainer, done)
        self._last = done
        self._log.check_place()
        parts = self._states()

        def states() -> dict[int, StageState]:
            found = collect(self._trainer, self.saver)
            return {stage: replace(state, values={**state.values, "parts": parts}) for stage, state in found.items()}

        self.saver.save(done, states, self._log.sync, trains=trains)
