"""What a run saves while it trains: checkpoints that it can go on from, and one of weights only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from thinwire.compress.codec import is_finite
from thinwire.compress.stores.marks import run_of
from thinwire.launch.run.assembly import Assembly
from thinwire.launch.run.outputs import OutputError, save_summary, writing
from thinwire.launch.run.reporting import Reporting
from thinwire.launch.run.resume import Resumption
from thinwire.launch.run.summary import module_of
from thinwire.launch.shared.exit_codes import StoppedError
from thinwire.models.digest import tensor_lines, weights_digest
from thinwire.pipeline.errors import NonFiniteError
from thinwire.pipeline.options.durations import is_due
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.saving.checkpoint import StageState, WeightsCheckpoint
from thinwire.pipeline.saving.checkpoint_folder import has_manifests
from thinwire.pipeline.training.training_state import collect


class Saves:
    """The saves of one process of a run. Every process has them, and all call the same methods."""

    def __init__(
        self,
        assembly: Assembly,
        resumption: Resumption,
        reporting: Reporting,
        asked: Callable[[], bool],
    ) -> None:
        self._trainer, self._where = assembly.trainer, assembly.trainer.placement
        self._recipe, self._steps_per_epoch = assembly.prepared.recipe, assembly.prepared.steps_per_epoch
        self._reporting, self._asked = reporting, asked
        self._checkpoints = resumption.checkpoints
        self._last = resumption.first if resumption.saved else None
        """The step of the last checkpoint."""
        self._newest: int | None = None
        """The step of the weights in weights/, if this process has saved any."""

    def compare_if_due(self, done: int) -> None:
        """After each epoch, compare the buffers of all ends, and the replicas, if the recipe asks for it."""
        ends = done % self._steps_per_epoch == 0 or done == self._recipe.training.steps
        if self._recipe.debug.check_buffers and ends:
            collectives.compare(self._where, {stage.stage_index: stage.digests() for stage in self._trainer.stages})
            self._compare_replicas()

    def weights_if_due(self, done: int) -> None:
        """Save the weights, if the recipe asks for it after so many steps."""
        if self._recipe.save_every and done % self._recipe.save_every == 0:
            self.weights(done)

    def best_if_better(self, done: int) -> None:
        """Save the weights in best/ if the last evaluation was the best so far."""
        if self._reporting.is_better:
            self._reporting.is_better = False
            self.weights(done, self._recipe.folder / "best")

    def weights(self, done: int, place: Path | None = None) -> dict[str, Any] | None:
        """Save the weights of all stages. Collective.

        A summary of the run so far goes with them, so that it can be reported if it stops early. The process that
        reports returns this summary, the others None. `place` is another folder than that of the newest weights.
        Those that are there stay as they are, so a process that is killed meanwhile leaves them whole.

        Raises:
            OutputError: in all processes, the disk of one of them is full.
            NonFiniteError: a parameter of this process is not finite.
        """
        with self._reporting.times.spent_on("saving"):
            self._require_finite(done)
            self._reporting.check_place()
            folder = self._recipe.folder
            saving = None
            if self._where.replica == 0 and (place is not None or done != self._newest):  # others hold the same
                saving = WeightsCheckpoint(place or folder / "weights", done, run_of(folder) or "")
            summary = self._reporting.summarize(done)
            told = collectives.everyone(self._where, self._write(saving))
            if trouble := [sentence for _, sentence in told if sentence]:
                if saving is not None:
                    saving.discard()
                raise OutputError(trouble)
            with writing(folder):
                if saving is not None:
                    saving.complete({stage: digests for files, _ in told for stage, digests in files.items()})
                if self._where.num_replicas > 1:  # those that save nothing must not be faster than the first
                    collectives.barrier(self._where, "waiting for the weights of all stages")
                if summary is not None:
                    save_summary(folder, summary)
            if place is None:
                self._newest = done
            return summary

    def checkpoint_if_due(self, done: int) -> None:
        """Write a checkpoint while training goes on, if the recipe asks for it after so many steps and there is none.

        A run that was stopped in the evaluation after a step goes on there, and comes here again. Another save of the
        step would have only the rows that changed since, in the place of those of the first.

        Raises:
            CheckpointError: one could not be written, long before the next one is due.
            NonFiniteError: a parameter of this process is not finite.
        """
        self._checkpoints.check()
        if self._last != done and is_due(self._recipe.checkpoint.every, done, self._steps_per_epoch):
            with self._reporting.times.spent_on("saving"):
                self._compare_replicas()
                self._checkpoint(done)

    def stop_if_asked(self, done: int) -> None:
        """Where any process was asked to stop, write a checkpoint in all of them and raise StoppedError; collective."""
        if self._recipe.checkpoint.wanted and collectives.anyone(self._where, self._asked()):
            self.stop(done)

    def stop(self, done: int) -> NoReturn:
        """Write a checkpoint in all processes, and raise StoppedError, which says how to go on; collective."""
        self.finish(done)
        collectives.barrier(self._where, "waiting for the last checkpoint of all stages")
        raise StoppedError(
            f"after step {done}, and a checkpoint holds it; thinwire train --resume {self._recipe.folder} goes on"
        )

    def finish(self, done: int) -> None:
        """Write the last checkpoint if the recipe asks for checkpoints, and wait until it is whole."""
        if self._recipe.checkpoint.wanted and self._last != done:
            self._checkpoint(done, trains=False)
        self._checkpoints.wait()

    def _checkpoint(self, done: int, *, trains: bool = True) -> None:
        """Write a checkpoint; whether it `trains` on meanwhile."""
        self._require_finite(done)
        self._last = done
        self._reporting.check_place()
        logged = self._reporting.written()
        values = {
            "seconds": self._reporting.times.state_dict(),
            "evaluated": self._reporting.evaluated,
            "unfinished": self._reporting.unfinished,
            "metered_from": self._reporting.metered_from,
            "look": self._reporting.look,
            "began": self._reporting.began,
            "best": self._reporting.best,
            "loss_scale": self._trainer.update.scale.state_dict(),
        }

        def states() -> dict[int, StageState]:
            found = collect(self._trainer, self._checkpoints)
            return {stage: replace(state, values={**state.values, "run": values}) for stage, state in found.items()}

        self._checkpoints.save(done, states, logged, trains=trains)

    def _require_finite(self, done: int) -> None:
        """Raise NonFiniteError if a step with finite numbers has spoiled a parameter: what was saved before stays."""
        if self._recipe.wire.nonfinite == "send":
            return
        for stage in self._trainer.stages:
            for name, parameter in module_of(stage).full_parameters().items():
                if parameter.requires_grad and not is_finite(parameter.detach()):
                    raise NonFiniteError(
                        f"step {done} left NaN or infinity in {name} of stage {stage.stage_index}, and is not saved; "
                        f"lower the learning rate, or go on with wire.nonfinite send"
                    )

    def _compare_replicas(self) -> None:
        """Raise MismatchError if the replicas of a stage hold other weights. Collective."""
        if self._where.num_replicas > 1:
            lines = {stage.stage_index: tensor_lines(module_of(stage).saved_state()) for stage in self._trainer.stages}
            collectives.compare_replicas(self._where, {stage: weights_digest(found) for stage, found in lines.items()})

    def _write(self, saving: WeightsCheckpoint | None) -> tuple[dict[str, dict[str, str]], str | None]:
        """Write the metrics, and the weights of this process's stages.

        Returns the digests of the files of each stage, and the reason if it fails.
        """
        folder, files = self._recipe.folder, dict[str, dict[str, str]]()
        try:
            self._reporting.written()()
        except OSError as error:
            return files, f"the metrics cannot be saved in {folder}: {error.strerror or error}; free some space"
        if saving is None:
            return files, None
        for stage in self._trainer.stages:
            index, module = stage.stage_index, module_of(stage)
            try:
                files[str(index)] = saving.write(index, module.saved_state(), {"base": list(module.base.values())})
            except OSError as error:
                kept = "; the weights before these are still there, for all stages" * has_manifests(saving.folder)
                return files, (
                    f"the weights of stage {index} cannot be saved in {folder}: {error.strerror or error}; free some "
                    f"space{kept}"
                )
        return files, None
