"""A store's rows in checkpoints: each checkpoint has a file of the rows that changed, and a base has all older rows.

    base.slots      every slot at its own place, as in the store's own file; sparse
    step 500        the rows written until step 500
    step 1000       the rows written since

The store at step 1000 is the base, then the rows of step 500 over it, then the rows of step 1000. An older checkpoint
is folded into the base, row by row, in place. A fold may stop anywhere and be done again: a reader puts the same file
over the base, so a half-folded base gives the same rows.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from isal import isal_zlib
from torch import Tensor

from thinwire.compress.stores.durable import make_folder, sync
from thinwire.compress.stores.store import Snapshot, StoreError, StoreLayout
from thinwire.errors.files import open_regular, opened

_ROWS_AT_ONCE = 256


@dataclass(frozen=True, eq=False)
class SavedRows:
    """The rows of one checkpoint: a file with only the rows, one after the other."""

    path: Path
    slots: list[int]
    """The slot of each row, ascending."""

    @classmethod
    def open(cls, path: Path) -> SavedRows:
        """The rows of a file whose slots are beside it, int64, in a file with the suffix `.slots`."""
        with opened(path.with_suffix(".slots")) as file:
            return cls(path, np.fromfile(file, np.int64).tolist())

    @classmethod
    def write(cls, path: Path, snapshot: Snapshot, checksums: Tensor) -> tuple[SavedRows, str]:
        """Write a snapshot's rows, durable on return, and their CRC-32 into `checksums`, int64 [num_slots].

        The second result is the file's `digest`, taken without reading the file again.

        Raises StoreError if the disk refuses.
        """
        sums = []
        with _told(path, "write"), path.open("wb") as file:
            for slot, row in zip(snapshot.slots, snapshot.rows, strict=True):
                content = row.numpy().data
                sums.append(isal_zlib.crc32(content))
                checksums[slot] = sums[-1]
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return cls(path, snapshot.slots), _digest(sums)

    def digest(self) -> str:
        """The SHA-256 of the CRC-32 of all rows, in hex. Rows are many gigabytes, and SHA-256 of them costs most."""
        row_bytes = self.path.stat().st_size // max(1, len(self.slots))
        return _digest([isal_zlib.crc32(content) for _, content in self.read(row_bytes)])

    def read(self, row_bytes: int) -> Iterator[tuple[int, bytes]]:
        """Every row with its slot; StoreError if the file does not have the size of its rows."""
        with _told(self.path, "read"), opened(self.path) as file:
            size, wanted = os.fstat(file.fileno()).st_size, len(self.slots) * row_bytes
            if size != wanted:
                raise StoreError(f"{self.path} must hold {wanted} bytes, got {size}: the checkpoint is damaged")
            for slot in self.slots:
                yield slot, file.read(row_bytes)


def fold(base: Path, saved: SavedRows) -> None:
    """Put the rows of a checkpoint into the base, durable on return."""
    if not saved.slots:
        return
    with _told(base, "write"):
        make_folder(base.parent)
        with os.fdopen(open_regular(base, os.O_RDWR | os.O_CREAT), "r+b") as file:
            row_bytes = saved.path.stat().st_size // len(saved.slots)
            for slot, content in saved.read(row_bytes):
                os.pwrite(file.fileno(), content, slot * row_bytes)
            os.fsync(file.fileno())
        sync(base.parent)


def restored(
    layout: StoreLayout, known: Tensor, checksums: Tensor, base: Path, chain: Sequence[SavedRows]
) -> Iterator[tuple[list[int], Tensor]]:
    """The rows of all `known` slots in parts, for `Store.restore`.

    Args:
        layout: the store's.
        known: bool [num_slots].
        checksums: int64 [num_slots], the CRC-32 of every row.
        base: the rows of folded checkpoints; may not exist.
        chain: the rows of the later checkpoints, the oldest first.

    Raises:
        StoreError: a row is missing or damaged.
    """
    part: list[tuple[int, bytes]] = []
    for found in _newest_rows(known, checksums, base, chain, layout.row_bytes):
        part.append(found)
        if len(part) == _ROWS_AT_ONCE:
            yield _joined(part)
            part = []
    if part:
        yield _joined(part)


def check_earlier(known: Tensor, checksums: Tensor, base: Path, chain: Sequence[SavedRows], own: SavedRows) -> None:
    """Read every known row that is not among a checkpoint's `own`, and compare it with its checksum.

    Args: as for `restored`; the chain is without `own`, which is whole.

    Raises:
        StoreError: a row is missing or damaged.
    """
    earlier = known.clone()
    earlier[own.slots] = False
    row_bytes = _row_bytes(earlier, base, [own, *chain])
    deque(_newest_rows(earlier, checksums, base, chain, row_bytes), maxlen=0)


def _row_bytes(known: Tensor, base: Path, files: Sequence[SavedRows]) -> int:
    """The bytes of a row, by the size of a file of rows; else by that of the base, which ends with the last known row.

    0 where there is none.
    """
    for saved in files:
        if saved.slots:
            with _told(saved.path, "read"):
                return saved.path.stat().st_size // len(saved.slots)
    if not known.any():
        return 0
    with _told(base, "read"):
        return base.stat().st_size // (int(known.nonzero().max()) + 1)


def _newest_rows(
    known: Tensor, checksums: Tensor, base: Path, chain: Sequence[SavedRows], row_bytes: int
) -> Iterator[tuple[int, bytes]]:
    """Every known slot with its newest row, each compared with its checksum."""
    newest = {slot: saved for saved in chain for slot in saved.slots}
    for slot, saved in newest.items():
        if not 0 <= slot < len(known):
            raise StoreError(
                f"{saved.path} must hold rows of slots 0 to {len(known) - 1}, got {slot}: the checkpoint is damaged"
            )
    in_base = [slot for slot in known.nonzero().flatten().tolist() if slot not in newest]
    yield from _checked(_from_base(base, in_base, row_bytes), base, checksums)
    for saved in chain:
        wanted = {slot for slot in saved.slots if newest[slot] is saved and known[slot]}
        if wanted:  # of a file without any, damage does not matter
            rows = ((slot, row) for slot, row in saved.read(row_bytes) if slot in wanted)
            yield from _checked(rows, saved.path, checksums)


def _digest(sums: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(sums, "<u4").tobytes()).hexdigest()


def _from_base(base: Path, slots: Sequence[int], row_bytes: int) -> Iterator[tuple[int, bytes]]:
    if not slots:
        return
    if not base.exists():
        raise StoreError(f"the row of slot {slots[0]} is in no file: the checkpoint that had it was removed")
    with _told(base, "read"), opened(base) as file:
        for slot in slots:
            yield slot, os.pread(file.fileno(), row_bytes, slot * row_bytes)


def _checked(rows: Iterator[tuple[int, bytes]], path: Path, checksums: Tensor) -> Iterator[tuple[int, bytes]]:
    for slot, content in rows:
        if isal_zlib.crc32(content) != int(checksums[slot]):
            raise StoreError(f"{path} does not hold the row of slot {slot} as it was saved: the checkpoint is damaged")
        yield slot, content


def _joined(part: Sequence[tuple[int, bytes]]) -> tuple[list[int], Tensor]:
    content = bytearray(b"".join(row for _, row in part))
    return [slot for slot, _ in part], torch.frombuffer(content, dtype=torch.uint8).view(len(part), -1)


@contextmanager
def _told(path: Path, verb: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot {verb} {path}: {error.strerror}; check the disk of the checkpoints") from error
