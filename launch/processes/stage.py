"""A stage process that is an interpreter of its own: torchrun has started it, or a launcher that must not fork.

    torchrun --nproc-per-node 4 -m thinwire.launch.train quickstart

It must watch its parent before it imports anything large, so most imports here are inside functions.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from thinwire.launch.processes import heartbeat, parent
from thinwire.launch.shared import variables
from thinwire.launch.shared.doing import Doing
from thinwire.launch.shared.rank import check_rendezvous, is_spread, own_rank


def main(argv: Sequence[str]) -> int:
    """Be a stage of a recipe, and return the exit status."""
    parent.end_with_parent()
    rank = own_rank()
    assert rank is not None, "a stage is started with RANK"
    from thinwire.launch.processes.reach import check_reach
    from thinwire.launch.recipe import recipe

    wanted = recipe.parse(argv)
    if variables.LAUNCHER not in os.environ:  # no launcher of ours reads this process's heartbeat
        check_rendezvous()
        heartbeat.begin_watcher(wanted.wire.heartbeat, wanted.wire.timeout)
    beating = heartbeat.begin()
    check_reach(wanted)
    from thinwire.launch.folder.policy import check_folders
    from thinwire.launch.plan.places import real_placement
    from thinwire.launch.plan.training import prepare_training
    from thinwire.launch.processes.worker import work

    beating.doing = lambda: Doing.READING
    # other machines may hold most of the stages
    copies, stages = 0 if is_spread(rank) else wanted.replicas.count, real_placement(wanted, rank).stages_of(rank)
    prepared = prepare_training(wanted, copies=copies, stages=stages)
    check_folders(wanted)
    return work(prepared, beating)
