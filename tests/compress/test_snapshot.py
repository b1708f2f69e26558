"""Snapshots of stores."""

import threading
from contextlib import closing

import pytest
import torch

from support.codec_helpers import assert_identical
from support.slow_disk import LAYOUT, PATIENCE, GatedFile, row, rows, slots
from thinwire.compress.stores.disk import DiskStore
from thinwire.compress.stores.memory import MemoryStore


@pytest.fixture(params=["memory", "disk"])
def store(request, tmp_path):
    made = MemoryStore(LAYOUT) if request.param == "memory" else DiskStore(LAYOUT, tmp_path / "live.slots")
    yield made
    made.close()


def test_a_snapshot_is_of_its_moment_and_holds_what_changed(store):
    store.write(slots(1, 2, 3), rows(3))
    assert len(list(store.snapshot().rows)) == 3
    assert list(store.snapshot().rows) == [], "nothing changed since"
    store.write(slots(2), row(7))
    loan = store.borrow(slots(3))
    loan.parts[0].fill_(8)
    store.keep(loan)
    snapshot = store.snapshot()
    store.write(slots(2, 3, 4), rows(3))
    assert snapshot.slots == [2, 3]
    first, second = snapshot.rows
    assert_identical(LAYOUT.decode(first[None]), row(7))
    assert_identical(LAYOUT.decode(second[None]), row(8))


def test_the_snapshot_after_a_state_is_loaded_holds_every_row(store):
    store.write(slots(1, 3), rows(2))
    state = store.state_dict()
    assert len(list(store.snapshot().rows)) == 2
    store.load_state_dict(state)
    assert store.snapshot().slots == [1, 3]


def test_a_snapshot_that_is_given_up_comes_back_with_the_next(store):
    store.write(slots(1), row(1))
    given_up = store.snapshot()
    store.write(slots(2), row(2))
    store.unsave(given_up)
    again = store.snapshot()
    assert again.slots == [1, 2]
    assert_identical(LAYOUT.decode(torch.stack(list(again.rows))), torch.cat([row(1), row(2)]))


def test_the_writer_saves_a_row_that_a_snapshot_wants_before_it_puts_another_in_its_place(tmp_path):
    with closing(DiskStore(LAYOUT, tmp_path / "rows", open_file=GatedFile)) as store:
        store.write(slots(5, 6), torch.cat([row(5), row(6)]))
        store.flush()
        snapshot = store.snapshot()
        store.write(slots(5), row(50))
        store.flush()  # the newer row is in the file before the snapshot is read
        assert_identical(LAYOUT.decode(torch.stack(list(snapshot.rows))), torch.cat([row(5), row(6)]))
        assert_identical(store.read(slots(5)), row(50))


def test_a_snapshot_of_rows_on_their_way_does_not_wait_for_the_disk(tmp_path):
    store = DiskStore(LAYOUT, tmp_path / "rows", open_file=GatedFile)
    try:
        store._file.may_write.clear()
        store.write(slots(1, 2), torch.cat([row(1), row(2)]))
        snapshot = store.snapshot()
        store.write(slots(1), row(9))
        assert_identical(LAYOUT.decode(torch.stack(list(snapshot.rows))), torch.cat([row(1), row(2)]))
    finally:
        store._file.may_write.set()
        store.close(PATIENCE)


@pytest.mark.slow
def test_snapshots_beside_a_writer_that_never_rests(tmp_path):
    """Every row has one value, so a torn or a later one shows."""
    every = torch.arange(LAYOUT.num_slots)

    def full_of(value):
        return torch.full((LAYOUT.num_slots, *LAYOUT.row_shape), float(value))

    with closing(DiskStore(LAYOUT, tmp_path / "rows", pending_bytes=2 * LAYOUT.row_bytes)) as store:
        for generation in range(30):
            store.write(every, full_of(generation))
            snapshot = store.snapshot()
            later = threading.Thread(target=store.write, args=(every, full_of(-1)))
            later.start()
            values = LAYOUT.decode(torch.stack(list(snapshot.rows)))
            later.join()
            assert (values == generation).all()
