"""How the processes of a group find each other: through the rendezvous store, which a stranger may control.

The store holds addresses and no keys. A wrong address leads to a program without the keys, which gets no data, or to
another process of the run, which refuses the connection.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import zmq

from thinwire.pipeline.errors import MismatchError, OptionsError, WireError
from thinwire.pipeline.interfaces import interface_addresses, is_address, parted
from thinwire.pipeline.options import WireOptions
from thinwire.pipeline.processes import posts
from thinwire.pipeline.processes.backends import KEYS_VARIABLE
from thinwire.pipeline.processes.transport import reaching
from thinwire.pipeline.processes.zeromq.connections import Patience
from thinwire.pipeline.processes.zeromq.group import BACKEND, Group
from thinwire.pipeline.processes.zeromq.keys import Keys
from thinwire.pipeline.processes.zeromq.mesh import Address, Mesh


@dataclass(frozen=True, kw_only=True)
class MeshSettings:
    """The settings of a group's mesh: `pg_options` of torch."""

    keys: Keys
    connections: int = 1
    patience: Patience | None = None


def arguments(options: WireOptions, beside: dist.ProcessGroup | None) -> dict[str, Any]:
    """The `pg_options` for `init_process_group` and `new_group`; see `backends.group_arguments`."""
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


def register() -> None:
    """Make `zmq` a backend of torch.distributed, once. Its `pg_options` are MeshSettings, or a Group to share with."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, given: MeshSettings | Group) -> Group:
    """This process's part of a new group; `options` are torch's description of the group."""
    if isinstance(given, Group):
        return Group(given.mesh, options.global_ranks_in_group, options.group_id, options.timeout)
    interface = _interface()
    try:
        mesh = Mesh(
            options.group_rank,
            given.keys,
            interface=interface,
            connections=given.connections,
            patience=given.patience,
        )
    except zmq.ZMQError as error:
        raise OptionsError(
            f"GLOO_SOCKET_IFNAME must name a network interface of this machine with an address, got {interface}: "
            f"{error.strerror}"
        ) from error
    mesh.add_addresses(_addresses(options.store, mesh, given.keys, options.group_size, options.timeout))
    return Group(mesh, range(options.group_size), options.group_id, options.timeout)


def _interface() -> str:
    """The address to listen on: the first of the interface named for gloo, or loopback."""
    asked = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return interface_addresses().get(asked, [asked or "127.0.0.1"])[0]


def _addresses(store: dist.Store, mesh: Mesh, keys: Keys, count: int, wait: timedelta) -> Mapping[int, Address]:
    """Publish the address of this process, and give the addresses of all, by rank."""
    mine = {
        "endpoint": mesh.address.endpoint,
        "life": mesh.address.life.hex(),
        "keys": keys.fingerprint,
    }
    store.set(str(mesh.rank), posts.written(mine))
    others = [rank for rank in range(count) if rank != mesh.rank]
    with reaching(
        f"process {mesh.rank} was waiting for all {count} processes to say where they listen; each must have "
        f"wire.transport zmq"
    ):
        store.wait([str(rank) for rank in others], wait)
    return {rank: _read(store.get(str(rank)), rank, keys) for rank in others}


def _read(text: bytes, rank: int, keys: Keys) -> Address:
    """The address that a process published. WireError if it is not one, MismatchError if the process has other keys."""
    told = posts.read(text, must := f"process {rank} must send its address")
    try:
        address = Address(str(told["endpoint"]), bytes.fromhex(told["life"]))
        fingerprint = str(told["keys"])
    except (ValueError, TypeError, KeyError) as error:
        raise WireError(f"{must}, and sent something else: {error}") from error
    if not _is_endpoint(address.endpoint) or len(address.life) != 16:
        raise WireError(f"{must}, and sent {address.endpoint[:80]!r}")
    if fingerprint != keys.fingerprint:
        raise MismatchError(f"process {rank} has other keys; give every process the same file as wire.keys")
    return address


def _is_endpoint(text: str) -> bool:
    """Whether a socket can connect there: to an address and a port."""
    with suppress(ValueError):
        return text.startswith("tcp://") and is_address(parted(text.removeprefix("tcp://"))[0])
    return False
