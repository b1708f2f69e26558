"""A store in memory: one buffer, of which the operating system provides only the pages that were written."""

import numpy as np
import torch
from torch import Tensor

from thinwire.compress.store import Store, StoreError, StoreLayout


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

    def flush(self) -> None:
        """Nothing is ever on its way."""

    def drop_cache(self) -> None:
        """Memory is the medium."""

    def close(self) -> None:
        """Memory is given back with the store itself."""

    def _load(self, slots: list[int]) -> Tensor:
        return self._rows.index_select(0, torch.tensor(slots, dtype=torch.int64))

    def _put(self, slots: list[int], rows: Tensor) -> None:
        # One by one: torch's index_copy_ moves bytes singly, ten times as slowly.
        for slot, row in zip(slots, rows, strict=True):
            self._rows[slot] = row

    def _expect(self, slots: list[int]) -> None:
        """Every row is here already."""
