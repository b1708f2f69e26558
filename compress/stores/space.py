"""Whether disks have room for what all processes that share them will keep there: stores, weights, checkpoints.

Each process says what its own files need (`needs_of`). One process gets all needs and checks the sums.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage

from thinwire.compress.stores.store import StoreError, StoreLayout


@dataclass(frozen=True)
class SpaceNeed:
    """The space that files of one process still need on one file system."""

    disk: str
    """The machine, and the number of the file system: the same in all processes that share it."""
    folder: str
    """The folder of the first file."""
    nbytes: int
    free: int
    """Free bytes on the file system."""
    what: str = "stores"
    """What they are: a key of `ADVICE`."""


ADVICE = {
    "stores": "name a folder on a larger disk as compression.store_folder, or keep fewer bits a value with store_bits",
    "weights": "name an --output on a larger disk (of a study, a --folder)",
    "checkpoints": "name a folder on a larger disk as checkpoint.folder, or keep fewer with checkpoint.keep",
}
"""What to change beside freeing space, by what lacks it."""


def by_medium(stores: Iterable[tuple[StoreLayout, Path | None]]) -> dict[str, int]:
    """The bytes of full stores, in memory and on disk."""
    taken = {"memory": 0, "disk": 0}
    for layout, path in stores:
        taken["memory" if path is None else "disk"] += layout.nbytes
    return taken


def needs_of(what: str, files: Iterable[tuple[int, Path]]) -> list[SpaceNeed]:
    """The space that files still need until they have so many bytes, one entry a file system."""
    machine = _machine()
    needed: defaultdict[int, int] = defaultdict(int)
    first: dict[int, tuple[Path, Path]] = {}
    for nbytes, path in files:
        place = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        device = place.stat().st_dev
        taken = path.stat().st_blocks * 512 if path.is_file() else 0
        needed[device] += max(0, nbytes - taken)
        first.setdefault(device, (path.parent, place))
    return [
        SpaceNeed(f"{machine} {device}", str(folder), needed[device], disk_usage(place).free, what)
        for device, (folder, place) in first.items()
    ]


def check_space(processes: Iterable[Sequence[SpaceNeed]]) -> None:
    """Raise one StoreError unless every file system has room for all that the processes will keep.

    Call it before training: the files are almost empty then, and the disk would run full much later.
    """
    by_disk: defaultdict[str, list[tuple[int, SpaceNeed]]] = defaultdict(list)
    for process, needs in enumerate(processes):
        for need in needs:
            by_disk[need.disk].append((process, need))
    short = [(needs, said) for needs in by_disk.values() if (said := _shortage(needs))]
    if short:
        advice = dict.fromkeys(ADVICE[need.what] for needs, _ in short for _, need in needs)
        raise StoreError(
            f"disks must have room before training for all that a run keeps: "
            f"{'; '.join(sentence for _, sentence in short)}; free some space, {', or '.join(advice)}"
        )


def in_words(nbytes: int) -> str:
    """A size, rounded and exact."""
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    unit, scale = next((pair for pair in units if nbytes >= pair[1]), units[-1])
    return f"{nbytes / scale:.3g} {unit} ({nbytes} bytes)"


def _shortage(needs: Sequence[tuple[int, SpaceNeed]]) -> str | None:
    """The sentence for one file system that lacks room, given the needs of processes; None if it has room."""
    needed, free = sum(need.nbytes for _, need in needs), min(need.free for _, need in needs)
    if needed <= free:
        return None
    count = len({process for process, _ in needs})
    processes = f"{count} processes" if count > 1 else "1 process"
    kinds = " and ".join(dict.fromkeys(need.what for _, need in needs))
    folders = ", ".join(dict.fromkeys(need.folder for _, need in needs))
    room = f"will take {in_words(needed)} more, but the disk has {in_words(free)} free"
    return f"the {kinds} of {processes} in {folders} {room}"


def _machine() -> str:
    """A name that is the same in all processes of this machine, in containers too."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()
