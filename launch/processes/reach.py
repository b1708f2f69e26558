"""Whether the processes of a run can reach each other, checked before any is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinwire.launch.recipe.recipe import Recipe


def check_reach(wanted: Recipe) -> None:
    """Raise OptionsError if the file of keys or an interface cannot be used."""
    from thinwire.launch.shared.interfaces import check_interface
    from thinwire.pipeline.processes.backends import TRANSPORTS, check_keys

    if wanted.num_processes == 1 or not TRANSPORTS[wanted.wire.transport].reads_interface:
        check_interface()
    check_keys(wanted.wire)


def check_transport(wanted: Recipe) -> None:
    """Raise OptionsError if wire.transport nccl cannot be among the processes that will be started here."""
    if wanted.wire.transport != "nccl":
        return
    from thinwire.launch.plan.places import real_placement
    from thinwire.pipeline.devices.device import num_gpus
    from thinwire.pipeline.devices.transports import carrying, placed

    found = placed(wanted.num_processes, [num_gpus()], wanted.training.device)
    for pair in real_placement(wanted).neighbours:
        carrying(wanted.wire.transport, pair, found)
