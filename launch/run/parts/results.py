"""What a run shows at its end: the summary, a picture, and the digest of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch

from thinwire.launch.results.console import show_summary
from thinwire.launch.results.outputs import OutputError, save_picture, save_summary, writing
from thinwire.launch.results.summary import of_stages, stage_report
from thinwire.launch.run.assembly import Assembly
from thinwire.launch.run.parts.log import Log
from thinwire.launch.run.parts.part import RunPart
from thinwire.launch.run.parts.saving import Saving
from thinwire.launch.shared.tables import say
from thinwire.models.digest import weights_digest
from thinwire.pipeline.processes import collectives


class Results(RunPart):
    """The process that reports writes and prints the final results."""

    def __init__(self, assembly: Assembly, log: Log, weights: Saving) -> None:
        super().__init__(assembly)
        self._log, self._weights = log, weights

    def end(self, done: int) -> None:
        """Close the stages, and show the results; whatever could be lost is saved."""
        self._assembly.close()
        lines, summary = self._log.lines, self._weights.summary
        if lines is None or summary is None:
            return
        times = self._log.times
        summary |= {"running": False, "seconds": times.all, "saving_seconds": times.seconds["saving"]}
        folder, unit = self._recipe.folder, self._trainer.task.unit
        with writing(folder):
            save_summary(folder, summary)
        try:
            # what only shows what the numbers say
            with writing(folder):
                lines.close()
                say(lines.news())
                save_picture(folder / "loss.png", self._recipe.name, unit, lines.losses, lines.evaluations)
        except OutputError as error:  # the weights and numbers are saved, so the run has not failed
            say(f"the picture is left out: {error}")
        show_summary(summary)


def summarize(assembly: Assembly, done: int, told: Mapping[str, Any]) -> dict[str, Any] | None:
    """The summary after `done` steps, from the reports of all stages; None in processes that do not report. Collective.

    `told` are the fields that the parts of the run give. Raises MismatchError if the replicas of a stage hold other
    weights.
    """
    trainer, recipe = assembly.trainer, assembly.prepared.recipe
    where, reports = trainer.placement, [stage_report(stage) for stage in trainer.stages]
    collectives.compare_replicas(where, {report["stage"]: weights_digest(report["digest_lines"]) for report in reports})
    of_replicas = collectives.everyone_across(where, [report["traffic"] for report in reports])
    for report, traffic in zip(reports, zip(*of_replicas, strict=True), strict=True):
        report["traffic"] = list(chain.from_iterable(traffic))
    stages = collectives.gather(where, {report["stage"]: report for report in reports})
    if not trainer.reports or stages is None:
        return None
    here = trainer.sync.replicas.here
    return {
        "name": recipe.name,
        "folder": str(recipe.folder),
        "steps": done,
        "running": True,
        "smoke": recipe.debug.smoke,
        "planned_steps": done if trainer.stopped else recipe.training.steps,
        # of each replica
        "samples": [done * recipe.pipeline.batch_size] * recipe.replicas.count,
        # whose seconds and memory these are
        "timed": f"replica {here.start}" if len(here) < recipe.replicas.count else "all",
        "torch": torch.__version__,
        **told,
        **of_stages(recipe, stages),
    }
