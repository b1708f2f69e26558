"""The replica of this process, if replicas may be lost: which one it is, its folder, its connection to the server."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from thinwire.errors.files import open_regular
from thinwire.launch.run import parent
from thinwire.launch.run.assembly import Prepared
from thinwire.launch.run.recipe import Recipe
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.replicas.membership.attendance import Attendance
from thinwire.pipeline.replicas.membership.messages import ANSWERED

SERVER_VARIABLE = "THINWIRE_MEMBERSHIP"
"""How a process reaches the membership server, and which start of its replica it is of; as JSON."""
REPLICA_VARIABLE = "THINWIRE_REPLICA"
"""The replica of a process that `thinwire train` starts."""
AGAIN_VARIABLE = "THINWIRE_AGAIN"
"""Set for a replica that is started again."""


def check_launcher(recipe: Recipe) -> None:
    """Raise OptionsError if replicas may be lost, and this process was not started by `thinwire train`."""
    if recipe.replicas.elastic and SERVER_VARIABLE not in os.environ:
        raise OptionsError(
            "replicas.membership elastic needs thinwire train, which starts each replica by itself again; torchrun "
            "and thinwire cluster start all processes again, so use membership fixed with them"
        )


def attend(recipe: Recipe) -> Attendance | None:
    """This process as a member of its run; None if replicas may not be lost."""
    if not recipe.replicas.elastic:
        return None
    from thinwire.pipeline.processes.zeromq.keys import Keys
    from thinwire.pipeline.replicas.membership.client import Client

    given, wire = json.loads(os.environ[SERVER_VARIABLE]), recipe.wire
    client = Client(given["place"], Keys.of(given["secret"].encode()), wire.heartbeat, wire.timeout, ANSWERED)
    return Attendance(client, given["replica"], int(os.environ["RANK"]), given["life"])


def of_replica(prepared: Prepared, replica: int) -> Prepared:
    """A run as one of its replicas has it: all but the first of a host write to folders of their own within the run."""
    recipe = prepared.recipe
    if replica == recipe.replicas.here[0]:
        return prepared
    folder = f"replica-{replica}"
    checkpoint = recipe.checkpoint
    if checkpoint.folder:
        checkpoint = replace(checkpoint, folder=str(Path(checkpoint.folder, folder)))
    own = replace(recipe, output=str(recipe.folder / folder), checkpoint=checkpoint)
    return replace(prepared, recipe=own)


def run_folder(recipe: Recipe) -> Path:
    """The folder of the whole run; `recipe` is that of the run as this process has it."""
    replica = int(os.environ.get(REPLICA_VARIABLE, recipe.replicas.here[0]))
    return recipe.folder if replica == recipe.replicas.here[0] else recipe.folder.parent


def beginning(recipe: Recipe) -> int:
    """How many runs begin together on this host: all replicas if they may be lost; else, or on a comeback, this one."""
    several = recipe.replicas.elastic and REPLICA_VARIABLE in os.environ and AGAIN_VARIABLE not in os.environ
    return len(recipe.replicas.here) if several else 1


def enter(prepared: Prepared, replica: int) -> Prepared:
    """Become a process of a replica: the run as it has it. What this process prints goes to its folder.

    The terminal shows the first replica of this host alone.
    """
    parent.name_process(f"thinwire {replica}/{os.environ['RANK']}")
    own = of_replica(prepared, replica)
    if own is not prepared:
        own.recipe.folder.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        descriptor = open_regular(own.recipe.folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.close(descriptor)
    return own
