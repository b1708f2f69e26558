"""The life of one stage process: join, run, and leave a report if it fails."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Literal, NoReturn

import torch.distributed as dist

from thinwire.errors.calls import first_line
from thinwire.launch.folder.policy import all_held, refusal, set_aside, what_is_left
from thinwire.launch.plan import host_data
from thinwire.launch.plan.places import real_placement
from thinwire.launch.plan.prepared import Prepared
from thinwire.launch.processes import parent
from thinwire.launch.processes.failures import Report, named, once, print_to_the_end, report_of, stop_on_signals
from thinwire.launch.processes.heartbeat import Pulse, Silence
from thinwire.launch.processes.neighbours import Neighbours
from thinwire.launch.processes.rendezvous import join
from thinwire.launch.run.run import Run
from thinwire.launch.shared import scratch, variables
from thinwire.launch.shared.control_groups import allow_many_files
from thinwire.launch.shared.doing import Doing
from thinwire.launch.shared.exit_codes import StoppedError
from thinwire.launch.shared.progress import patient
from thinwire.launch.shared.rank import is_spread, processes_here
from thinwire.pipeline.errors import OptionsError, PeerError
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.processes.transport import reaching

_BEGUN = "begun"
"""The file by which one start of the processes tells the next that a run has begun anew: the one before is renamed."""
_GRACE = 2.0
"""Seconds that a process with a lost peer waits for a checkpoint that is being written."""


def work(prepared: Prepared, pulse: Pulse) -> int:
    """Run as the process of the rank in the environment, and beat with `pulse`; the exit status."""
    worker = Worker(prepared, int(os.environ["RANK"]))
    pulse.doing = lambda: worker.doing
    allow_many_files()
    # 1. signals before joining, because joining can wait for the time-out
    stop_on_signals(worker.stopping, (signal.SIGTERM, signal.SIGINT), ends_soon=worker.saves_and_stops)
    try:
        # 2. join before building: to build a run, the processes exchange messages
        worker.join(pulse)
        worker.train()
    except (Exception, SystemExit) as error:  # a module of the user may call sys.exit
        worker.fail(error)
    return parent.DONE if variables.LAUNCHER in os.environ else 0


class Worker:
    """A stage process.

    Attributes:
        run: None until it is built.
        leaving: held by a thread that ends this process, as `Run` says.
    """

    def __init__(self, prepared: Prepared, rank: int) -> None:
        self._prepared, self._rank = prepared, rank
        self._where = real_placement(prepared.recipe, rank)
        self.run: Run | None = None
        self._ends = False
        self.leaving, self._locks = threading.Lock(), ExitStack()
        self._leave = once(self._leave_report)
        self._has_launcher = variables.LAUNCHER in os.environ

    @property
    def doing(self) -> Doing:
        """What the heartbeat of this process reports."""
        if self._ends:  # the run may have had no step left
            return Doing.ENDING
        return Doing.BUILDING if self.run is None else self.run.doing_now

    def join(self, pulse: Pulse) -> None:
        """Connect to the other processes; without a launcher, check the folder and watch the neighbours too."""
        recipe = self._prepared.recipe
        late = patient(
            f"process {self._rank} waits for all {recipe.num_processes} processes of the run to start, up to "
            f"{recipe.wire.timeout:g} s; if one has failed, its own output says why"
        )
        # a launcher, which has started all, says why one does not come
        with nullcontext() if self._has_launcher else late:
            join(self._prepared, self._rank)
        host_data.discard()
        if self._has_launcher:
            return
        self._prepared = as_started(self._prepared, self._where)
        if self._rank == 0:  # it holds the folders for all
            self._locks.enter_context(all_held(self._prepared.recipe))
        wire = self._prepared.recipe.wire
        silence = Silence(wire.heartbeat, wire.timeout)
        Neighbours(self._where, self._rank, pulse, silence, wire.timeout).begin(self._lost)

    def train(self) -> None:
        """Build the run, and go through it with all others."""
        recipe = self._prepared.recipe
        timeout = recipe.wire.timeout
        across = recipe.replicas.longest_wait(timeout)
        where = collectives.connected(self._where, timedelta(seconds=timeout), timedelta(seconds=across))
        self.run = Run(self._prepared, where, self.leaving)
        self.run.go()
        self._ends = True
        _say_done(self._prepared, self._where, self._rank)
        # wait for all before leaving: to its neighbours, a process that leaves early looks like one that failed
        with reaching(f"process {self._rank} was waiting for all others to finish"):
            dist.barrier()
        dist.destroy_process_group()

    def fail(self, error: Exception | SystemExit) -> NoReturn:
        """End this process, and leave a report of the error."""
        if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):  # whoever wrote into the store or read it
            error = PeerError(f"the rendezvous store cannot be reached: {first_line(error)}")
        # 1. let a checkpoint that is being written become whole; of a peer that is gone its part may never come
        if self.run is not None:
            seconds = _GRACE if isinstance(error, PeerError) else self._prepared.recipe.wire.timeout
            self.run.checkpoints.saver.finish_writing(seconds)
        # 2. report before exiting; exit without waiting for other threads, which may hang on peers that are gone
        where = self._where
        self._leave(report_of(error, self._rank, where.stages_of(self._rank), where.replica_of(self._rank)))
        os._exit(parent.STOPPED if isinstance(error, StoppedError) else 1)

    def stopping(self) -> None:
        """Leave a report before a signal ends this process."""
        self._leave(self._report("stopped", self.run.doing if self.run is not None else "starting"))

    def saves_and_stops(self) -> bool:
        """Whether the run stops by itself, after a checkpoint. If not, `leaving` stays held: the process has to end."""
        self.leaving.acquire()
        if self.run is not None and self.run.save_and_stop():
            self.leaving.release()
            return True
        return False

    def _lost(self, peer: int, said: str) -> None:
        """End this process, because a neighbour is gone or silent."""
        where = self._where
        self._leave(self._report("peer", f"{named(where.stages_of(peer), where.replica_of(peer))} {said}"))
        os._exit(1)

    def _report(self, kind: Literal["stopped", "peer"], text: str) -> Report:
        where, rank = self._where, self._rank
        return Report(rank=rank, stages=where.stages_of(rank), replica=where.replica_of(rank), kind=kind, text=text)

    def _leave_report(self, report: Report) -> None:
        # 1. delete the stores: the report needs room on the disk too
        if self.run is not None:
            self.run.assembly.discard_stores()
        # 2. report to the launcher; if it is gone, nobody else removes its folder
        if parent.launcher_is_gone():
            shutil.rmtree(os.environ[variables.FAILURES], ignore_errors=True)
            return
        report.save()
        # 3. say what is left, once for each host, where no launcher of ours does; who never began has lost nothing
        began = self.run is not None or os.environ.get(variables.RESTARTS, "0") != "0"
        first = not self._has_launcher and self._rank == processes_here(self._rank).start
        if began and first and report.kind != "saved":
            print_to_the_end(what_is_left(self._prepared.recipe))


def _say_done(prepared: Prepared, where: Placement, rank: int) -> None:
    """Say where the weights are, if several hosts have them: after the results, or in a host's first process."""
    here = processes_here(rank)
    if is_spread(rank) and rank == where.reporter and len(here) < where.num_processes:
        print("each host keeps the weights of its own stages; to export the model, copy all into one host's folder")
    if is_spread(rank) and rank == here.start and where.reporter not in here:
        done: dict[int | None, list[int]] = {}
        for process in here:
            done.setdefault(where.replica_of(process), []).extend(where.stages_of(process))
        said = " and ".join(named(sorted(stages), replica) for replica, stages in done.items())
        one = sum(map(len, done.values())) == 1
        print(f"{said} {'is' if one else 'are'} done; what this host keeps is in {prepared.recipe.folder}")


