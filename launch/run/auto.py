"""The codecs that auto chooses in a run: it measures in the first steps, and chooses once.

A run that goes on where it stopped keeps its measurements and its choice. With another cut, or other processes, it has
neither: boundaries lie elsewhere, and a process computes other stages. So it measures again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from thinwire.launch.run.assembly import Assembly
from thinwire.launch.run.resume import Resumption
from thinwire.pipeline.auto import Automatic, Choice


class Choosing:
    """The automatic channels of a run, if it has any. Every process has one, and calls it at the same steps.

    It is made before anything is restored; `choices` are what was chosen.
    """

    def __init__(self, assembly: Assembly, resumption: Resumption) -> None:
        recipe, trainer, where = assembly.prepared.recipe, assembly.trainer, assembly.trainer.placement
        saved = resumption.saved
        self._steps = recipe.compression.steps_measured(assembly.prepared.steps_per_epoch)
        self._processes = [where.place_of(stage) for stage in range(where.num_stages)]
        self.choices: list[Choice] = []
        self._automatic: Automatic | None = None
        if not recipe.compression.automatic:
            return
        passes = recipe.replicas.passes(recipe.pipeline.accumulation)
        here = sum(passes[replica] for replica in trainer.sync.replicas.here)
        self._automatic = Automatic(trainer.stages, where, recipe.compression, recipe.pipeline, here)
        self._anew = bool(saved) and not (resumption.same_parts and saved["processes"] == self._processes)
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
