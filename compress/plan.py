"""The plan of one message. Both ends make the same one before a byte is sent, and follow it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from thinwire.compress.codec import Codec
from thinwire.compress.codecs.cast import Uncompressed
from thinwire.compress.microbatch import Microbatch
from thinwire.compress.stores.store import Store
from thinwire.compress.transfer import put


@dataclass(frozen=True, eq=False)
class Rows:
    """Which rows of a message go in full, or nearly so; the others go through the codec."""

    full: Tensor
    """bool [R]."""
    num_full: int
    """Rows sent in full."""

    @cached_property
    def num_coded(self) -> int:
        """Rows sent through the codec."""
        return self.full.shape[0] - self.num_full

    @cached_property
    def full_at(self) -> Tensor:
        """The places of the rows in full, int64, on the host."""
        return self.full.nonzero().view(-1)

    @cached_property
    def coded_at(self) -> Tensor:
        """The places of the other rows, int64, on the host."""
        return (~self.full).nonzero().view(-1)

    def in_full(self, rows: Tensor) -> Tensor:
        """The rows of `rows` [R, ..] that go in full."""
        return rows.index_select(0, put(self.full_at, rows.device)) if self.num_coded else rows

    def coded(self, rows: Tensor) -> Tensor:
        """The rows of `rows` [R, ..] that go through the codec."""
        return rows.index_select(0, put(self.coded_at, rows.device)) if self.num_full else rows


@dataclass(frozen=True, eq=False)
class MessagePlan:
    """What happens to one tensor of one micro-batch.

    payload = | payload of the full rows as one tensor, of `opening` | codec's payload of the other rows as one tensor |
    """

    rows: Rows
    """Which rows go in full."""
    opening: Codec
    """The codec of the rows in full: `none`, or for first visits what feedback names."""
    full_bytes: int
    """Bytes of the rows in full, at the start of the payload."""
    nbytes: int
    """Bytes of the whole payload."""
    slots: Tensor
    """Each row's slot in the store, int64 [R]; empty without a store."""
    store: Store | None
    """The buffers of the coded rows; None if the codec needs none."""
    writes: bool
    """Whether the buffers are updated."""
    shared: Tensor | None
    """A tensor for the codec that both ends hold already."""
    learns: bool
    """Whether a codebook is updated."""
    row: tuple[int, ...]
    """The shape of a row as it crosses."""
    remembered: Microbatch | None
    """The micro-batch, if later messages need something of this one."""

    @cached_property
    def recurs(self) -> bool:
        """Whether a message leaves nothing behind: then every micro-batch of its kind and length has this plan."""
        return self.store is None and self.remembered is None and not self.learns

    @property
    def is_exact(self) -> bool:
        """Whether the rows in full go uncompressed."""
        return isinstance(self.opening, Uncompressed)

    def coded(self, payload: Tensor) -> Tensor:
        """The codec's part of a payload."""
        return payload[self.full_bytes :] if self.full_bytes else payload

    def crossing(self, tensor: Tensor) -> Tensor:
        """What crosses of a tensor [R, ..]: the first elements of each row."""
        return tensor if tensor.shape[1:] == self.row else tensor[:, : self.row[0]].contiguous()
