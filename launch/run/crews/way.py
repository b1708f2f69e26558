"""The way of this process to others of its run, checked before a training is imported and the data are read."""

from __future__ import annotations

from thinwire.launch.run.crews.remote.settings import check_host
from thinwire.launch.run.recipe import Recipe
from thinwire.launch.shared.interfaces import check_interface
from thinwire.pipeline.backends import check_keys


def check_way(recipe: Recipe) -> None:
    """Raise OptionsError if the file of keys, the host of the meeting place or an interface cannot be used."""
    meeting = recipe.replicas.meeting
    # zmq takes addresses, too, and says so itself
    if recipe.wire.transport != "zmq" or recipe.group_processes == 1:
        check_interface()
    check_keys(recipe.wire, meets=meeting is not None)
    if meeting is not None:
        check_host(meeting)
