"""How the processes of a run find each other."""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from thinwire.launch.plan.prepared import Prepared
from thinwire.launch.processes import parent
from thinwire.launch.shared import variables
from thinwire.launch.shared.rank import is_spread
from thinwire.pipeline.errors import MismatchError, OptionsError, PeerError
from thinwire.pipeline.processes import posts
from thinwire.pipeline.processes.addresses import joined
from thinwire.pipeline.processes.backends import TRANSPORTS, group_arguments
from thinwire.pipeline.processes.transport import reaching

_POLL = 0.02
_LATER = 5.0
"""Seconds beyond the time-outs of torch."""


def join(prepared: Prepared, rank: int) -> None:
    """Connect to the other processes. MismatchError if their number is not that of the recipe."""
    needed, found = prepared.recipe.num_processes, int(os.environ["WORLD_SIZE"])
    file, wire, replicas = os.environ.get(variables.RENDEZVOUS), prepared.recipe.wire, prepared.recipe.replicas
    if needed != found:
        raise MismatchError(
            f"this recipe needs {needed} processes, got {found}; start torchrun with --nproc-per-node times --nnodes "
            f"equal to {needed}, or change pipeline.num_stages{' or replicas.count' * (replicas.count > 1)}"
        )
    several_hosts = is_spread(rank)
    must = "GLOO_SOCKET_IFNAME must name the interface that other hosts reach"
    advice = f"{must}, see thinwire doctor --peers; " * several_hosts + "only the stages may reach the ports of a run"
    timeout = timedelta(seconds=wire.timeout)
    if several_hosts and TRANSPORTS[wire.transport].reads_interface and not os.environ.get("GLOO_SOCKET_IFNAME"):
        raise OptionsError(f"{must}, and is not set")
    # they all wait for each other at saves and checkpoints, for which a replica that steps alone may be late
    longest = timedelta(seconds=replicas.longest_wait(wire.timeout))

    def meet() -> None:
        if file:
            with parent.ending_with_parent():  # Python's lock is held, for minutes if the folder is gone
                fresh: dist.Store = dist.FileStore(file, found)
        else:
            store = next(rendezvous("env://", rank, found, timeout=timeout))[0]
            posts.limit_answers(store, timeout)
            fresh = of_this_start(store, rank, found, timeout)
        fresh.set_timeout(timeout)
        group = group_arguments(wire, found)
        dist.init_process_group(**group, store=fresh, rank=rank, world_size=found, timeout=longest)

    try:
        with reaching(f"process {rank} was waiting for all {needed} processes to start ({advice})"):
            # to connect, to be answered, and to connect with all
            meet() if file else _within(2 * wire.timeout + longest.total_seconds() + _LATER, meet)
    except PeerError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise MismatchError(
            f"the port of the rendezvous must be free, but another program uses {os.environ['MASTER_PORT']}; set "
            f"MASTER_PORT to another one (torchrun: --master-port), the same on every machine"
        ) from error


def _within(seconds: float, meet: Callable[[], None]) -> None:
    """Meet the others, or raise DistStoreError.

    torch would wait for ever where a connection to its store is taken, and nothing is said over it any more.
    """
    found: Future[None] = Future()

    def answer() -> None:
        try:
            meet()
            found.set_result(None)
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=answer, daemon=True).start()
    try:
        found.result(seconds)
    except TimeoutError:
        where = joined(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
        raise dist.DistStoreError(f"the store at {where} takes connections, and says nothing") from None


def damage(file: Path) -> str:
    """What is wrong with the file of a launcher's store, in a sentence; empty if nothing is, or nobody may look now.

    Its words stand one behind the other, each after its length (uint32). torch waits for the rest of a word for ever.
    """
    words, end = b"", 0
    with suppress(OSError), file.open("rb") as opened:  # it is not there yet, or a process writes
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        words = opened.read()
    while end < len(words):
        end += 4 + int.from_bytes(words[end : end + 4], "little")
    if end == len(words):
        return ""
    return (
        f"the rendezvous of a run must hold what its stages wrote, but {file} was damaged: it has {len(words)} bytes, "
        f"and its lengths say {end}; start the run again, and see that nothing else writes there"
    )


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
