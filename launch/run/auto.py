"""The codecs that auto chooses in a run: it measures in the first steps, and chooses once.

A run that goes on where it stopped keeps its measurements and its choice. With another cut, or other processes, it has
neither: boundaries lie elsewhere, and a process computes other stages. So it measures again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from thinwire.launch.run.recipe import Recipe
from thinwire.pipeline.auto import Automatic, Choice
from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.trainer import Trainer


class Choosing:
    """The automatic channels of a run, if it has any. Every process has one, and calls it at the same steps.

    Args:
        recipe: says which channels are automatic.
        trainer: the stages of this process, connected, not restored yet.
        where: the process of each stage.
        steps_per_epoch: those of the run.
        saved: the values of the run in the checkpoint that it goes on from; empty if there is none.
        same_parts: whether that checkpoint is of the same cut and number of processes.

    Attributes:
        choices: what was chosen.
    """

    def __init__(
        self,
        recipe: Recipe,
        trainer: Trainer,
        where: Placement,
        steps_per_epoch: int,
        saved: Mapping[str, Any],
        *,
        same_parts: bool,
    ) -> None:
        self._steps = recipe.compression.steps_measured(steps_per_epoch)
        self._processes = [where.place_of(stage) for stage in range(where.num_stages)]
        self.choices: list[Choice] = []
        self._automatic: Automatic | None = None
        if not recipe.compression.automatic:
            return
        passes = recipe.replicas.passes(recipe.pipeline.accumulation)
        here = sum(passes[replica] for replica in trainer.sync.replicas.here)
        self._automatic = Automatic(trainer.stages, where, recipe.compression, recipe.pipeline, here)
        self._anew = bool(saved) and not (same_parts and saved.get("processes") == self._processes)
        if not saved or self._anew:
            return
        if saved["choices"]:
            self.choices = [Choice(**choice) for choice in saved["choices"]]
            self._automatic.use(self.choices)
            self._automatic = None
        else:
            self._automatic.load_state_dict(saved["measured"])

    @property
    def note(self) -> str | None:
        """A sentence if a run that goes on measures again."""
        if self._automatic is None or not self._anew:
            return None
        return "auto measures and chooses again, because the cut or the processes have changed"

    @property
    def measures(self) -> bool:
        """Whether nothing is chosen yet."""
        return self._automatic is not None

    def begin(self) -> None:
        """Begin to count the compute of steps, once the trainer is restored."""
        if self._automatic is not None:
            self._automatic.begin_step()

    def end_step(self) -> None:
        """Count the compute of the step that ended."""
        if self._automatic is not None:
            self._automatic.end_step()

    def choose(self, *, last: bool, costly: Callable[[], bool] | None) -> bool:
        """After the last measured step, choose, unless it is the last of all; whether that was now. Collective then.

        `costly` is as for `Automatic.switch`.
        """
        if self._automatic is None:
            return False
        self._automatic.begin_step()
        if self._automatic.steps_measured < self._steps or last:
            return False
        self.choices = self._automatic.switch(costly)
        self._automatic = None
        return True

    def state_dict(self) -> dict[str, Any]:
        """The choices and the measurements so far, as JSON values."""
        return {
            "processes": self._processes,
            "choices": [asdict(choice) for choice in self.choices],
            "measured": [] if self._automatic is None else self._automatic.state_dict(),
        }
