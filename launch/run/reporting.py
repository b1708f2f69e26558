"""What a run logs, prints and draws. The process of the last stage reports for all, of replicas that of the first.

Every process has a Reporting and calls the same methods, because what is reported is gathered from all stages.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from thinwire.compress.stores.marks import run_of
from thinwire.errors.files import as_written
from thinwire.launch.run.assembly import Assembly
from thinwire.launch.run.console import ProgressLine, scores_in_words, show_summary, tokens_of
from thinwire.launch.run.logs.hooks import Hooks
from thinwire.launch.run.logs.metrics import MetricsLog
from thinwire.launch.run.model_files import save_model_files
from thinwire.launch.run.outputs import (
    OutputError,
    save_picture,
    save_recipe,
    save_summary,
    save_traces,
    writing,
)
from thinwire.launch.run.recipe import dump
from thinwire.launch.run.resume import Resumption
from thinwire.launch.run.slower_links import show_slower_links
from thinwire.launch.run.summary import Times, carried, of_stages, stage_report, written
from thinwire.launch.shared.tables import say
from thinwire.models.data.chats import visible
from thinwire.models.data.sampler import Batch, evaluation_batches
from thinwire.models.digest import weights_digest
from thinwire.models.options import FRESH
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.evaluation import Compression, Score, answers, evaluate, look, undone_if_stopped
from thinwire.pipeline.measuring.traces import StageTrace
from thinwire.pipeline.options.durations import is_due
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.replicas.step_exchanges import exchange_report
from thinwire.pipeline.saving.checkpoint_folder import manifests
from thinwire.pipeline.training.trainer import StepRecord


class Reporting:
    """The log, the live line, the evaluations and the summary of a run.

    Args:
        assembly: the stages of this process.
        resumption: where the run goes on.
        asked: whether this process was asked to stop.

    Attributes:
        times: the seconds of the run.
        evaluated: the steps after which the last evaluation was; None before the first.
        unfinished: whether an evaluation is due, and what follows it, after a step that is done.
        look: the scores before training, in the process that reports; None if there were none.
        began: the id of the run since its first step, alike in all processes; one that replaces another has a new one.
        best: the best held-out score, what it is of, its step, and how many evaluations later ones were not better; in
            all processes. A run that goes on with another score has none yet, nor has one that has saved others since:
            it trains those steps again, maybe in another way.
        metered_from: the first step that the meters count.
        note: a sentence if the weights of the best score are not there; else None.
        is_better: whether the last evaluation was the best, until its weights are saved.
    """

    def __init__(self, assembly: Assembly, resumption: Resumption, asked: Callable[[], bool]) -> None:
        self._prepared, self._trainer, self._where = assembly.prepared, assembly.trainer, assembly.trainer.placement
        self._generator = assembly.generator
        self._recipe, self._first = assembly.prepared.recipe, resumption.first
        self._runs, self.metered_from = resumption.runs, resumption.metered_from
        with resumption.reading():
            self.times = Times(resumption.saved.get("seconds", {}))
            evaluated = resumption.saved.get("evaluated")
            self.evaluated: int | None = None if evaluated is None else int(evaluated)
            self.unfinished = bool(resumption.saved.get("unfinished", False))
            self.look: dict[str, Any] | None = resumption.saved.get("look")
            self.began = str(resumption.saved["began"]) if resumption.saved else ""
            best = resumption.saved.get("best")
            wanted = self._recipe.training.best
            self.best: dict[str, Any] | None = best if best is not None and best["of"] == wanted else None
            lost = None if self.best is None else int(self.best["step"])
        if not resumption.saved:
            self.began = collectives.everyone(self._where, uuid.uuid4().hex)[0]
        self.note = None
        if lost is not None and not self._has_best(lost):
            self.best = None
            self.note = (
                f"{self._recipe.folder / 'best'} has no weights of step {lost}, the best so far, so "
                f"{self._recipe.training.best} begins anew"
            )
        self.is_better = False
        # codecs that keep buffers for samples have changed those of a half evaluation: it runs to its end
        common, replicas = self._recipe.compression, self._recipe.replicas
        codecs = [common, *(replicas.codecs(replica, common) for replica in replicas.overrides)]
        stoppable = self._recipe.checkpoint.wanted and not any(each.by_sample for each in codecs)
        self._asked = asked if stoppable else None
        self._line: ProgressLine | None = None
        self._log: MetricsLog | None = None
        if self._trainer.reports:
            # without lines of what the checkpoint does not hold: that is done again
            with as_written(self._recipe.folder / "*.jsonl", OptionsError), writing(self._recipe.folder):
                hooks = Hooks(self._recipe, self.began) if self._recipe.logging else None
                self._log = MetricsLog(
                    self._recipe.folder,
                    self._first,
                    self.evaluated or 0,
                    replicas=self._recipe.replicas.count > 1,
                    prompts=bool(self._recipe.training.prompts),
                    hooks=hooks,
                )

    def _has_best(self, step: int) -> bool:
        """Whether best/ has the weights of a step, wherever they were saved; collective."""
        found = [manifest.step for manifest in manifests(self._recipe.folder / "best")]
        return all(collectives.everyone(self._where, self._where.replica != 0 or found[-1:] == [step]))

    def begin(self) -> None:
        """Write what a run has before its first step."""
        with writing(self._recipe.folder):
            save_recipe(self._recipe)
            if self._log is not None:
                save_model_files(self._recipe.folder, self._prepared)
                self._log.recipe(dump(self._recipe))

    def look_before_training(self) -> None:
        """Score a pretrained model on one held-out batch, and say what its codecs cost; collective."""
        codecs = self._trainer.stages[0].wire.compression.methods(self._recipe.num_boundaries, "activations")
        compresses = any(str(codec) != "none" for codec in codecs)
        held_out = self._prepared.data.held_out
        if self._recipe.model.weights == FRESH or self._first or held_out is None or not compresses:
            return
        with self.times.spent_on("evaluation"):
            found = look(self._trainer, held_out, self._batches)
        if self._log is not None and found is not None:
            self.look = found.values()
            say(f"one held-out batch before training, compression {scores_in_words(found.scores)}", found.advice)

    @contextmanager
    def live(self) -> Iterator[None]:
        """Show how far training is, in the process that reports, while the code inside trains."""
        if self._log is None:
            yield
            return
        with ProgressLine(self._recipe.training.steps, tokens_of(self._prepared)) as self._line:
            yield

    def say(self, text: str) -> None:
        """Print a line above the live one, in the process that reports."""
        if self._line is not None:
            self._line.say(text)

    def log_step(self, done: int, record: StepRecord) -> None:
        """Log and show a step."""
        self.times.seconds["training"] += record.seconds
        if self._log is not None and self._line is not None:
            with writing(self._recipe.folder):
                self._log.step(record)
            if news := self._log.news():
                self.say(news)
            self._line.step(record)

    def evaluate_if_due(self, done: int) -> None:
        """Evaluate with compression on and off, if the recipe asks for it after so many steps."""
        if is_due(self._recipe.training.evaluate_every, done, self._prepared.steps_per_epoch):
            self.unfinished = True
            self.evaluate(done)
        self.unfinished = False

    def evaluate(self, done: int) -> None:
        """Evaluate after so many steps, unless that is done; collective.

        Raises EvaluationStoppedError, in all processes, if one is asked to stop meanwhile.
        """
        if self.evaluated == done:
            return
        held_out, scores = self._prepared.data.held_out, None
        with self.times.spent_on("evaluation"), undone_if_stopped(self._trainer):
            if held_out is not None:
                scores = evaluate(self._trainer, held_out, self._batches, self._asked)
            answered = self._answers()
        self.evaluated = done
        if self._log is not None and self._line is not None:
            with writing(self._recipe.folder):
                if scores is not None:
                    self._log.evaluation(done, scores)
                for prompt, said in answered:
                    self._log.answer(done, prompt, said)
            if scores is not None:
                self._line.evaluation(done, scores)
            for prompt, said in answered:
                told = "".join(f"\n  compression {mode}: {text}" for mode, text in said.items())
                self.say(visible(f"step {done}, {prompt!r}{told}"))
        if self._recipe.training.best is not None:
            self._judge(done, None if scores is None else scores["off"], *self._recipe.training.best.split())

    def _batches(self) -> Iterator[Batch]:
        """The held-out samples in batches."""
        held_out = self._prepared.data.held_out
        return evaluation_batches(len(held_out or ()), self._recipe.pipeline.pass_size)

    def _answers(self) -> list[tuple[str, dict[Compression, str]]]:
        """Each prompt with its answers; empty except in the process that reports. Collective."""
        asked, generator = self._prepared.prompts, self._generator
        if asked is None or generator is None:
            return []
        prompts = list(zip(asked.tokens, asked.most, strict=True))
        found = answers(self._trainer, generator, prompts, asked.ends, self._asked)
        texts = [{mode: asked.text(tokens) for mode, tokens in each.items()} for each in found]
        return list(zip(self._recipe.training.prompts, texts, strict=False))

    def _judge(self, done: int, score: Score | None, way: str, name: str) -> None:
        """Compare the last score of this name with the best so far; collective."""
        mine = None if score is None else {"loss": score.loss, **score.metrics}[name]
        told = collectives.everyone(self._where, None if mine is None or math.isnan(mine) else mine)
        found = next((each for each in told if each is not None), None)
        sign = 1 if way == "min" else -1
        self.is_better = found is not None and (self.best is None or sign * found < sign * self.best["score"])
        if self.is_better:
            self.best = {"of": self._recipe.training.best, "step": done, "score": found, "since": 0}
        elif self.best is not None:
            self.best["since"] += 1

    @property
    def is_out_of_patience(self) -> bool:
        """Whether training is to end, because too many evaluations in a row were not better."""
        patience = self._recipe.training.patience
        return patience is not None and self.best is not None and self.best["since"] >= patience

    def say_end(self, done: int) -> None:
        """Say why training ends after so many steps."""
        assert self.best is not None, "there was one"
        self.say(
            f"training ends after step {done}: {self._recipe.training.best} was {self.best['score']:.4f} after step "
            f"{self.best['step']}, and {self.best['since']} evaluations since then were not better"
        )

    def check_place(self) -> None:
        """Raise OutputError if somebody moved or removed the run's folder, or put another one in its place."""
        if run_of(self._recipe.folder) not in self._runs:
            raise OutputError(
                f"{self._recipe.folder} must stay in its place while a run writes to it, and was moved or removed; "
                f"move it back, and go on with --resume"
            )

    def written(self) -> Callable[[], None]:
        """A function that waits until the disk has every line of the log."""
        return self._log.written() if self._log is not None else lambda: None

    def summarize(self, done: int) -> dict[str, Any] | None:
        """The summary after `done` steps, from the reports of all stages; None in other processes. Collective.

        Raises MismatchError if the replicas of a stage hold other weights.
        """
        where, reports = self._where, [stage_report(stage) for stage in self._trainer.stages]
        for report, stage in zip(reports, self._trainer.stages, strict=True):
            report["exchange"] = exchange_report(stage, where)
        collectives.compare_replicas(
            where, {report["stage"]: weights_digest(report["digest_lines"]) for report in reports}
        )
        of_replicas = collectives.everyone_across(where, [report["traffic"] for report in reports])
        for report, traffic in zip(reports, zip(*of_replicas, strict=True), strict=True):
            report["traffic"] = written(carried(traffic))
        stages = collectives.gather(where, {report["stage"]: report for report in reports})
        if self._log is None or stages is None:
            return None
        recipe, here = self._recipe, self._trainer.sync.replicas.here
        evaluations, stopped = self._log.evaluations, self._trainer.stopped
        return {
            "name": recipe.name,
            "folder": str(recipe.folder),
            "steps": done,
            "metered_from": self.metered_from,
            "running": True,
            "smoke": recipe.debug.smoke,
            "planned_steps": done if stopped else recipe.training.steps,
            "seconds": self.times.all,
            **{f"{purpose}_seconds": seconds for purpose, seconds in self.times.seconds.items()},
            "train_loss": self._log.last_loss,
            "held_out_digest": None if (held_out := self._prepared.data.held_out) is None else held_out.digest,
            "held_out": {mode: each.values() for mode, each in evaluations[-1][1].items()} if evaluations else {},
            # of each replica
            "samples": [done * size for size in recipe.batch_sizes],
            # whose seconds and memory these are
            "timed": f"replica {here.start}" if len(here) < recipe.replicas.count else "all",
            "look": self.look,
            "loss_scale": self._trainer.update.scale.told(),
            "best": self.best,
            "torch": torch.__version__,
            **of_stages(recipe, stages),
        }

    def finish(self, summary: dict[str, Any] | None) -> None:
        """Gather the traces; the process that reports writes and prints the final results."""
        traces = self._gather_traces()
        if self._log is None or summary is None:
            return
        summary |= {"running": False, "seconds": self.times.all, "saving_seconds": self.times.seconds["saving"]}
        folder, unit = self._recipe.folder, self._trainer.task.unit
        with writing(folder):
            save_summary(folder, summary)
        try:
            # what only shows what the numbers say
            with writing(folder):
                self._log.close()
                say(self._log.news())
                save_traces(folder, traces)
                save_picture(folder / "loss.png", self._recipe.name, unit, self._log.losses, self._log.evaluations)
        except OutputError as error:  # the weights and numbers are saved, so the run has not failed
            say(f"the traces or the picture are left out: {error}")
        show_summary(summary)
        show_slower_links(self._recipe, summary)

    def _gather_traces(self) -> list[StageTrace]:
        """The trace of every stage, in the process of the last stage. Else, or without a trace, an empty list."""
        tracer = self._trainer.tracer
        if not tracer.keep:
            return []
        gathered = collectives.gather(self._where, {stage: trace.to_json() for stage, trace in tracer.traces().items()})
        return [StageTrace.from_json(trace) for trace in gathered or ()]
