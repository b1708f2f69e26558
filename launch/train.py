"""`thinwire train`: start a process a group of stages here, or be one of them when torchrun started us.

    thinwire train quickstart
    torchrun --nproc-per-node 4 -m thinwire.launch.train quickstart
    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr HOST --master-port 29500 \\
        -m thinwire.launch.train quickstart
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from thinwire.launch import cli
from thinwire.launch.run import failures, recipe
from thinwire.launch.run.assembly import check_output, prepare, real_placement
from thinwire.launch.run.recipe import Recipe
from thinwire.launch.shared import scratch
from thinwire.launch.shared.exit_codes import OK, FailedError, StoppedError


def main(argv: Sequence[str]) -> int:
    """Train a recipe; the exit status."""
    wanted = recipe.parse(argv)
    prepared = prepare(wanted)
    check_output(wanted.folder)
    if "RANK" in os.environ:
        from thinwire.launch.run.worker import work

        return work(prepared)
    launch(wanted, argv)
    return OK


def launch(wanted: Recipe, arguments: Sequence[str]) -> None:
    """Start the stage processes on this machine, and wait until all have ended.

    Raises:
        FailedError: a process failed; the message tells which, and what the others were waiting for.
        StoppedError: a signal came.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # what elastic warns of, the lines of `failures.tell` say better; its modules set levels of their own
    for module in ("elastic", "elastic.agent.server.api", "launcher.api"):
        logging.getLogger(f"torch.distributed.{module}").setLevel(logging.CRITICAL)
    os.environ["OMP_NUM_THREADS"] = str(wanted.training.threads)
    came: list[str] = []

    def interrupted(number: int, frame: FrameType | None) -> None:
        # SIGTERM is what the processes get: at SIGINT those that still import would each print a traceback
        came.append("SIGINT")
        raise SignalException("interrupted", signal.SIGTERM)

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=wanted.pipeline.num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        local_addr="localhost",
        signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
    )
    before = signal.signal(signal.SIGINT, interrupted)
    with scratch.folder() as folder:
        os.environ[failures.FOLDER_VARIABLE] = folder
        try:
            elastic_launch(config, sys.executable)("-m", "thinwire.launch.train", *arguments)
        except ChildFailedError as error:
            exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            told = failures.tell(failures.read_reports(Path(folder)), exit_codes, real_placement(wanted).stages_of)
            raise FailedError(told) from error
        except SignalException as error:
            raise StoppedError(f"stopped by {came[0] if came else error.sigval.name}") from error
        finally:
            signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(cli.run(main, sys.argv[1:]))
