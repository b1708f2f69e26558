"""The process group that carries the messages of a pipeline: gloo's, or one over ZeroMQ.

Over NCCL go frames from GPU to GPU alone (devices/nccl.py); all else goes over gloo.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.options import WireOptions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

KEYS_VARIABLE = "THINWIRE_KEYS"
"""The environment variable with the path of the keys that a launcher made for its run."""


def group_arguments(options: WireOptions, size: int, beside: ProcessGroup | None = None) -> dict[str, Any]:
    """`backend` and `pg_options` for `init_process_group` and `new_group`.

    Args:
        options: the options that name the transport.
        size: the number of processes in the group; a single process needs no transport.
        beside: an existing process group of these processes; over ZeroMQ, the new group shares its connections.

    Raises:
        OptionsError: pyzmq is not installed, or there are no keys.
    """
    if options.transport != "zmq" or size == 1:
        return {"backend": "gloo"}
    check_installed()
    from thinwire.pipeline.processes.zeromq.group import BACKEND, Group, MeshSettings, register
    from thinwire.pipeline.processes.zeromq.keys import Keys

    register()
    if isinstance(beside, Group):
        return {"backend": BACKEND, "pg_options": beside}
    path = options.keys or os.environ.get(KEYS_VARIABLE)
    if path is None:
        raise OptionsError(
            "wire.keys must name a file of keys for wire.transport zmq; make one with thinwire keys FILE, and copy it "
            "to every machine of the run"
        )
    return {"backend": BACKEND, "pg_options": MeshSettings(keys=Keys.read(Path(path)), connections=options.connections)}


def check_installed() -> None:
    """Raise OptionsError if pyzmq is not installed."""
    try:
        import zmq  # noqa: F401
    except ModuleNotFoundError as error:
        raise OptionsError(
            "wire.transport zmq and its keys need pyzmq, which is not installed; run pip install pyzmq"
        ) from error


def check_keys(options: WireOptions) -> None:
    """Raise OptionsError if keys are needed from a file, and it holds none, or others may read it."""
    if options.keys is None or options.transport != "zmq":
        return
    check_installed()
    from thinwire.pipeline.processes.zeromq.keys import Keys

    Keys.read(Path(options.keys))


def fresh_keys(options: WireOptions, folder: Path) -> dict[str, str]:
    """The environment variables with fresh keys, in a private folder, for the processes of a launcher.

    There are none if the transport needs no keys, or the options name a file of keys. OptionsError if pyzmq is not
    installed.
    """
    if options.transport != "zmq" or options.keys is not None:
        return {}
    check_installed()
    from thinwire.pipeline.processes.zeromq.keys import Keys

    Keys.fresh().write(folder / "keys")
    return {KEYS_VARIABLE: str(folder / "keys")}
