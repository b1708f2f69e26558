"""Whether this host can reach the rest of its run, checked before torch is imported and the data are read."""

from __future__ import annotations

from thinwire.launch.run.recipe import Recipe
from thinwire.launch.shared.interfaces import check_interface
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.interfaces import found, parted
from thinwire.pipeline.processes.backends import check_installed, check_keys


def check_reach(recipe: Recipe) -> None:
    """Raise OptionsError if the file of keys, the host of the membership server or an interface cannot be used."""
    place = recipe.replicas.server
    # zmq takes addresses, too, and says so itself
    if recipe.wire.transport != "zmq" or recipe.group_processes == 1:
        check_interface()
    if recipe.replicas.elastic:
        check_installed()
    check_keys(recipe.wire, across_hosts=place is not None)
    if place is not None:
        try:
            found(place)
        except (OSError, ValueError) as error:
            said = error.strerror if isinstance(error, OSError) else error
            raise OptionsError(
                f"replicas.server must name a host that this one finds, got {parted(place)[0]}: {said}; give its "
                f"address"
            ) from error
