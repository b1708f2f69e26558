"""A store in memory: one buffer. Of the host's memory, the system provides only the pages that were written."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from thinwire.compress.stores.store import CPU, Loan, Store, StoreError, StoreLayout
from thinwire.compress.transfer import put


class MemoryStore(Store):
    """Rows in one buffer of the host, where a slot that was never written takes no memory, or of a GPU."""

    def __init__(self, layout: StoreLayout, device: torch.device = CPU) -> None:
        super().__init__(layout, device)
        shape = layout.num_slots, layout.row_bytes
        try:
            # numpy asks for zeroed pages; torch.zeros would write zeros, and use all of the memory at once.
            self._rows = (
                torch.from_numpy(np.zeros(shape, np.uint8))
                if device.type == "cpu"
                else torch.zeros(shape, dtype=torch.uint8, device=device)
            )
        except (MemoryError, ValueError, torch.OutOfMemoryError) as error:
            raise StoreError(
                f"a store of {layout.nbytes} bytes does not fit into memory; keep it on disk, or lower store_bits"
            ) from error
        self._values = self._rows.view(torch.float32).view(-1, *layout.row_shape) if layout.bits == 32 else None

    def borrow(self, slots: Tensor) -> Loan:
        """Lend the rows themselves at 32 bits, consecutive slots as one part."""
        indices = self._check(slots)
        if self._values is None or not self._known.index_select(0, slots).all() or len(set(indices)) < len(indices):
            return super().borrow(slots)
        return Loan(slots, tuple(self._values[start:stop] for start, stop in _runs(indices)), live=True)

    def flush(self) -> None:
        """Do nothing: every write is done at once."""

    def close(self) -> None:
        """Do nothing: memory is freed with the store."""

    def _load(self, slots: list[int]) -> Tensor:
        return self._rows.index_select(0, put(torch.tensor(slots, dtype=torch.int64), self.device))

    def _capture(self, slots: list[int]) -> Iterator[Tensor]:
        return iter(self._load(slots).cpu())  # a copy: the next message changes the memory

    def _release(self) -> None:
        """Do nothing: a snapshot has its own copy."""

    def _put(self, slots: list[int], rows: Tensor) -> None:
        # Row by row: torch's index_copy_ moves single bytes, ten times slower.
        for slot, row in zip(slots, rows, strict=True):
            self._rows[slot] = row

    def _expect(self, slots: list[int]) -> None:
        """Do nothing: every row is in memory."""


def _runs(slots: list[int]) -> list[tuple[int, int]]:
    """The first slot of each run of consecutive `slots`, and the one after its last."""
    runs: list[tuple[int, int]] = []
    for slot in slots:
        if runs and runs[-1][1] == slot:
            runs[-1] = (runs[-1][0], slot + 1)
        else:
            runs.append((slot, slot + 1))
    return runs
