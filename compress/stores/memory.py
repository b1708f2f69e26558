"""A store in memory: one buffer, of which the operating system provides only the pages that were written."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from thinwire.compress.stores.store import Loan, Store, StoreError, StoreLayout


class MemoryStore(Store):
    """Rows side by side in one buffer; a slot never written takes no memory."""

    def __init__(self, layout: StoreLayout) -> None:
        super().__init__(layout)
        try:
            # numpy asks for zeroed pages; torch.zeros would write the zeros, and so use all of the memory at once.
            buffer = np.zeros((layout.num_slots, layout.row_bytes), np.uint8)
        except (MemoryError, ValueError) as error:
            raise StoreError(
                f"a store of {layout.nbytes} bytes does not fit into memory; keep it on disk, or fewer bits a value"
            ) from error
        self._rows = torch.from_numpy(buffer)
        self._values = self._rows.view(torch.float32).view(-1, *layout.row_shape) if layout.bits == 32 else None

    def borrow(self, slots: Tensor) -> Loan:
        """Lend the rows themselves at 32 bits, those of consecutive slots as one part."""
        indices = self._check(slots)
        if self._values is None or not self._known.index_select(0, slots).all() or len(set(indices)) < len(indices):
            return super().borrow(slots)
        return Loan(slots, tuple(self._values[start:stop] for start, stop in _runs(indices)), live=True)

    def flush(self) -> None:
        """Nothing is ever on its way."""

    def drop_cache(self) -> None:
        """Memory is the medium."""

    def close(self) -> None:
        """Memory is given back with the store itself."""

    def _load(self, slots: list[int]) -> Tensor:
        return self._rows.index_select(0, torch.tensor(slots, dtype=torch.int64))

    def _capture(self, slots: list[int]) -> Iterator[Tensor]:
        return iter(self._load(slots))  # a copy: what memory holds changes with the next message

    def _release(self) -> None:
        """A snapshot has rows of its own."""

    def _put(self, slots: list[int], rows: Tensor) -> None:
        # One by one: torch's index_copy_ moves bytes singly, ten times as slowly.
        for slot, row in zip(slots, rows, strict=True):
            self._rows[slot] = row

    def _expect(self, slots: list[int]) -> None:
        """Every row is here already."""


def _runs(slots: list[int]) -> list[tuple[int, int]]:
    """The first of each run of consecutive `slots`, and the one after its last."""
    runs: list[tuple[int, int]] = []
    for slot in slots:
        if runs and runs[-1][1] == slot:
            runs[-1] = (runs[-1][0], slot + 1)
        else:
            runs.append((slot, slot + 1))
    return runs
