"""One process of a run: it trains its stages, saves them and reports.

The process with the last stage, of replicas that of the first, also logs and prints.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError

from thinwire.compress import parse
from thinwire.compress.stores.space import by_medium
from thinwire.launch.run.assembly import Assembly, Prepared, assemble
from thinwire.launch.run.console import ProgressLine, show_notes, show_stores, show_summary
from thinwire.launch.run.layer_times import uneven_cut
from thinwire.launch.run.logs.metrics import MetricsLog
from thinwire.launch.run.model_files import keep_folder, save_model_files
from thinwire.launch.run.outputs import (
    OutputError,
    remove_earlier,
    save_picture,
    save_recipe,
    save_summary,
    save_traces,
    writing,
)
from thinwire.launch.run.recipe import dump
from thinwire.launch.run.resume import Resumption, Said
from thinwire.launch.run.room import Room
from thinwire.launch.run.slower_links import show_slower_links
from thinwire.launch.run.summary import codecs_in_words, module_of, stage_report, sum_routes, summarize
from thinwire.launch.run.times import Times
from thinwire.launch.run.weights import Saving
from thinwire.launch.run.wiring.choosing import Choosing
from thinwire.launch.shared.progress import counting
from thinwire.models.batch_norm import batch_norm_warning, batch_norms
from thinwire.models.data.sampler import evaluation_batches
from thinwire.models.digest import tensor_lines, weights_digest
from thinwire.models.precision import tf32_note
from thinwire.models.tasks import mask_padding
from thinwire.pipeline.evaluation import evaluate
from thinwire.pipeline.options.durations import in_steps
from thinwire.pipeline.process import Placement
from thinwire.pipeline.replicas.drain import exchange_report
from thinwire.pipeline.replicas.membership.attendance import Attendance
from thinwire.pipeline.tracing.record import StepRecord
from thinwire.pipeline.tracing.traces import StageTrace


class Run:
    """A run as one process sees it."""

    def __init__(self, prepared: Prepared, where: Placement, attendance: Attendance | None = None) -> None:
        # on an error torch's runtime logs the whole schedule, which buries the error
        logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)
        self.recipe = prepared.recipe
        self.assembly: Assembly = assemble(prepared, where, dist.get_rank(), attendance=attendance)
        self.trainer = self.assembly.trainer
        self._held_out = prepared.data.held_out
        self._wire = self.trainer.stages[0].wire
        self._room = Room(self.recipe, where, self.trainer, prepared.steps_per_epoch)
        self._room.check()
        self._resumption = Resumption(prepared, where, self.trainer)
        self._choosing = Choosing(
            self.recipe,
            self.trainer,
            where,
            prepared.steps_per_epoch,
            self._resumption.saved,
            same_parts=self._resumption.same_parts,
        )
        self._resume()
        if attendance is not None:
            attendance.on_stop = self._resumption.ask_to_stop
        self._times = Times(self._resumption.saved.get("seconds", {}))
        self._log = self._open_log() if self.trainer.reports else None
        self._done: int | None = None
        self._evaluated: int | None = self._resumption.saved.get("evaluated")

    @property
    def doing(self) -> str:
        """What this process does or waits for, in words."""
        words = [stage.meter.doing for stage in self.trainer.stages]
        return "; ".join(word for word in words if word) or "between two sections of its work"

    def go(self) -> None:
        """Train, evaluate with compression on and off, save, and report."""
        with writing(self.recipe.folder):
            save_recipe(self.recipe)
            if self._log is not None:
                if not self._resumption.first:
                    remove_earlier(self.recipe)
                save_model_files(self.recipe.folder, self.assembly.prepared)
        if self._log is not None:
            self._log.recipe(dump(self.recipe))
        self._show_notes()
        self._show_stores()
        first = self.trainer.begin(self._resumption.first)
        if self.recipe.replicas.elastic:  # the run may have been stopped while this replica waited
            self._resumption.stop_if_asked(first, self._said)
        if self._log is None:
            self.trainer.train(self._after_step, first)
        else:
            mine = [stage.stage_index for stage in self.trainer.stages]
            with ProgressLine(self.recipe.training.steps, mine, self.recipe.pipeline.num_stages) as self._line:
                self.trainer.train(self._after_step, first)
        with counting(self._log is not None):
            self._end()

    def _end(self) -> None:
        """Evaluate, save and report after the last step."""
        self._log_exchanges()
        if self._evaluated != self.recipe.training.steps:
            self._evaluate(self.recipe.training.steps)
        summary = self._save(self.recipe.training.steps)
        self._resumption.finish(self.recipe.training.steps, self._said())
        for stage in self.trainer.stages:
            stage.close()
        self.discard_stores()
        self._finish(summary)

    @property
    def trains(self) -> bool:
        """Whether the first step is done and the last one is not."""
        return self._done is not None and self._done < self.recipe.training.steps

    def save_and_stop(self) -> bool:
        """Have all stages write a checkpoint and stop after the step under way, or after the last one end as planned.

        Waits for nothing. False before the first step is done and where no checkpoints are wanted: then it changes
        nothing.
        """
        return self._done is not None and self._resumption.ask_to_stop()

    def discard_stores(self) -> None:
        """Delete the files of this process's stores, if the disk allows it. Call it at the end, after errors too."""
        for wire, _ in self.trainer.stages[0].all_ends:
            with suppress(OSError):
                wire.discard_stores()

    def _after_step(self, record: StepRecord) -> None:
        done = self.trainer.done  # later than the step if a replica took the weights of another
        self._times.seconds["training"] += record.seconds
        self._choosing.end_step()
        if self._log is not None:
            self._log.step(record)
            if news := self._log.news():
                self._line.say(news)
            self._line.step(record)
        if self.recipe.training.evaluates_after(done, self._steps_per_epoch):
            self._evaluate(done)
        if self.recipe.debug.check_buffers and (
            done % self._steps_per_epoch == 0 or done == self.recipe.training.steps
        ):
            self.assembly.placement.compare({stage.stage_index: stage.digests() for stage in self.trainer.stages})
            self._compare_replicas()
        if self.recipe.save_every and done % self.recipe.save_every == 0:
            self._save(done)
        if self._choosing.choose(last=done == self.recipe.training.steps):
            self._show_choices()
        self._resumption.check()
        # last: the checkpoint must hold the changes by this step's evaluation and choice
        if self._resumption.is_due(done, self._steps_per_epoch):
            with self._times.spent_on("saving"):
                self._compare_replicas()
                self._resumption.save(done, self._said())
        self._done = done
        if self.trains:
            self._resumption.stop_if_asked(done, self._said)

    def _resume(self) -> None:
        """Restore the checkpoint. The codecs that auto chose are in use before."""
        self._resumption.begin()
        if "loss_scale" in self._resumption.saved:
            self.trainer.update.scale.load_state_dict(self._resumption.saved["loss_scale"])
        self._choosing.begin()

    def _keep_folder(self) -> None:
        """Make the run's folder anew if somebody moved or removed it."""
        if keep_folder(self.assembly.prepared, self._log):
            self._line.say(
                f"{self.recipe.folder} was moved or removed, and the run has made it anew, with its metrics; all "
                f"else is where the folder was moved to, or gone"
            )

    def _said(self) -> Said:
        """What the run itself gives a checkpoint."""
        self._keep_folder()
        self._log_exchanges()
        with writing(self.recipe.folder):
            logged = self._log.written() if self._log is not None else lambda: None
        values = {
            "seconds": self._times.state_dict(),
            **self._choosing.state_dict(),
            "evaluated": self._evaluated,
            "loss_scale": self.trainer.update.scale.state_dict(),
        }
        return Said(values, logged)

    def _log_exchanges(self) -> None:
        """Log all exchanges between replicas so far."""
        exchanges = self.trainer.sync.exchanges.settle()
        if self._log is not None:
            self._log.exchanged(exchanges)

    def _show_choices(self) -> None:
        """Print what auto chose, and check the room for its stores."""
        choices = self._choosing.choices
        if self._log is not None:
            for choice in choices:
                self._line.say(str(choice))
        if any(parse(choice.codec).feedback is not None for choice in choices):
            self._room.check_stores()
            self._show_stores()

    @property
    def _saves(self) -> bool:
        """Whether this process saves the weights of its stages: those of the first replica do."""
        return self.assembly.placement.replica == 0

    @property
    def _steps_per_epoch(self) -> int:
        return self.assembly.prepared.steps_per_epoch

    @property
    def _steps_of_weights(self) -> dict[str, int]:
        """By option, the number of steps after which the weights are used, again and again."""
        evaluated = in_steps(self.recipe.training.evaluate_every, self._steps_per_epoch)
        return {"save_every": self.recipe.save_every, "training.evaluate_every": evaluated}

    def _show_notes(self) -> None:
        """Print notes before training starts: where a run goes on, the data, auto, batch normalization."""
        gathered = self.assembly.placement.gather(
            {stage.stage_index: batch_norms(module_of(stage).layers) for stage in self.trainer.stages}
        )
        cut = None if self._resumption.first else uneven_cut(self.assembly)
        steps, compression = self.recipe.training.steps, self.recipe.compression
        if gathered is not None and self._log is not None:
            warning = batch_norm_warning([*chain(*gathered)], self.recipe.pipeline.microbatch_size)
            notes = [
                *self._resumption.notes,
                *self.assembly.prepared.data.notes,
                *self._wire.cards.notes,
                compression.note_on_auto(steps, self._steps_per_epoch) if self._choosing.measures else None,
                self._choosing.note,
                self.recipe.replicas.note_on_steps(self._steps_of_weights),
                self.recipe.optimizer.note_on_freezing(steps, self._steps_per_epoch),
                tf32_note(self.recipe.training.precision, self.trainer.stages[0].device.type),
                warning,
                cut,
            ]
            show_notes([note for note in notes if note])

    def _show_stores(self) -> None:
        """Print the final size of the feedback stores before training fills them."""
        here = tuple(stage.stage_index for stage in self.trainer.stages)
        gathered = self.assembly.placement.gather(dict.fromkeys(here, (here, by_medium(self._room.stores))))
        if gathered is not None and self._log is not None:
            show_stores({tuple(stages): taken for stages, taken in gathered})

    def _open_log(self) -> MetricsLog:
        """The log, without lines of what the checkpoint does not hold: that is done again."""
        evaluated = self._resumption.saved.get("evaluated") or 0
        with writing(self.recipe.folder):
            first, limit, several = self._resumption.first, self.recipe.rotate_logs, self.recipe.replicas.count > 1
            return MetricsLog(self.recipe.folder, first, limit, evaluated, replicas=several)

    def _evaluate(self, done: int) -> None:
        self._evaluated = done
        if self._held_out is None:
            return
        size = self.recipe.pipeline.num_microbatches * self.recipe.pipeline.microbatch_size
        count = len(self._held_out)
        with self._times.spent_on("evaluation"):
            scores = evaluate(self.trainer, self._held_out, lambda: evaluation_batches(count, size), mask_padding)
        if self._log is not None and scores is not None:
            self._log.evaluation(done, scores)
            self._line.evaluation(done, scores)

    def _save(self, done: int) -> dict[str, Any] | None:
        """Save the weights of all stages as one set. If a stage cannot save, wait until it has space. Collective.

        The set has a summary of the run so far. So it can be exported and reported if the run stops early. The process
        of the last stage returns this summary, the others None.
        """
        with self._times.spent_on("saving"):
            self._keep_folder()
            return self._save_set(Saving(self.recipe.folder, done, self.recipe.pipeline.num_stages), done)

    def _save_set(self, saving: Saving, done: int) -> dict[str, Any] | None:
        summary = self._summarize(done)
        mine = self._write_set(saving, summary)
        while trouble := [said for said in self.assembly.placement.everyone(mine) if said]:
            if self._saves:
                saving.discard()
            if not self._room.wait(mine, 0 if self._log is None else self._log.waiting):
                raise OutputError(trouble)
            mine = self._write_set(saving, summary)
        with writing(self.recipe.folder):
            if self._saves:
                saving.complete()
            if summary is not None:
                save_summary(self.recipe.folder, summary)
        return summary

    def _compare_replicas(self) -> None:
        """Raise MismatchError if the replicas of a stage hold other weights. Collective."""
        if (where := self.assembly.placement).num_replicas > 1:
            lines = {stage.stage_index: tensor_lines(module_of(stage).full_state()) for stage in self.trainer.stages}
            where.compare_replicas({stage: weights_digest(found) for stage, found in lines.items()})

    def _write_set(self, saving: Saving, summary: Mapping[str, Any] | None) -> str | None:
        """Write the metrics, the weights of this process's stages, and its summary; the reason if that fails."""
        try:
            if self._log is not None:
                self._log.sync()
        except OSError as error:
            return f"the metrics cannot be saved in {self.recipe.folder}: {error.strerror or error}; free some space"
        for stage in self.trainer.stages if self._saves else ():
            try:
                saving.write(stage.stage_index, module_of(stage).full_state())
            except (OSError, SafetensorError) as error:
                return (
                    f"the weights of stage {stage.stage_index} cannot be saved in {self.recipe.folder}: "
                    f"{getattr(error, 'strerror', None) or error}; free some space; the set of weights before it is "
                    f"still there, for all stages"
                )
        try:
            if summary is not None:
                save_summary(saving.folder, summary)
        except OSError as error:
            return f"the summary cannot be saved in {self.recipe.folder}: {error.strerror or error}; free some space"
        return None

    def _summarize(self, done: int) -> dict[str, Any] | None:
        """The summary after `done` steps, from the reports of all stages; None in other processes. Collective.

        Raises MismatchError if the replicas of a stage hold other weights.
        """
        where, reports = self.assembly.placement, [stage_report(stage) for stage in self.trainer.stages]
        for report, stage in zip(reports, self.trainer.stages, strict=True):
            report["exchange"] = exchange_report(stage, where)
        where.compare_replicas({report["stage"]: weights_digest(report["digest_lines"]) for report in reports})
        of_replicas = where.everyone_across([report["traffic"] for report in reports])
        for report, traffic in zip(reports, zip(*of_replicas, strict=True), strict=True):
            report["traffic"] = sum_routes(traffic)
        stages = where.gather({report["stage"]: report for report in reports})
        if self._log is None or stages is None:
            return None
        here = self.trainer.sync.replicas.here
        return summarize(
            self.recipe,
            stages,
            done=done,
            codec_of=codecs_in_words(self.recipe, self._wire.compression),
            times=self._times,
            timed=f"replica {here.start}" if len(here) < self.recipe.replicas.count else "all",
            train_loss=self._log.last_loss,
            evaluations=self._log.evaluations,
            choices=self._choosing.choices,
            loss_scale=self.trainer.update.scale.told(),
        )

    def _finish(self, summary: dict[str, Any] | None) -> None:
        """Gather the traces; the process of the last stage writes and prints the final results."""
        traces = self._gather_traces()
        if self._log is None or summary is None:
            return
        summary |= {"running": False, "seconds": self._times.all, "saving_seconds": self._times.seconds["saving"]}
        with writing(self.recipe.folder):
            save_summary(self.recipe.folder, summary)
        try:
            self._save_pictures(self._log, traces)
        except OutputError as error:  # the weights and numbers are saved, so the run has not failed
            show_notes([f"the traces or the picture are left out: {error}"])
        show_summary(summary)
        show_slower_links(self.recipe, summary)

    def _save_pictures(self, log: MetricsLog, traces: Sequence[StageTrace]) -> None:
        """Write what only shows what the numbers say. OutputError if the disk is full."""
        with writing(self.recipe.folder):
            log.close()
            save_traces(self.recipe.folder, traces)
            picture = self.recipe.folder / "loss.png"
            save_picture(picture, self.recipe.name, self.trainer.task.unit, log.losses, log.evaluations)

    def _gather_traces(self) -> list[StageTrace]:
        """The trace of every stage, in the process of the last stage. Else, or without a trace, an empty list."""
        tracer = self.trainer.tracer
        if not tracer.keep:
            return []
        gathered = self.assembly.placement.gather({stage: trace.to_json() for stage, trace in tracer.traces().items()})
        return [StageTrace.from_json(trace) for trace in gathered or ()]
