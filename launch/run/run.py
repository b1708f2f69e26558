"""One process of a run: it trains its stages, and calls the parts of the run after each step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist

from thinwire.launch.folder.policy import claim_folder
from thinwire.launch.plan.prepared import Prepared
from thinwire.launch.results.outputs import writing
from thinwire.launch.run.assembly import assemble
from thinwire.launch.run.parts.best import Best
from thinwire.launch.run.parts.checkpoints import Checkpointing
from thinwire.launch.run.parts.equality_check import EqualityCheck
from thinwire.launch.run.parts.evaluation import Evaluation
from thinwire.launch.run.parts.log import Log
from thinwire.launch.run.parts.notes import Notes
from thinwire.launch.run.parts.part import RunPart
from thinwire.launch.run.parts.results import Results, summarize
from thinwire.launch.run.parts.room import Room
from thinwire.launch.run.parts.saving import Saving
from thinwire.launch.run.resume import resumption_of
from thinwire.launch.shared.doing import Doing
from thinwire.launch.shared.progress import counting
from thinwire.pipeline.errors import EvaluationStoppedError
from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.training.trainer import StepRecord


class Run:
    """A run as one process sees it: a trainer, and a list of parts that keep their own state.

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
        self._done: int | None = None
        self.assembly = assemble(prepared, where, dist.get_rank())
        self.trainer = self.assembly.trainer
        with writing(self.recipe.folder):
            runs = claim_folder(self.recipe, where)
        room = Room(self.assembly)
        room.check()
        self.resumption = found = resumption_of(self.assembly)
        self.log = Log(self.assembly, runs, found)
        self.evaluation = Evaluation(self.assembly, self.log, self._is_asked)
        self.weights = Saving(self.assembly, self.log, self._summarize)
        best = Best(self.assembly, self.log, self.evaluation, self.weights)
        self.checkpoints = Checkpointing(self.assembly, runs, self.log, self._states)
        self.parts: tuple[RunPart, ...] = (
            self.log,
            Notes(self.assembly, found.notes, best),
            room,
            self.evaluation,
            best,
            EqualityCheck(self.assembly),
            # last: they must hold the changes by this step's evaluation
            self.weights,
            self.checkpoints,
            Results(self.assembly, self.log, self.weights),
        )
        self.checkpoints.restore(found)
        found.load(self.parts)
        self.trainer.asked = self._is_asked if self.recipe.checkpoint.wanted else None

    def go(self) -> None:
        """Train, evaluate with compression on and off, save, and report.

        Where a process is asked to stop during an evaluation, all do, with a checkpoint.
        """
        for part in self.parts:
            part.begin()
        try:
            with self.log.live():
                if self.evaluation.unfinished:  # the run was stopped in the evaluation after this step
                    self._finish_step(None)
                self.trainer.train(self._after_step, self.resumption.first)
            with counting(self.trainer.reports):
                for part in self.parts:
                    part.end(self.trainer.done)
        except EvaluationStoppedError:
            self.checkpoints.stop(self.trainer.done)

    def _after_step(self, record: StepRecord) -> None:
        with self._leaving:
            self._done = self.trainer.done
        self._finish_step(record)

    def _finish_step(self, record: StepRecord | None) -> None:
        """What is due after a step: an evaluation, a save, a checkpoint, a stop."""
        for part in self.parts:
            part.after_step(self.trainer.done, record)
        if self.doing_now is Doing.TRAINING and self.trainer.anyone_asked:
            self.checkpoints.stop(self.trainer.done)

    def _states(self) -> dict[str, Any]:
        """The state of each part, by its name."""
        return {part.name: part.state_dict() for part in self.parts if part.name}

    def _summarize(self, done: int) -> dict[str, Any] | None:
        """The summary so far, in the process that reports; collective."""
        told = {name: value for part in self.parts for name, value in part.told().items()}
        return summarize(self.assembly, done, told)

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

    def _is_asked(self) -> bool:
        return self._asked

    def save_and_stop(self) -> bool:
        """Have all stages write a checkpoint and stop after the step under way, or after the last one end as planned.

        Waits for nothing. False before the first step is done and where no checkpoints are wanted: then it changes
        nothing.
        """
        self._asked = self._done is not None and self.recipe.checkpoint.wanted
        return self._asked
