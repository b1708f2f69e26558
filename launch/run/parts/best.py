"""The best held-out score of a run: its weights stay, and training ends where none is better for long."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from thinwire.launch.run.assembly import Assembly
from thinwire.launch.run.parts.evaluation import Evaluation
from thinwire.launch.run.parts.log import Log
from thinwire.launch.run.parts.part import RunPart
from thinwire.launch.run.parts.saving import Saving
from thinwire.pipeline.evaluation import Score
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.saving.checkpoint_folder import manifests
from thinwire.pipeline.training.trainer import StepRecord


class Best(RunPart):
    """The best score so far, in all processes, and its weights in best/.

    A run that goes on with another score has none yet, nor has one that has saved others since: it trains those steps
    again, maybe in another way.

    Attributes:
        note: a sentence if the weights of the best score are not there; else None.
    """

    name = "best"

    def __init__(self, assembly: Assembly, log: Log, evaluation: Evaluation, weights: Saving) -> None:
        super().__init__(assembly)
        self._log, self._evaluation, self._weights = log, evaluation, weights
        self._best: dict[str, Any] | None = None
        """What the score is of, its step, the score, and how many evaluations since then were not better."""
        self.note: str | None = None

    def begin(self) -> None:
        """Train no step where a run that goes on had ended."""
        self._trainer.stopped = self._is_out_of_patience

    def after_step(self, done: int, record: StepRecord | None) -> None:
        """Save the weights if the last evaluation was the best so far. End training after too many that were not."""
        self._judge(done)
        if self._is_out_of_patience and not self._trainer.stopped:
            assert self._best is not None, "it counts the evaluations since"
            self._trainer.stopped = True
            self._log.say(
                f"training ends after step {done}: {self._recipe.training.best} was {self._best['score']:.4f} after "
                f"step {self._best['step']}, and {self._best['since']} evaluations since then were not better"
            )

    def end(self, done: int) -> None:
        """Save the weights if the last evaluation was the best."""
        self._judge(done)

    def _judge(self, done: int) -> None:
        """Compare the last score of its name with the best so far, and save the weights if it is better; collective."""
        wanted = self._recipe.training.best
        if wanted is None or not self._evaluation.fresh:
            return
        way, name = wanted.split()
        told = collectives.everyone(self._where, self._score(name))
        found = next((each for each in told if each is not None), None)
        sign = 1 if way == "min" else -1
        if found is not None and (self._best is None or sign * found < sign * self._best["score"]):
            self._best = {"of": wanted, "step": done, "score": found, "since": 0}
            self._weights.save(done, self._recipe.folder / "best")
        elif self._best is not None:
            self._best["since"] += 1

    def _score(self, name: str) -> float | None:
        """The score of this name without compression, in the process that has it; None elsewhere, and for NaN."""
        if self._evaluation.scores is None:
            return None
        score: Score = self._evaluation.scores["off"]
        found = {"loss": score.loss, **score.metrics}[name]
        return None if math.isnan(found) else found

    @property
    def _is_out_of_patience(self) -> bool:
        """Whether training is to end, because too many evaluations in a row were not better."""
        patience = self._recipe.training.patience
        return patience is not None and self._best is not None and self._best["since"] >= patience

    def state_dict(self) -> dict[str, Any]:
        """The best score."""
        return {"best": self._best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the best score, if its weights are in best/, wherever they were saved; collective."""
        best, folder = state["best"], self._recipe.folder / "best"
        if best is None or best["of"] != self._recipe.training.best:
            return
        lost = int(best["step"])
        here = [manifest.step for manifest in manifests(folder)][-1:] == [lost]
        if all(collectives.everyone(self._where, self._where.replica != 0 or here)):
            self._best = best
        else:
            self.note = (
                f"{folder} has no weights of step {lost}, the best so far, so {self._recipe.training.best} begins anew"
            )

    def told(self) -> dict[str, Any]:
        """The best score."""
        return {"best": self._best}
