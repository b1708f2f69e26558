"""Snapshots of stores, and their rows in the files of checkpoints."""

import hashlib
import threading
import zlib

import pytest
import torch

from support.codec_helpers import assert_identical
from support.slow_disk import LAYOUT, PATIENCE, GatedFile, row, rows, slots
from thinwire.compress.stores.disk import DiskStore
from thinwire.compress.stores.memory import MemoryStore
from thinwire.compress.stores.saved import SavedRows, fold, restored
from thinwire.compress.stores.store import StoreError


@pytest.fixture(params=["memory", "disk"])
def store(request, tmp_path):
    made = MemoryStore(LAYOUT) if request.param == "memory" else DiskStore(LAYOUT, tmp_path / "live.slots")
    yield made
    made.close()


def save(store, path, checksums):
    snapshot = store.snapshot()
    rows, digest = SavedRows.write(path, snapshot, checksums)
    assert digest == rows.digest()
    return rows, snapshot.known


def load(store, known, checksums, base, chain):
    store.restore(known, restored(LAYOUT, known, checksums, base, chain))


def content(store):
    return store.read(torch.arange(LAYOUT.num_slots))


def test_the_digest_of_rows_covers_every_row_and_the_length(tmp_path):
    path = tmp_path / "rows"
    content = [bytes(range(4)), bytes(range(4, 8)), bytes(range(8, 12))]
    path.write_bytes(b"".join(content))
    written = SavedRows(path, [0, 5, 7])
    sums = b"".join(zlib.crc32(row).to_bytes(4, "little") for row in content)
    assert written.digest() == hashlib.sha256(sums).hexdigest()
    for index in range(12):
        damaged = bytearray(b"".join(content))
        damaged[index] ^= 1
        path.write_bytes(damaged)
        assert written.digest() != hashlib.sha256(sums).hexdigest()
    path.write_bytes(b"".join(content)[:-1])
    with pytest.raises(StoreError, match="damaged"):
        written.digest()


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
    assert snapshot.known.nonzero().flatten().tolist() == [1, 2, 3]


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
    with DiskStore(LAYOUT, tmp_path / "rows", open_file=GatedFile) as store:
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


def test_a_chain_of_checkpoints_gives_each_of_their_moments_back(store, tmp_path):
    checksums = torch.zeros(LAYOUT.num_slots, dtype=torch.int64)
    moments, chain = [], []
    for index, written in enumerate([(0, 1, 2, 3), (2, 3, 4), (0, 4)]):
        store.write(slots(*written), rows(len(written)) + index)
        saved, known = save(store, tmp_path / f"{index}.rows", checksums)
        chain.append(saved)
        moments.append((content(store), known, checksums.clone()))
    for index, (wanted, known, sums) in enumerate(moments):
        load(store, known, sums, tmp_path / "base.slots", chain[: index + 1])
        assert_identical(content(store), wanted)
        assert store.snapshot().slots == [], "what was restored is saved already"


@pytest.mark.parametrize("folded", [0, 1, 2, 3, 4])
def test_folding_may_stop_after_any_row(store, tmp_path, folded):
    checksums = torch.zeros(LAYOUT.num_slots, dtype=torch.int64)
    base, chain = tmp_path / "base.slots", []
    for index, written in enumerate([(0, 1, 2, 3), (2, 3, 4), (0, 4)]):
        store.write(slots(*written), rows(len(written)) + index)
        chain.append(save(store, tmp_path / f"{index}.rows", checksums)[0])
    wanted, known = content(store), store.known(torch.arange(LAYOUT.num_slots))
    fold(base, chain[0])
    part = SavedRows(tmp_path / "part", chain[1].slots[:folded])
    part.path.write_bytes(chain[1].path.read_bytes()[: len(part.slots) * LAYOUT.row_bytes])
    fold(base, part)
    load(store, known, checksums, base, chain[1:])
    assert_identical(content(store), wanted)


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "longer"])
def test_damaged_rows_are_a_sentence(store, tmp_path, damage):
    checksums = torch.zeros(LAYOUT.num_slots, dtype=torch.int64)
    store.write(slots(0, 1), rows(2))
    saved, known = save(store, tmp_path / "0.rows", checksums)
    whole = saved.path.read_bytes()
    match damage:
        case "flip":
            saved.path.write_bytes(whole[:9] + bytes([whole[9] ^ 4]) + whole[10:])
        case "cut":
            saved.path.write_bytes(whole[:-1])
        case "longer":
            saved.path.write_bytes(whole + b"x")
        case "gone":
            saved.path.unlink()
    with pytest.raises(StoreError, match=r"0\.rows.*(damaged|check the disk)"):
        load(store, known, checksums, tmp_path / "base.slots", [saved])


@pytest.mark.parametrize("slot", [-1, LAYOUT.num_slots, -(1 << 60)])
def test_a_slot_that_does_not_exist_is_a_sentence(store, tmp_path, slot):
    """It ended in an IndexError, and -1 would have been the last slot."""
    checksums = torch.zeros(LAYOUT.num_slots, dtype=torch.int64)
    store.write(slots(0), rows(1))
    saved, known = save(store, tmp_path / "0.rows", checksums)
    damaged = SavedRows(saved.path, [slot])
    with pytest.raises(StoreError, match=rf"0\.rows must hold rows of slots 0 to .*, got {slot}"):
        load(store, known, checksums, tmp_path / "base.slots", [damaged])


def test_a_base_that_is_damaged_is_a_sentence(store, tmp_path):
    checksums = torch.zeros(LAYOUT.num_slots, dtype=torch.int64)
    store.write(slots(0, 1), rows(2))
    saved, known = save(store, tmp_path / "0.rows", checksums)
    fold(tmp_path / "base.slots", saved)
    (tmp_path / "base.slots").write_bytes(bytes(LAYOUT.nbytes))
    with pytest.raises(StoreError, match=r"base\.slots does not hold the row of slot 0"):
        load(store, known, checksums, tmp_path / "base.slots", [])


@pytest.mark.slow
def test_snapshots_beside_a_writer_that_never_rests(tmp_path):
    """Every row has one value, so a torn or a later one shows."""
    every = torch.arange(LAYOUT.num_slots)

    def full_of(value):
        return torch.full((LAYOUT.num_slots, *LAYOUT.row_shape), float(value))

    with DiskStore(LAYOUT, tmp_path / "rows", pending_bytes=2 * LAYOUT.row_bytes) as store:
        for generation in range(30):
            store.write(every, full_of(generation))
            snapshot = store.snapshot()
            later = threading.Thread(target=store.write, args=(every, full_of(-1)))
            later.start()
            values = LAYOUT.decode(torch.stack(list(snapshot.rows)))
            later.join()
            assert (values == generation).all()
