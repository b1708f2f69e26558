"""The launcher: it starts the stage processes of this machine, again where one dies, and says why it failed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from thinwire.launch.folder.policy import what_is_left
from thinwire.launch.plan import host_data
from thinwire.launch.plan.places import real_placement
from thinwire.launch.plan.prepared import Prepared
from thinwire.launch.processes import failures, forks, heartbeat, parent, stage_processes
from thinwire.launch.processes.rendezvous import damage
from thinwire.launch.processes.stage_processes import Start
from thinwire.launch.processes.worker import work
from thinwire.launch.shared import scratch, variables
from thinwire.launch.shared.exit_codes import FailedError, StoppedError
from thinwire.launch.shared.progress import show
from thinwire.launch.shared.signals import gathered_signals
from thinwire.pipeline.processes.backends import fresh_keys


def launch(prepared: Prepared, arguments: Sequence[str], descriptors: Sequence[int]) -> None:
    """Start the stage processes on this machine, and wait until all have ended. They inherit the descriptors.

    Where one dies, all start again from the newest checkpoint, as often as the recipe allows.

    Raises:
        FailedError: a process failed. The message says which, and what the others were waiting for.
        StoppedError: a signal came.
    """
    wanted, where = prepared.recipe, real_placement(prepared.recipe)
    count = wanted.replicas.count
    copies = f"{count} times " if count > 1 else ""
    show(f"building {copies}{wanted.pipeline.num_stages} stages in {wanted.num_processes} processes")
    start = _starting(prepared, arguments, descriptors)
    scratch.remove_orphans()
    with gathered_signals() as came:
        for left in reversed(range(wanted.checkpoint.restarts + 1)):
            with scratch.folder() as folder:
                keys = fresh_keys(wanted.wire, folder)
                given = stage_processes.environments(wanted.num_processes, wanted.training.threads, folder)
                if not forks.is_safe():
                    host_data.keep(prepared.data, wanted.data, wanted.training.seed, folder)
                wire, saves = wanted.wire, wanted.checkpoint.wanted
                given = [{**environment, **keys} for environment in given]
                run = partial(stage_processes.run, heartbeat=wire.heartbeat, timeout=wire.timeout, done=parent.DONE)
                end = run(start, given, came, saves=saves, wrong=partial(damage, Path(given[0][variables.RENDEZVOUS])))
                reports = failures.read_reports(folder) | failures.silences(end.silent, where)
            if end.finished:
                return
            if came:
                saved = next((report.text for report in reports.values() if report.kind == "saved"), "")
                kept = what_is_left(wanted)
                how = f" {saved}" if saved else f"; {kept}" if kept else ""
                raise StoppedError(f"stopped by {came[0].name}{how}", came[0])
            told = "\n".join(filter(None, [end.wrong, failures.explain(reports, end.failed, where, end.hung)]))
            if left == 0 or any(report.lasting for report in reports.values()):
                began, told = left < wanted.checkpoint.restarts, "\n".join(filter(None, [told, what_is_left(wanted)]))
                raise FailedError(told) if began else failures.failure(reports, end.failed, end.hung, told)
            print(f"{told}\nstarting again from the newest checkpoint; restarts left: {left - 1}", file=sys.stderr)


def _starting(prepared: Prepared, arguments: Sequence[str], descriptors: Sequence[int]) -> Start:
    """How a stage process is started: forked, or, where that is not safe, as a new interpreter."""
    if forks.is_safe():
        return partial(forks.Forked, lambda: work(prepared, heartbeat.begin()))
    date = prepared.recipe.data.date
    again = [*arguments, "--checkpoint.resume", prepared.recipe.checkpoint.resume]
    again += ["--data.date", date] if date else []
    return stage_processes.command([sys.executable, "-m", "thinwire.launch.train", *again], descriptors)
