"""The rank of this process, as torchrun and the launcher of `thinwire train` give it in the environment.

Clusters and shells set the same variables for programs of their own. So only `thinwire train` and the processes of a
bench read them; what runs in one process ignores them.
"""

from __future__ import annotations

import os

from thinwire.pipeline.errors import OptionsError

_BESIDE = {"WORLD_SIZE": None, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
"""The variables beside RANK, with what counts where one is not set; None where it must be."""


def own_rank() -> int | None:
    """The rank of this process; None if nobody has given it one, as for a launcher.

    Raises:
        OptionsError: a variable is no whole number, or RANK is beyond WORLD_SIZE.
    """
    if "RANK" not in os.environ:
        return None
    told = {"RANK": os.environ["RANK"]} | {name: os.environ.get(name, usual) for name, usual in _BESIDE.items()}
    cure = "start the processes with torchrun or thinwire train, or unset RANK"
    mistakes = [
        f"{name} must be a whole number where RANK is set, got {_shown(value)}; {cure}"
        for name, value in told.items()
        if value is None or not (value.isascii() and value.isdecimal())
    ]
    if mistakes:
        raise OptionsError(mistakes)
    rank, count = int(told["RANK"] or 0), int(told["WORLD_SIZE"] or 0)
    OptionsError.require((rank < count, f"RANK must be below WORLD_SIZE, got {rank} of {count}; {cure}"))
    return rank


def check_rendezvous() -> None:
    """Raise OptionsError if a process with a rank does not know where the others of its run connect."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    cure = "start the processes with torchrun or thinwire train, or set it to the value of process 0 on every machine"
    number = int(port) if port is not None and port.isascii() and port.isdecimal() else 0
    OptionsError.require(
        (bool(address), f"MASTER_ADDR must be an address where RANK is set, got {_shown(address)}; {cure}"),
        (0 < number < 1 << 16, f"MASTER_PORT must be a port where RANK is set, got {_shown(port)}; {cure}"),
    )


def own_local_rank() -> int:
    """The number of this process among those of its host, for one to which `own_rank` gives a rank."""
    return int(os.environ.get("LOCAL_RANK", _BESIDE["LOCAL_RANK"] or ""))


def processes_here(rank: int) -> range:
    """The ranks of the processes on the host of this rank, which is that of this process."""
    first = rank - own_local_rank()
    return range(first, first + processes_of_host())


def processes_of_host() -> int:
    """How many processes of the run are on this host; 1 where nobody has set it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", _BESIDE["LOCAL_WORLD_SIZE"] or ""))


def is_spread(rank: int | None) -> bool:
    """Whether processes of the run of this rank are on other hosts too. A launcher has no rank, and knows of none."""
    return rank is not None and processes_of_host() != int(os.environ["WORLD_SIZE"])


def _shown(value: str | None) -> str:
    return "nothing" if value is None else repr(value[:60])
