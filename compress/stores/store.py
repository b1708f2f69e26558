"""What a store is: it keeps one tensor a slot for feedback, in memory or on disk, with the same bits.

A slot is a position in the batch or a sample id. Both ends of a stateful channel keep a store. They write the same
values and must always read the same ones. So a row is rounded once, when it is written, and `write` returns the rounded
row. The medium (memory.py, disk.py) changes no byte.

    row of 32 or 16 bits   | values, row-major |
    row of 8 or 4 bits     | bf16 scales | codes |      the payload of q(8) or q(4) for the row alone
"""

from __future__ import annotations

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from thinwire.compress.codec import NO_KEY, Codec, tensor_bytes
from thinwire.compress.codecs.coding.bits import packed_size
from thinwire.compress.codecs.quantize import Quantize
from thinwire.compress.transfer import put
from thinwire.errors import ThinwireError

CPU = torch.device("cpu")
FORMATS: Mapping[int, torch.dtype | Codec] = MappingProxyType(
    {32: torch.float32, 16: torch.bfloat16, 8: Quantize(8), 4: Quantize(4)}
)
"""The format of a row, by its bits a value.

16 bits are bf16, for its range: a value beyond 65504 would be wrong in fp16, and stay wrong for the rest of the run.
"""


class StoreError(ThinwireError, RuntimeError):
    """A store cannot keep or give a row: no room, a lost file, a slot that does not exist."""


