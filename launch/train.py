r"""`thinwire train`: start the stage processes of a recipe; if torchrun started this process, be one of them.

    thinwire train quickstart
    torchrun --nproc-per-node 4 -m thinwire.launch.train quickstart
    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr HOST --master-port 29500 \
        -m thinwire.launch.train quickstart

The launcher imports the libraries and reads the data once, then forks the stage processes. A process of torchrun must
watch its parent before it imports anything large, so most imports here are inside functions.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from thinwire.launch import cli
from thinwire.launch.run import forks, heartbeat, parent
from thinwire.launch.run.heartbeat import Doing
from thinwire.launch.shared.exit_codes import OK, FailedError, StoppedError
from thinwire.launch.shared.output import lasting
from thinwire.launch.shared.rank import check_rendezvous, is_spread, own_rank

if TYPE_CHECKING:
    from thinwire.launch.plan.prepared import Prepared
    from thinwire.launch.run.recipe import Recipe
    from thinwire.launch.run.stage_processes import Start


@lasting()
def main(argv: Sequence[str]) -> int:
    """Train a recipe, and return the exit status."""
    is_stage = "RANK" in os.environ
    if is_stage:
        parent.end_with_parent()
    else:
        forks.use_one_thread()
    rank = own_rank()
    from thinwire.launch.run import recipe
    from thinwire.launch.run.folders import all_held, check_folders, check_unused, mark, refuse_early

    wanted = recipe.parse(argv) if is_stage else recipe.parse(argv, before=refuse_early)
    if is_stage:
        if parent.VARIABLE not in os.environ:  # no launcher of ours reads this process's heartbeat
            check_rendezvous()
            heartbeat.begin_watcher(wanted.wire.heartbeat, wanted.wire.timeout)
        beating = heartbeat.begin()
    if not is_stage:
        check_unused(wanted)  # before a training is imported and the data is read
    _check_reach(wanted)
    from thinwire.launch.plan.prepare import prepare

    if is_stage:
        beating.doing = lambda: Doing.READING
    # other machines may hold most of the stages
    prepared = prepare(wanted, rank=rank, copies=0 if is_spread(rank) else wanted.replicas.count)
    if not is_stage:
        _check_transport(wanted)
    check_folders(wanted)
    if not is_stage:
        from thinwire.launch.run.outputs import save_recipe

        with all_held(wanted) as descriptors:
            if wanted.checkpoint.resume == "never":  # RECIPE may have been that of the run that is set aside
                mark(wanted.folder, uuid.uuid4().hex)
                save_recipe(wanted)
            launch(replace(prepared, recipe=wanted.again), argv, descriptors)
            if wanted.debug.smoke:
                from thinwire.launch.run.export import check_export

                check_export(prepared.recipe)
        return OK
    from thinwire.launch.run.worker import work

    return work(prepared, beating)


def _check_reach(wanted: Recipe) -> None:
    """Raise OptionsError if the file of keys or an interface cannot be used."""
    from thinwire.launch.shared.interfaces import check_interface
    from thinwire.pipeline.wire.backends import check_keys

    # zmq takes addresses, too, and says so itself
    if wanted.wire.transport != "zmq" or wanted.num_processes == 1:
        check_interface()
    check_keys(wanted.wire)


def _check_transport(wanted: Recipe) -> None:
    """Raise OptionsError if wire.transport nccl cannot be among the processes that will be started here."""
    if wanted.wire.transport != "nccl":
        return
    from thinwire.launch.plan.places import real_placement
    from thinwire.pipeline.devices.device import num_gpus
    from thinwire.pipeline.devices.transports import carrying, placed

    found = placed(wanted.num_processes, [num_gpus()], wanted.training.device)
    for pair in real_placement(wanted).neighbours:
        carrying(wanted.wire.transport, pair, found)


def launch(prepared: Prepared, arguments: Sequence[str], descriptors: Sequence[int]) -> None:
    """Start the stage processes on this machine, and wait until all have ended. They inherit the descriptors.

    Where one dies, all start again from the newest checkpoint, as often as the recipe allows.

    Raises:
        FailedError: a process failed. The message says which, and what the others were waiting for.
        StoppedError: a signal came.
    """
    from thinwire.launch.hosts.commands import gathered_signals
    from thinwire.launch.plan.places import real_placement
    from thinwire.launch.run import failures, host_data, stage_processes
    from thinwire.launch.run.folders import what_is_left
    from thinwire.launch.shared import scratch
    from thinwire.launch.shared.progress import show
    from thinwire.pipeline.wire.backends import fresh_keys

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
                end = stage_processes.run(
                    start, given, came, heartbeat=wire.heartbeat, timeout=wire.timeout, saves=saves
                )
                reports = failures.read_reports(folder) | failures.silences(end.silent, where)
            if end.finished:
                return
            if came:
                raise StoppedError(failures.explain_stopped(came[0], reports.values(), what_is_left(wanted)), came[0])
            told = failures.explain(reports, end.failed, where, end.hung)
            if left == 0 or any(report.lasting for report in reports.values()):
                began, told = left < wanted.checkpoint.restarts, "\n".join(filter(None, [told, what_is_left(wanted)]))
                raise FailedError(told) if began else failures.failure(reports, end.failed, end.hung, told)
            print(f"{told}\nstarting again from the newest checkpoint; restarts left: {left - 1}", file=sys.stderr)


def _starting(prepared: Prepared, arguments: Sequence[str], descriptors: Sequence[int]) -> Start:
    """How a stage process is started: forked, or, where that is not safe, as a new interpreter."""
    from thinwire.launch.run import stage_processes
    from thinwire.launch.run.worker import work

    if forks.is_safe():
        return partial(forks.Forked, lambda: work(prepared, heartbeat.begin()))
    again = [*arguments, "--checkpoint.resume", prepared.recipe.checkpoint.resume]
    return stage_processes.command([sys.executable, "-m", "thinwire.launch.train", *again], descriptors)


if __name__ == "__main__":
    sys.exit(cli.run(main, sys.argv[1:]))