def as_started(prepared: Prepared, where: Placement) -> Prepared:
    """The run as this start of torchrun finds it: one that is started again goes on from its checkpoints. Collective.

    All processes have checked before any of them writes, or sets aside what --overwrite replaces. A run that torchrun
    starts again finds itself there. A host that came back may be started for the first time while the others are
    started again, so every process asks.

    Raises:
        OptionsError: in every process, the output folder of any host holds another run, or only some replace theirs.
    """
    again = os.environ.get(variables.RESTARTS, "0") != "0"
    mine = again, again and _begun(), prepared.recipe.checkpoint.resume == "never", refusal(prepared.recipe)
    is_again, begun, anew, refusals = zip(*collectives.everyone(where, mine), strict=True)
    if any(is_again) and any(begun):
        return replace(prepared, recipe=prepared.recipe.again)
    if any(anew) and not all(anew):
        raise OptionsError(
            f"checkpoint.resume must be never in all processes or in none, got it in process {anew.index(True)} and "
            f"not in process {anew.index(False)}; give --overwrite on every host, or on none"
        )
    if any(refusals) and (any(anew) or not any(is_again)):
        raise OptionsError(next(filter(None, refusals)))
    if not any(anew):
        return prepared
    set_aside(prepared.recipe)
    collectives.barrier(where, "renaming the run that this one replaces")
    prepared.recipe.folder.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):  # without room, a later start begins anew once more
        scratch.of_parent().joinpath(_BEGUN).touch()
    return replace(prepared, recipe=prepared.recipe.again)


def _begun() -> bool:
    """Whether an earlier start of these processes by the same torchrun has begun the run anew."""
    with suppress(OSError):
        return scratch.of_parent().joinpath(_BEGUN).exists()
    return False
