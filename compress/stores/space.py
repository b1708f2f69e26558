"""Whether disks have room for the stores of all processes that share them.

Each process says what its own stores need (`space_needs`). One process gets all needs and checks the sums.
"""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinwire.compress.stores.store import StoreError, StoreLayout


@dataclass(frozen=True)
class SpaceNeed:
    """The space that the stores of one process still need on one file system."""

    disk: tuple[str, int]
    """The machine, and the number of the file system: the same in all processes that share it."""
    folder: str
    """The folder of the first store."""
    nbytes: int
    free: int
    """Free bytes on the file system."""

    def to_json(self) -> dict[str, Any]:
        """This need as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SpaceNeed:
        """The need that `to_json` described."""
        machine, device = value["disk"]
        return cls((machine, device), value["folder"], value["nbytes"], value["free"])


def space_needs(stores: Iterable[tuple[StoreLayout, Path]]) -> list[SpaceNeed]:
    """The space these stores still need until they are full, one entry a file system."""
    machine = _machine()
    needed: defaultdict[int, int] = defaultdict(int)
    first: dict[int, tuple[Path, Path]] = {}
    for layout, path in stores:
        place = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        device = place.stat().st_dev
        taken = path.stat().st_blocks * 512 if path.exists() else 0
        needed[device] += max(0, layout.nbytes - taken)
        first.setdefault(device, (path.parent, place))
    return [
        SpaceNeed((machine, device), str(folder), needed[device], _free(place))
        for device, (folder, place) in first.items()
    ]


def check_space(processes: Iterable[Sequence[SpaceNeed]]) -> None:
    """Raise one StoreError unless every file system has room for the full stores of all processes.

    Call it before training: the files are almost empty then, and the disk would run full much later.
    """
    by_disk: defaultdict[tuple[str, int], list[SpaceNeed]] = defaultdict(list)
    for needs in processes:
        for need in needs:
            by_disk[need.disk].append(need)
    short = [sentence for needs in by_disk.values() if (sentence := _shortage(needs))]
    if short:
        raise StoreError(
            f"disks must have room for all stores before training: {'; '.join(short)}; free some space, name a folder "
            f"on a larger disk as compression.store_folder, or keep fewer bits a value with store_bits"
        )


def in_words(nbytes: int) -> str:
    """A size, rounded and exact."""
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    unit, scale = next((pair for pair in units if nbytes >= pair[1]), units[-1])
    return f"{nbytes / scale:.3g} {unit} ({nbytes} bytes)"


def _shortage(needs: Sequence[SpaceNeed]) -> str | None:
    """The sentence for one file system that lacks room, given the needs of all processes; None if it has room."""
    needed, free = sum(need.nbytes for need in needs), min(need.free for need in needs)
    if needed <= free:
        return None
    processes = f"{len(needs)} processes" if len(needs) > 1 else "1 process"
    folders = ", ".join(dict.fromkeys(need.folder for need in needs))
    room = f"will take {in_words(needed)} more, but the disk has {in_words(free)} free"
    return f"those of {processes} in {folders} {room}"


def _machine() -> str:
    """A name that is the same in all processes of this machine, in containers too."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def _free(place: Path) -> int:
    system = os.statvfs(place)
    return system.f_bavail * system.f_frsize
