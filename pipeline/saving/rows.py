"""The rows of a store in checkpoints: a file of those that changed, and links to the files that have the others.

    step-00000500/stage-0/NAME.00000500.rows     the rows written until step 500
    step-00001000/stage-0/NAME.00000500.rows     the same file under another name, as long as it has a newest row
                          NAME.00001000.rows     the rows written since

A table, int64 [num_slots, 2], says for each slot which step's file has its newest row, and at which place there; -1
where there is none. So each checkpoint is whole, takes the room of what changed, and may be removed or copied alone.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from thinwire.compress.stores.durable import sync
from thinwire.compress.stores.store import Store
from thinwire.errors.files import opened
from thinwire.pipeline.errors import CheckpointError
from thinwire.pipeline.saving.checkpoint_folder import SavedStage, reading

ROWS = ".rows"
_AT_ONCE = 256


def file_of(store: str, step: int) -> str:
    """The name of the file with the rows of a store that a checkpoint wrote."""
    return f"{store}.{step:08d}{ROWS}"


def table_of(num_slots: int) -> Tensor:
    """The table of a store without rows."""
    return torch.full((num_slots, 2), -1)


def steps_in(table: Tensor) -> list[int]:
    """The steps whose files have the newest row of any slot, ascending."""
    steps: list[int] = table[:, 0].unique().tolist()
    return [step for step in steps if step >= 0]


def link(path: Path, name: Path) -> None:
    """Give a file another name, or where the disk knows no such names, make a copy. The caller syncs the folder."""
    try:
        os.link(path, name)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(path, name)
        sync(name)


def restore(saved: SavedStage, name: str, store: Store) -> Tensor:
    """Give a store the rows that a stage saved; the table of them. CheckpointError where a row is missing."""
    table = saved.tensors(f"stores/{name}/").get("rows")
    if table is None or table.shape != (store.layout.num_slots, 2):
        raise CheckpointError(f"{saved.path} holds no store {name} of {store.layout.num_slots} slots")
    with reading(saved.path):
        store.restore(table[:, 0] >= 0, read_rows(saved.path, name, table, store.layout.row_bytes))
    return table


def read_rows(part: Path, store: str, table: Tensor, row_bytes: int) -> Iterator[tuple[list[int], Tensor]]:
    """All rows of a store, for `Store.restore`. CheckpointError if a file has not the rows that the table names."""
    for step in steps_in(table):
        slots = (table[:, 0] == step).nonzero().flatten()
        with opened(path := part / file_of(store, step)) as file:
            count = os.fstat(file.fileno()).st_size // row_bytes
            if not bool(((table[slots, 1] >= 0) & (table[slots, 1] < count)).all()):
                raise CheckpointError(f"{path} has {count} rows, and not all that its checkpoint names: it is damaged")
            for some in slots.split(_AT_ONCE):
                places = table[some, 1].tolist()
                content = bytearray().join(os.pread(file.fileno(), row_bytes, place * row_bytes) for place in places)
                yield some.tolist(), torch.frombuffer(content, dtype=torch.uint8).view(len(places), row_bytes)
