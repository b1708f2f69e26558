"""The newest weights of a run, saved in weights/ after steps in which the recipe asks for it, and at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.compress.codec import is_finite
from thinwire.compress.stores.marks import run_of
from thinwire.launch.results.outputs import OutputError, save_summary, writing
from thinwire.launch.run.assembly import Assembly
from thinwire.launch.run.parts.log import Log
from thinwire.launch.run.parts.part import RunPart
from thinwire.pipeline.errors import NonFiniteError
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.saving.checkpoint import WeightsCheckpoint
from thinwire.pipeline.saving.checkpoint_folder import has_manifests
from thinwire.pipeline.saving.state import module_of
from thinwire.pipeline.training.trainer import StepRecord, Trainer

Summary = dict[str, Any]


class Saving(RunPart):
    """Saves of weights. A summary of the run so far goes with them, so that it can be reported if it stops early.

    Attributes:
        summary: the last one, in the process that reports; None in others.
    """

    def __init__(self, assembly: Assembly, log: Log, summarize: Callable[[int], Summary | None]) -> None:
        """`summarize` gives the summary after so many steps in the process that reports; collective."""
        super().__init__(assembly)
        self._log, self._summarize = log, summarize
        self.summary: Summary | None = None
        self._newest: int | None = None
        """The step of the weights in weights/, if this process has saved any."""

    def after_step(self, done: int, record: StepRecord | None) -> None:
        """Save the weights, if the recipe asks for it after so many steps."""
        if self._recipe.save_every and done % self._recipe.save_every == 0:
            self.save(done)

    def end(self, done: int) -> None:
        """Save the last weights."""
        self.save(done)

    def save(self, done: int, place: Path | None = None) -> None:
        """Save the weights of all stages. Collective.

        `place` is another folder than that of the newest weights. Those that are there stay as they are, so a process
        that is killed meanwhile leaves them whole.

        Raises:
            OutputError: in all processes, the disk of one of them is full.
            NonFiniteError: a parameter of this process is not finite.
        """
        with self._log.times.spent_on("saving"):
            require_finite(self._trainer, done)
            self._log.check_place()
            folder = self._recipe.folder
            saving = None
            if self._where.replica == 0 and (place is not None or done != self._newest):  # others hold the same
                saving = WeightsCheckpoint(place or folder / "weights", done, run_of(folder) or "")
            self.summary = self._summarize(done)
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
                if self.summary is not None:
                    save_summary(folder, self.summary)
            if place is None:
                self._newest = done

    def _write(self, saving: WeightsCheckpoint | None) -> tuple[dict[str, dict[str, str]], str | None]:
        """Write the metrics, and the weights of this process's stages.

        Returns the digests of the files of each stage, and the reason if it fails.
        """
        folder, files = self._recipe.folder, dict[str, dict[str, str]]()
        try:
            self._log.sync()
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


def require_finite(trainer: Trainer, done: int) -> None:
    """Raise NonFiniteError if a step with finite numbers has spoiled a parameter: what was saved before stays.

    Not where a run sends what is not finite.
    """
    for stage in () if trainer.stages[0].wire.options.nonfinite == "send" else trainer.stages:
        for name, parameter in module_of(stage).full_parameters().items():
            if parameter.requires_grad and not is_finite(parameter.detach()):
                raise NonFiniteError(
                    f"step {done} left NaN or infinity in {name} of stage {stage.stage_index}, and is not saved; "
                    f"lower the learning rate, or go on with wire.nonfinite send"
                )
