"""The transports: what carries the messages of a pipeline, by their names in `wire.transport`.

A name in `TransportName` and a row of `TRANSPORTS` add one. Over NCCL go frames from GPU to GPU alone (wire/nccl.py);
all else goes over gloo.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from thinwire.pipeline.errors import OptionsError

if TYPE_CHECKING:
    from thinwire.pipeline.options import WireOptions

KEYS_VARIABLE = "THINWIRE_KEYS"
"""The environment variable with the path of the keys that a launcher made for its run."""
TransportName = Literal["gloo", "zmq", "nccl", "auto"]


def _mesh(options: WireOptions) -> Any:
    """The settings of a mesh over ZeroMQ. OptionsError if there are no keys."""
    from thinwire.pipeline.processes.zeromq.group import MeshSettings, register
    from thinwire.pipeline.processes.zeromq.keys import Keys

    register()
    path = options.keys or os.environ.get(KEYS_VARIABLE)
    if path is None:
        raise OptionsError(
            "wire.keys must name a file of keys for wire.transport zmq; make one with thinwire keys FILE, and copy it "
            "to every machine of the run"
        )
    return MeshSettings(keys=Keys.read(Path(path)), connections=options.connections)


@dataclass(frozen=True, kw_only=True)
class Transport:
    """What `wire.transport` names."""

    backend: str = "gloo"
    """The process group of torch that carries messages."""
    options: Callable[[WireOptions], Any] | None = None
    """Registers that group, and makes its `pg_options`. Groups made later share the connections of the first."""
    encrypts: bool = False
    """Whether processes need keys: of a file in `wire.keys`, or of their launcher."""
    connections: int = 1
    """The most that two processes may have."""
    reads_interface: bool = False
    """Whether it reads GLOO_SOCKET_IFNAME itself, which may then be addresses, and must be set for several hosts."""
    over_gpus: bool = False
    """Whether frames may go from GPU to GPU."""


TRANSPORTS: Mapping[str, Transport] = MappingProxyType(
    {
        "gloo": Transport(),
        "zmq": Transport(backend="zmq", options=_mesh, encrypts=True, connections=64, reads_interface=True),
        "nccl": Transport(over_gpus=True),
        "auto": Transport(over_gpus=True),
    }
)


def names_of(fits: Callable[[Transport], bool]) -> str:
    """The names of the transports that fit, for a sentence."""
    return " or ".join(name for name, transport in TRANSPORTS.items() if fits(transport))


def group_arguments(options: WireOptions, size: int, *, beside: bool = False) -> dict[str, Any]:
    """`backend` and `pg_options` for `init_process_group` and `new_group`.

    Args:
        options: the options that name the transport.
        size: the number of processes in the group; a single process needs no transport.
        beside: whether there is a default group already. The new one shares its connections, if it has a mesh.

    Raises:
        OptionsError: there are no keys.
    """
    transport = TRANSPORTS[options.transport]
    if transport.options is None or size == 1:
        return {"backend": "gloo"}
    shared = arguments_beside() if beside else {}
    if shared.get("backend") == transport.backend:
        return shared
    return {"backend": transport.backend, "pg_options": transport.options(options)}


def arguments_beside() -> dict[str, Any]:
    """As `group_arguments`, for a group of some processes of the default one: it shares the connections of a mesh."""
    import torch.distributed as dist

    backend = dist.get_backend()
    meshes = {transport.backend for transport in TRANSPORTS.values() if transport.options is not None}
    return {"backend": backend, "pg_options": dist.group.WORLD} if backend in meshes else {"backend": "gloo"}


def check_keys(options: WireOptions) -> None:
    """Raise OptionsError if keys are needed from a file, and it holds none, or others may read it."""
    if options.keys is None or not TRANSPORTS[options.transport].encrypts:
        return
    from thinwire.pipeline.processes.zeromq.keys import Keys

    Keys.read(Path(options.keys))


def fresh_keys(options: WireOptions, folder: Path) -> dict[str, str]:
    """The environment variables with fresh keys, in a private folder, for the processes of a launcher.

    There are none if the transport needs no keys, or the options name a file of keys.
    """
    if not TRANSPORTS[options.transport].encrypts or options.keys is not None:
        return {}
    from thinwire.pipeline.processes.zeromq.keys import Keys

    Keys.fresh().write(folder / "keys")
    return {KEYS_VARIABLE: str(folder / "keys")}
