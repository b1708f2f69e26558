"""`thinwire simulate`: the training of `thinwire train` in one process, with the same numbers, bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from thinwire.launch.recipe import recipe
from thinwire.launch.shared.exit_codes import OK, working
from thinwire.launch.shared.output import lasting

if TYPE_CHECKING:
    from thinwire.launch.plan.prepared import Prepared


@lasting()
def main(argv: Sequence[str]) -> int:
    """Simulate a recipe, and return the exit status."""
    from thinwire.launch.folder.policy import all_held, check_folders, check_unused, refuse_early

    wanted = recipe.parse(argv, "thinwire simulate", partial(refuse_early, suffix="-simulated"))
    wanted = replace(wanted, output=wanted.output or f"{wanted.folder}-simulated")
    check_unused(wanted)  # before a training is imported and the data is read
    from thinwire.launch.plan.training import prepare_training

    prepared = prepare_training(wanted, copies=1)  # all replicas share one copy of the weights
    check_folders(wanted)
    if wanted.data.outline is not None:
        print(f"data.outline, {wanted.data.outline}, is not read: this process has the data", file=sys.stderr)
    with all_held(wanted), working():
        simulate(replace(prepared, recipe=prepared.recipe.again))
        if wanted.debug.smoke:
            from thinwire.launch.run.smoke import check_export

            check_export(prepared.recipe)
    return OK


def simulate(prepared: Prepared) -> None:
    """Train all stages in this process, which must not have a default process group."""
    from thinwire.launch.plan.places import simulated_placement
    from thinwire.launch.run.run import Run
    from thinwire.launch.shared.interfaces import alone

    with alone():
        run = Run(prepared, simulated_placement(prepared.recipe))
        try:
            run.go()
        finally:
            run.assembly.discard_stores()
