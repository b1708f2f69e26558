"""A disk under a test's control: what happens while its gates are closed did not wait for it."""

import threading
from collections import Counter

import torch

from support.codec_helpers import gaussian
from thinwire.compress.stores.slot_file import SlotFile
from thinwire.compress.stores.store import StoreLayout

LAYOUT = StoreLayout(num_slots=16, row_shape=(3, 5))
PATIENCE = 30  # seconds until a wait for something that must happen fails the test
BRIEFLY = 0.1  # seconds to see that something that must not happen does not


class GatedFile(SlotFile):
    """A file whose reads and writes can be held up, counted, and made to fail."""

    def __init__(self, path, nbytes):
        self.reads, self.writes = Counter(), Counter()  # begun, by slot
        self.may_read, self.may_write = threading.Event(), threading.Event()
        self.may_read.set()
        self.may_write.set()
        self.begun = threading.Condition()
        self.error = None
        self.largest_piece = nbytes
        super().__init__(path, nbytes)

    def pread(self, buffer, offset):
        self._begin(self.reads, offset, self.may_read)
        return super().pread(buffer[: self.largest_piece], offset)

    def pwrite(self, buffer, offset):
        self._begin(self.writes, offset, self.may_write)
        return super().pwrite(buffer[: self.largest_piece], offset)

    def wait_until(self, condition):
        """Wait for a condition on what has begun."""
        with self.begun:
            assert self.begun.wait_for(condition, PATIENCE), (self.reads, self.writes)

    def _begin(self, counter, offset, gate):
        with self.begun:
            counter[offset // LAYOUT.row_bytes] += 1
            self.begun.notify_all()
        assert gate.wait(PATIENCE)
        if self.error:
            raise self.error


def slots(*indices):
    return torch.tensor(indices, dtype=torch.int64)


def row(value):
    return torch.full((1, *LAYOUT.row_shape), float(value))


def rows(count):
    return gaussian(count, *LAYOUT.row_shape)


def stored_in(file, slot):
    """The value that every element of a slot has in the file itself."""
    content = file.path.read_bytes()[slot * LAYOUT.row_bytes :][: LAYOUT.row_bytes]
    (value,) = set(torch.frombuffer(bytearray(content), dtype=torch.float32).tolist())
    return value
