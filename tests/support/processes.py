"""The one way tests start processes: gloo over loopback, results by rank, a time-out, and nothing left behind."""

import multiprocessing
import os
import pickle
import tempfile
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from support import no_sync  # noqa: F401 - it acts when it is imported

TESTS = str(Path(__file__).parents[1])
MARK = "THINWIRE_TEST_MARK"
"""The variable by which the processes of a command are found; forks overwrite its value where it lies."""
os.environ.setdefault(MARK, "0" * 32)

# one clean process imports torch once, and every test process is a fork of it
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch.distributed.pipelining",
        "torch.distributed.launcher.api",
        "thinwire.launch.processes.worker",
        "thinwire.models.architectures.library",
        "transformers.models.gpt2.modeling_gpt2",
        "matplotlib.figure",
        "pytest",
        "support.preloaded",
    ]
)


def begin(target, *args, daemon=False):
    """Start `target(*args)` in a fork; the `multiprocessing.Process`."""
    path = os.pathsep.join(filter(None, (TESTS, os.environ.get("PYTHONPATH"))))
    with patch.dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=path):  # the forked process must have one thread
        forkserver.ensure_running()
    process = _context.Process(target=target, args=args, daemon=daemon)
    process.start()
    return process


def run(target, world_size, *args, timeout=120):
    """Call `target(rank, *args)` on `world_size` processes of one group; the results in rank order.

    Raises AssertionError with the traceback of every process that failed, or naming the first that says nothing in time
    """
    outcomes = outcomes_of(target, world_size, *args, timeout=timeout)
    failed = [f"rank {rank}:\n{value}" for rank, (ok, value) in sorted(outcomes.items()) if not ok]
    assert not failed, "\n".join(failed)
    return [outcomes[rank][1] for rank in range(world_size)]


def outcomes_of(target, world_size, *args, timeout=120):
    """As `run`, but rank -> (whether it returned, its value or its traceback); killed processes are missing."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [_context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            begin(_main, target, rank, world_size, folder, sender, args, daemon=True)
            for rank, (_, sender) in enumerate(pipes)
        ]
        for _, sender in pipes:
            sender.close()
        outcomes = {}
        try:
            for rank, (receiver, _) in enumerate(pipes):
                assert receiver.poll(timeout), f"rank {rank} said nothing within {timeout} s"
                try:
                    outcomes[rank] = pickle.loads(receiver.recv_bytes())
                except EOFError:
                    continue
        finally:
            for process in processes:
                process.kill()
                process.join()
    return outcomes


def left_by_the_first(rank):
    """Process 0 ends here without a word, once the other is connected to it: before, gloo would not connect them."""
    store = dist.distributed_c10d._get_default_store()
    if rank:
        store.set("connected", "")
    else:
        store.wait(["connected"])
        os._exit(0)


def _main(target, rank, world_size, folder, sender, args):
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{Path(folder, 'store')}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        outcome = (True, target(rank, *args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    # multiprocessing's own pickler would share tensors' memory, which ends with this process
    sender.send_bytes(pickle.dumps(outcome))
    with suppress(RuntimeError):  # a peer may be gone by intention
        dist.barrier()
