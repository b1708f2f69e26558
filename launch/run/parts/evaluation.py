"""The evaluations of a run: held-out scores with compression on and off, and answers to prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from thinwire.launch.results.console import scores_in_words
from thinwire.launch.run.assembly import Assembly
from thinwire.launch.run.parts.log import Log
from thinwire.launch.run.parts.part import RunPart
from thinwire.launch.shared.tables import say
from thinwire.models.data.sampler import Batch, evaluation_batches
from thinwire.models.options import FRESH
from thinwire.pipeline.evaluation import Compression, Score, answers, evaluate, look, undone_if_stopped
from thinwire.pipeline.options.durations import is_due
from thinwire.pipeline.training.trainer import StepRecord


class Evaluation(RunPart):
    """Scores and answers after steps in which the recipe asks for them, and at the end.

    Attributes:
        unfinished: whether an evaluation is due, and what follows it, after a step that is done.
        fresh: whether the last evaluation came after the step that is done.
        scores: those of the last evaluation in this process, which one stage alone computes; None before.
    """

    name = "evaluation"

    def __init__(self, assembly: Assembly, log: Log, asked: Callable[[], bool]) -> None:
        """`asked` says whether this process was asked to stop."""
        super().__init__(assembly)
        self._log = log
        self.unfinished, self.fresh = False, False
        self.scores: dict[Compression, Score] | None = None
        self._look: dict[str, Any] | None = None
        # codecs that keep buffers for samples have changed those of a half evaluation: it runs to its end
        stoppable = self._recipe.checkpoint.wanted and not self._recipe.compression.by_sample
        self._asked = asked if stoppable else None

    def begin(self) -> None:
        """Score a pretrained model on one held-out batch, and say what its codecs cost; collective."""
        codecs = self._trainer.stages[0].wire.compression.methods(self._recipe.num_boundaries, "activations")
        compresses = any(str(codec) != "none" for codec in codecs)
        held_out = self._prepared.data.held_out
        if self._recipe.model.weights == FRESH or self._trainer.done or held_out is None or not compresses:
            return
        with self._log.times.spent_on("evaluation"):
            found = look(self._trainer, held_out, self._batches)
        if self._log.lines is not None and found is not None:
            self._look = found.values()
            say(f"one held-out batch before training, compression {scores_in_words(found.scores)}", found.advice)

    def after_step(self, done: int, record: StepRecord | None) -> None:
        """Evaluate with compression on and off, if the recipe asks for it after so many steps."""
        self.fresh = False
        if is_due(self._recipe.training.evaluate_every, done, self._prepared.sampler.steps_per_epoch):
            self.unfinished = True
            self.evaluate(done)
        self.unfinished = False

    def end(self, done: int) -> None:
        """Evaluate after the last step."""
        self.fresh = False
        self.evaluate(done)

    def evaluate(self, done: int) -> None:
        """Evaluate after so many steps, unless that is done; collective."""
        if self._log.evaluated == done:
            return
        held_out, scores = self._prepared.data.held_out, None
        with self._log.times.spent_on("evaluation"), undone_if_stopped(self._trainer):
            if held_out is not None:
                scores = evaluate(self._trainer, held_out, self._batches, self._asked)
            answered = self._answers()
        self._log.evaluation(done, scores, answered)
        self.scores, self.fresh = scores, True

    def _batches(self) -> Iterator[Batch]:
        """The held-out samples in batches."""
        held_out = self._prepared.data.held_out
        return evaluation_batches(len(held_out or ()), self._recipe.pipeline.pass_size)

    def _answers(self) -> list[tuple[str, dict[Compression, str]]]:
        """Each prompt with its answers; empty except in the process that reports. Collective."""
        asked, generator = self._prepared.prompts, self._assembly.generator
        if asked is None or generator is None:
            return []
        prompts = list(zip(asked.tokens, asked.most, strict=True))
        found = answers(self._trainer, generator, prompts, asked.ends, self._asked)
        texts = [{mode: asked.text(tokens) for mode, tokens in each.items()} for each in found]
        return list(zip(self._recipe.training.prompts, texts, strict=False))

    def state_dict(self) -> dict[str, Any]:
        """Whether one is under way, and the scores before training."""
        return {"unfinished": self.unfinished, "look": self._look}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on inside an evaluation, if one was under way."""
        self.unfinished, self._look = bool(state["unfinished"]), state["look"]

    def told(self) -> dict[str, Any]:
        """The last scores, and those before training."""
        evaluations = [] if self._log.lines is None else self._log.lines.evaluations
        return {
            "held_out_digest": self._prepared.data.held_out_digest,
            "held_out": {mode: each.values() for mode, each in evaluations[-1][1].items()} if evaluations else {},
            "look": self._look,
        }