@dataclass(frozen=True, kw_only=True)
class StoreLayout:
    """The number and the form of a store's rows. Raises StoreError for rows that cannot be stored."""

    num_slots: int
    """Slots are numbered from 0 to `num_slots - 1`."""
    row_shape: tuple[int, ...]
    """The shape of one slot's tensor, without the dimension of the batch."""
    bits: int = 32
    """Bits a value: 32 (float32), 16 (bf16), 8 or 4 (q, a scale for each row or channel map of the tensor)."""

    def __post_init__(self) -> None:
        if self.bits not in FORMATS:
            raise StoreError(f"a store's bits a value must be one of {', '.join(map(str, FORMATS))}, got {self.bits}")
        if self.num_slots < 1 or min(self.row_shape, default=1) < 1:
            raise StoreError(
                f"a store needs at least one slot, and rows with at least one value, got num_slots={self.num_slots} "
                f"and row_shape={self.row_shape}"
            )

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one slot."""
        form = FORMATS[self.bits]
        if isinstance(form, torch.dtype):
            return prod(self.row_shape) * form.itemsize
        return form.nbytes(self._batch(1), torch.float32)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.row_bytes

    def encode(self, values: Tensor) -> Tensor:
        """The bytes of contiguous float32 `values` [R, *row_shape] as uint8 [R, row_bytes].

        Each row's bytes depend on that row alone. At 32 bits the result is a view of `values`.
        """
        form, count = FORMATS[self.bits], len(values)
        if isinstance(form, torch.dtype):
            return tensor_bytes(values.to(form)).view(count, self.row_bytes)
        rows = torch.empty(count, self.row_bytes, dtype=torch.uint8, device=values.device)
        batch = values.view(self._batch(count))
        if self._splits:
            payload = torch.empty(rows.numel(), dtype=torch.uint8, device=values.device)
            form.encode(batch, payload, NO_KEY)
            scales, codes = payload.tensor_split([count * self._scale_bytes])
            rows[:, : self._scale_bytes] = scales.view(count, self._scale_bytes)
            rows[:, self._scale_bytes :] = codes.view(count, self.row_bytes - self._scale_bytes)
        else:
            for index in range(count):
                form.encode(batch[index : index + 1], rows[index], NO_KEY)
        return rows

    def decode(self, rows: Tensor) -> Tensor:
        """The values in contiguous `rows` as float32 [R, *row_shape]; at 32 bits a view of `rows`."""
        form, count = FORMATS[self.bits], len(rows)
        if isinstance(form, torch.dtype):
            return rows.view(form).float().view(count, *self.row_shape)
        batch = torch.empty(self._batch(count), dtype=torch.float32, device=rows.device)
        if self._splits:
            parts = rows[:, : self._scale_bytes], rows[:, self._scale_bytes :]
            form.decode(torch.cat([part.reshape(-1) for part in parts]), batch, NO_KEY)
        else:
            for index in range(count):
                form.decode(rows[index], batch[index : index + 1], NO_KEY)
        return batch.view(count, *self.row_shape)

    def _batch(self, count: int) -> tuple[int, ...]:
        """The shape of `count` rows for a codec: at least two dimensions, so that no rows share a scale."""
        return (count, *(self.row_shape or (1,)))

    @cached_property
    def _scale_bytes(self) -> int:
        return self.row_bytes - packed_size(prod(self.row_shape), self.bits)

    @property
    def _splits(self) -> bool:
        """Whether the payload of many rows can be cut into payloads of one: no byte holds codes of two rows."""
        return prod(self.row_shape) * self.bits % 8 == 0


@dataclass(frozen=True, eq=False)
class Loan:
    """The rows of some slots: the borrower changes them in place, then gives them to `Store.keep`."""

    slots: Tensor
    """int64 [R]."""
    parts: tuple[Tensor, ...]
    """Contiguous float32 [r, *row_shape] each, R rows in all, in the order of the slots."""
    live: bool = False
    """Whether the parts are the store's own memory, so that a change needs no write."""

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """`rows` [R, ..] cut into views, like the parts."""
        return rows.split_with_sizes(self._sizes)

    @cached_property
    def _sizes(self) -> list[int]:
        return [part.shape[0] for part in self.parts]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The rows of a store at one moment that changed since the last snapshot."""

    slots: list[int]
    """The slots written since the last snapshot, ascending."""
    rows: Iterator[Tensor]
    """Their rows in this order, uint8 [row_bytes] each; can be read once, from any thread."""


class Store(ABC):
    """One tensor a slot, the same bytes in every medium.

    Slots are int64 [R] on the host, values floating-point [R, *row_shape] on the store's device. Threads may share a
    store, but must not use the same slot at the same time. Every method may raise StoreError.
    """

    def __init__(self, layout: StoreLayout, device: torch.device = CPU) -> None:
        self.layout, self.device = layout, device
        self._known = torch.zeros(layout.num_slots, dtype=torch.bool)
        self._unsaved = torch.zeros(layout.num_slots, dtype=torch.bool)

    def known(self, slots: Tensor) -> Tensor:
        """Which of `slots` were ever written, as bool [R]."""
        self._check(slots)
        return self._known.index_select(0, slots)

    def read(self, slots: Tensor) -> Tensor:
        """The rows of `slots` as new float32 [R, *row_shape]; zeros for slots that were never written."""
        known = self.known(slots)
        if known.all():
            return self.layout.decode(self._take(slots.tolist()))
        values = torch.zeros(len(slots), *self.layout.row_shape, dtype=torch.float32, device=self.device)
        if known.any():
            at = put(known.nonzero().flatten(), self.device)
            values[at] = self.layout.decode(self._take(slots[known].tolist()))
        return values

    def write(self, slots: Tensor, values: Tensor) -> Tensor:
        """Keep `values` [R, *row_shape], and return as float32 exactly what `read` will give.

        `values` are copied before this returns. At 32 bits the result is `values` itself if it is contiguous float32.
        Each slot may come once. In a row of 8 or 4 bits, NaN or infinity makes all values under the same scale not
        finite, and no others.
        """
        indices = self._check(slots)
        if len(set(indices)) < len(indices):
            raise StoreError(f"a write must name each slot once, got {indices}: a batch holds no sample twice")
        assert values.shape == (len(indices), *self.layout.row_shape), f"{tuple(values.shape)} is not {self.layout}"
        assert values.device.type == self.device.type, f"values on {values.device} for a store on {self.device}"
        values = values.detach().float().contiguous()
        rows = self.layout.encode(values)
        self._put(indices, rows)
        self._known[slots] = True
        self._unsaved[slots] = True
        return self.layout.decode(rows)

    def borrow(self, slots: Tensor) -> Loan:
        """The rows of `slots` like `read`, without a copy if possible.

        Change the rows only if you give them to `keep`; until then, no one else may use these slots.
        """
        return Loan(slots, (self.read(slots),))

    def keep(self, loan: Loan) -> None:
        """Write the changed rows of a loan, which may be on another device."""
        if loan.live:
            self._unsaved[loan.slots] = True
        else:
            (values,) = loan.parts
            self.write(loan.slots, values.to(self.device))

    def prefetch(self, slots: Tensor) -> None:
        """Prepare for a `read` of `slots` soon, in this order; skips slots that were never written. Does not wait."""
        self._check(slots)
        self._expect(slots[self._known[slots]].tolist())

    def digests(self) -> dict[int, str]:
        """The SHA-256, in hex, of the bytes of each slot that was written."""
        slots: list[int] = self._known.nonzero().flatten().tolist()
        return {slot: hashlib.sha256(self._load([slot]).cpu().numpy().data).hexdigest() for slot in slots}

    def state_dict(self) -> dict[str, Any]:
        """The store's content, for a store of the same layout in any medium: every written row; flushes first."""
        self.flush()
        rows = self._load(self._known.nonzero().flatten().tolist()).cpu()
        return {"layout": dataclasses.asdict(self.layout), "known": self._known.clone(), "rows": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the store's content by what `state_dict` returned."""
        layout = StoreLayout(**state["layout"])
        if layout != self.layout:
            raise StoreError(
                f"a store must have the layout of the saved one, {layout}, got {self.layout}; open it with the saved "
                f"settings"
            )
        self.restore(state["known"], [(state["known"].nonzero().flatten().tolist(), state["rows"])])
        self.unsave_all()

    def snapshot(self) -> Snapshot:
        """The rows written since the last snapshot, as they are now; later writes do not change it.

        There is one at a time: first read the last one to its end, or `unsave` it.
        """
        slots: list[int] = self._unsaved.nonzero().flatten().tolist()
        self._unsaved.zero_()
        return Snapshot(slots, self._capture(slots))

    def unsave(self, snapshot: Snapshot) -> None:
        """Give up a snapshot, read or not: the next one has its rows too."""
        self._release()
        self._unsaved[snapshot.slots] = True

    def unsave_all(self) -> None:
        """Have the next snapshot hold every row. No snapshot may be unread."""
        self._unsaved.copy_(self._known)

    def restore(self, known: Tensor, rows: Iterable[tuple[list[int], Tensor]]) -> None:
        """Replace the store's content by saved rows, which count as saved.

        Args:
            known: bool [num_slots], the slots that hold a row.
            rows: slots, and their bytes as uint8 [R, row_bytes], in parts; every known slot once.
        """
        for slots, part in rows:
            self._put(slots, part)
        self._known.copy_(known)
        self._unsaved.zero_()

    @abstractmethod
    def flush(self) -> None:
        """Wait until everything written is in the medium."""

    @abstractmethod
    def close(self) -> None:
        """Write what is pending, and close the medium; a second call does nothing."""

    def _check(self, slots: Tensor) -> list[int]:
        assert slots.dtype == torch.int64 and slots.dim() == 1, f"slots are int64 [R], got {slots.dtype}"
        indices: list[int] = slots.tolist()
        if outside := [slot for slot in indices if not 0 <= slot < self.layout.num_slots]:
            raise StoreError(f"a slot must be from 0 to {self.layout.num_slots - 1}, got {outside[0]}")
        return indices

    @abstractmethod
    def _load(self, slots: list[int]) -> Tensor:
        """The bytes of written `slots` as new uint8 [R, row_bytes]."""

    @abstractmethod
    def _put(self, slots: list[int], rows: Tensor) -> None:
        """Keep a copy of `rows`, uint8 [R, row_bytes]."""

    @abstractmethod
    def _capture(self, slots: list[int]) -> Iterator[Tensor]:
        """The rows of written `slots` as they are now, uint8 [row_bytes] each, in this order; may be read later."""

    @abstractmethod
    def _release(self) -> None:
        """Drop what is kept for a snapshot."""

    def _take(self, slots: list[int]) -> Tensor:
        """Like `_load`, and may use up what was prefetched."""
        return self._load(slots)

    @abstractmethod
    def _expect(self, slots: list[int]) -> None:
        """Prepare for a `_take` of written `slots`."""
