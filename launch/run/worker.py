"""The life of one stage process: join, run, and leave a report if it fails."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import threading
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from thinwire.launch.plan.places import real_placement
from thinwire.launch.plan.prepared import Prepared
from thinwire.launch.run import host_data, parent
from thinwire.launch.run.failures import (
    FOLDER_VARIABLE,
    Report,
    forget,
    named,
    once,
    print_to_the_end,
    report_of,
    stop_on_signals,
)
from thinwire.launch.run.folders import all_held, refusal, set_aside, what_is_left
from thinwire.launch.run.heartbeat import Doing, Pulse, Silence
from thinwire.launch.run.neighbours import Neighbours
from thinwire.launch.run.resume import RESTARTS_VARIABLE
from thinwire.launch.run.run import Run
from thinwire.launch.run.stage_processes import RENDEZVOUS_VARIABLE
from thinwire.launch.shared import scratch
from thinwire.launch.shared.control_groups import allow_many_files
from thinwire.launch.shared.exit_codes import StoppedError
from thinwire.launch.shared.progress import patient
from thinwire.launch.shared.rank import is_spread, processes_here
from thinwire.pipeline.errors import MismatchError, OptionsError, PeerError
from thinwire.pipeline.processes import collectives, posts
from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.processes.transport import reaching
from thinwire.pipeline.wire.backends import group_arguments

_POLL = 0.02
_BEGUN = "begun"
"""The file by which one start of the processes tells the next that a run has begun anew: the one before is renamed."""
_GRACE = 2.0
"""Seconds that a process with a lost peer waits for a checkpoint that is being written."""


def work(prepared: Prepared, pulse: Pulse) -> int:
    """Run as the process of the rank in the environment, and beat with `pulse`; the exit status."""
    rank = int(os.environ["RANK"])
    forget(rank)
    where = real_placement(prepared.recipe, rank)
    stages, replica = where.stages_of(rank), where.replica_of(rank)
    run: Run | None = None
    leaving, locks = threading.Lock(), ExitStack()

    @once
    def leave(report: Report) -> None:
        # 1. delete the stores: the report needs room on the disk too
        if run is not None:
            run.assembly.discard_stores()
        # 2. report to the launcher; if it is gone, nobody else removes its folder
        if parent.launcher_is_gone():
            shutil.rmtree(os.environ[FOLDER_VARIABLE], ignore_errors=True)
        else:
            report.save()
            # 3. say what is left, once for each host, where no launcher of ours does; who never began has lost nothing
            began = run is not None or os.environ.get(RESTARTS_VARIABLE, "0") != "0"
            first = parent.VARIABLE not in os.environ and rank == processes_here(rank).start
            if began and first and report.kind != "saved":
                print_to_the_end(what_is_left(prepared.recipe))

    def stopping() -> None:
        doing = run.doing if run is not None else "starting"
        leave(Report(rank=rank, stages=stages, replica=replica, kind="stopped", text=doing))

    def lost(peer: int, said: str) -> None:
        text = f"{named(where.stages_of(peer), where.replica_of(peer))} {said}"
        leave(Report(rank=rank, stages=stages, replica=replica, kind="peer", text=text))
        os._exit(1)

    pulse.doing = lambda: Doing.BUILDING if run is None else run.doing_now
    allow_many_files()
    # 1. signals before joining, because joining can wait for the time-out
    stop_on_signals(stopping, (signal.SIGTERM, signal.SIGINT), ends_soon=lambda: saves_and_stops(run, leaving))
    try:
        # 2. join before building: to build a run, the processes exchange messages
        with _waiting(prepared, rank):
            join(prepared, rank)
        host_data.discard()
        if parent.VARIABLE not in os.environ:  # no launcher of ours has checked the folder, or reads our heartbeat
            prepared = as_started(prepared, where)
            if rank == 0:  # it holds the folders for all
                locks.enter_context(all_held(prepared.recipe))
            wire = prepared.recipe.wire
            silence = Silence(wire.heartbeat, wire.timeout)
            Neighbours(where, rank, pulse, silence, wire.timeout).begin(lost)
        timeout = prepared.recipe.wire.timeout
        across = prepared.recipe.replicas.longest_wait(timeout)
        run = Run(
            prepared,
            collectives.connected(where, timedelta(seconds=timeout), timedelta(seconds=across)),
            leaving,
        )
        run.go()
        _say_done(prepared, where, rank)
        # 3. wait for all before leaving: to its neighbours, a process that leaves early looks like one that failed
        with reaching(f"process {rank} was waiting for all others to finish"):
            dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        # 4. let a checkpoint that is being written become whole; of a peer that is gone its part may never come
        if run is not None:
            run.checkpoints.saver.finish_writing(
                _GRACE if isinstance(error, PeerError) else prepared.recipe.wire.timeout
            )
        # 5. report before exiting; exit without waiting for other threads, which may hang on peers that are gone
        leave(report_of(error, rank, stages, replica))
        os._exit(parent.STOPPED if isinstance(error, StoppedError) else 1)
    return 0


def saves_and_stops(run: Run | None, leaving: threading.Lock) -> bool:
    """Whether a run stops by itself, after a checkpoint. If not, `leaving` stays held, and the process has to end."""
    leaving.acquire()
    if run is not None and run.save_and_stop():
        leaving.release()
        return True
    return False


def _waiting(prepared: Prepared, rank: int) -> AbstractContextManager[None]:
    """Say what is waited for if others do not come; where a launcher has started all, it says why one does not."""
    if parent.VARIABLE in os.environ:
        return nullcontext()
    return patient(
        f"process {rank} waits for all {prepared.recipe.num_processes} processes of the run to start, up to "
        f"{prepared.recipe.wire.timeout:g} s; if one has failed, its own output says why"
    )


def _say_done(prepared: Prepared, where: Placement, rank: int) -> None:
    """Say that the stages of this host are done, if it does not show the results, in the first of its processes."""
    here = processes_here(rank)
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
    again = os.environ.get(RESTARTS_VARIABLE, "0") != "0"
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


def join(prepared: Prepared, rank: int) -> None:
    """Connect to the other processes. MismatchError if their number is not that of the recipe."""
    needed, found = prepared.recipe.num_processes, int(os.environ["WORLD_SIZE"])
    if needed != found:
        raise MismatchError(
            f"this recipe needs {needed} processes, got {found}; start torchrun with --nproc-per-node times --nnodes "
            f"equal to {needed}, or change pipeline.num_stages"
            + " or replicas.count"
            * (prepared.recipe.replicas.count > 1)
        )
    several_hosts = is_spread(rank)
    advice = "GLOO_SOCKET_IFNAME must name the interface that other hosts reach, see thinwire doctor; " * several_hosts
    advice += "only the stages may reach the ports of a run"
    file, wire = os.environ.get(RENDEZVOUS_VARIABLE), prepared.recipe.wire
    timeout = timedelta(seconds=wire.timeout)
    if several_hosts and wire.transport == "zmq" and not os.environ.get("GLOO_SOCKET_IFNAME"):
        raise OptionsError("GLOO_SOCKET_IFNAME must name the interface that other hosts reach, and is not set")
    group = group_arguments(wire, found)
    try:
        with reaching(f"process {rank} was waiting for all {needed} processes to start ({advice})"):
            store, _, _ = next(rendezvous(f"file://{file}" if file else "env://", rank, found, timeout=timeout))
            store.set_timeout(timeout)
            fresh = store if file else of_this_start(store, rank, found, timeout)
            # they all wait for each other at saves and checkpoints, for which a replica that steps alone may be late
            longest = timedelta(seconds=prepared.recipe.replicas.longest_wait(wire.timeout))
            dist.init_process_group(**group, store=fresh, rank=rank, world_size=found, timeout=longest)
    except PeerError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise MismatchError(
            "the port of the rendezvous must be free, but another program uses "
            f"{os.environ.get('MASTER_PORT')}; set MASTER_PORT to another one (torchrun: --master-port), the same on "
            "every machine"
        ) from error


def of_this_start(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """The part of a store that belongs to this start of the processes alone. Collective.

    torchrun keeps its store when it starts processes again, and gloo would call the addresses of those that are gone.
    Process 0 draws the name of the part. Every other process asks for it with a number of its own, so that it takes no
    answer to an earlier process; and process 0 answers until each has confirmed that it knows the name.

    Raises:
        DistStoreError: a process does not come.
        WireError: what one says is damaged.
    """
    if rank:
        number = secrets.token_hex(8)
        store.set(f"thinwire/asks/{rank}", posts.written(number))
        name = posts.read(store.get(f"thinwire/answer/{number}"), "process 0 must name the part of the store")
        store.set(f"thinwire/{name}/{rank}", "")
        return dist.PrefixStore(str(name), store)
    name, missing = secrets.token_hex(8), set(range(1, size))
    deadline = time.monotonic() + timeout.total_seconds()
    while missing:
        if time.monotonic() > deadline:
            who = ", ".join(map(str, sorted(missing)))
            raise dist.DistStoreError(f"no word of {who} within {timeout.total_seconds():g} s")
        for other in missing:
            if store.check([f"thinwire/asks/{other}"]):
                asked = posts.read(store.get(f"thinwire/asks/{other}"), f"process {other} must ask with a number")
                store.set(f"thinwire/answer/{asked}", posts.written(name))
        missing = {other for other in missing if not store.check([f"thinwire/{name}/{other}"])}
        time.sleep(_POLL)
    return dist.PrefixStore(name, store)
