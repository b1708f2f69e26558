r"""`thinwire train`: start the stage processes of a recipe; if torchrun started this process, be one of them.

    thinwire train quickstart
    torchrun --nproc-per-node 4 -m thinwire.launch.train quickstart
    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr HOST --master-port 29500 \
        -m thinwire.launch.train quickstart

The launcher imports the libraries and reads the data once, then forks the stage processes. A stage must watch its
parent before it imports anything large, so most imports here are inside functions.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace

from thinwire.launch import cli
from thinwire.launch.shared.exit_codes import OK
from thinwire.launch.shared.output import lasting


@lasting()
def main(argv: Sequence[str]) -> int:
    """Train a recipe, and return the exit status."""
    # torch, imported later, logs each connection that it tries again, with a stack of C++; what ends a run is told here
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    if "RANK" in os.environ:
        from thinwire.launch.processes import stage

        return stage.main(argv)
    from thinwire.launch.processes import forks

    forks.use_one_thread()
    from thinwire.launch.folder.policy import all_held, check_folders, check_unused, mark, refuse_early
    from thinwire.launch.processes.reach import check_reach, check_transport
    from thinwire.launch.recipe import recipe

    wanted = recipe.parse(argv, before=refuse_early)
    check_unused(wanted)  # before a training is imported and the data is read
    check_reach(wanted)
    from thinwire.launch.plan.training import prepare_training
    from thinwire.launch.processes.launcher import launch
    from thinwire.launch.results.outputs import save_recipe

    prepared = prepare_training(wanted, copies=wanted.replicas.count)
    check_transport(wanted)
    check_folders(wanted)
    with all_held(wanted) as descriptors:
        if wanted.checkpoint.resume == "never":  # RECIPE may have been that of the run that is set aside
            mark(wanted.folder, uuid.uuid4().hex)
            save_recipe(wanted)
        launch(replace(prepared, recipe=prepared.recipe.again), argv, descriptors)
        if wanted.debug.smoke:
            from thinwire.launch.run.smoke import check_export

            check_export(prepared.recipe)
    return OK


if __name__ == "__main__":
    sys.exit(cli.run(main, sys.argv[1:]))
