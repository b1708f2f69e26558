"""The file of a disk store: created sparse, never at the cost of another file, and checked at every access."""

import os
from contextlib import closing

import pytest
import torch

from support.codec_helpers import assert_identical, gaussian
from support.slow_disk import LAYOUT, GatedFile, row, rows, slots, stored_in
from support.small_disk import mounted
from thinwire.compress.stores import slot_file
from thinwire.compress.stores.disk import DiskStore
from thinwire.compress.stores.space import check_space, needs_of
from thinwire.compress.stores.store import StoreError, StoreLayout


@pytest.fixture
def disk(tmp_path):
    """A store, and its file."""
    with closing(DiskStore(LAYOUT, tmp_path / "rows", open_file=GatedFile)) as store:
        yield store, store._file


def test_it_takes_no_room_before_it_is_written(tmp_path):
    layout = StoreLayout(num_slots=1 << 16, row_shape=(1 << 20,))  # 256 GiB
    with closing(DiskStore(layout, tmp_path / "rows")) as store:
        store.write(slots((1 << 16) - 1), torch.ones(1, 1 << 20))
        store.flush()
        status = (tmp_path / "rows").stat()
    assert status.st_size == layout.nbytes
    assert layout.row_bytes <= status.st_blocks * 512 < 2 * layout.row_bytes


@pytest.mark.parametrize("call", ["flush", "state_dict"])
def test_flush_waits_for_the_medium(disk, monkeypatch, call):
    """And so does a state: without rows, it goes with a copy of the file."""
    store, file = disk
    synced = []
    monkeypatch.setattr(slot_file.os, "fsync", lambda fd: synced.append((fd, stored_in(file, 3))))
    store.write(slots(3), row(3))
    getattr(store, call)()
    assert synced == [(file._fd, 3)]


def test_pieces_as_small_as_the_system_likes(disk):
    store, file = disk
    file.largest_piece = 7
    values = store.write(slots(1, 2), rows(2))
    store.flush()
    assert_identical(store.read(slots(2, 1)), values.flip(0))
    assert sum(file.reads.values()) > 2 * LAYOUT.row_bytes / 8


def test_no_bytes_at_all_are_an_error(disk):
    store, file = disk
    file.largest_piece = 0
    store.write(slots(1), row(1))
    with pytest.raises(StoreError, match=r"cannot write .*: Input/output error"):
        store.flush()


def test_an_existing_file_is_not_overwritten(tmp_path):
    path = tmp_path / "thesis"
    path.write_text("chapter 1")
    with pytest.raises(StoreError, match=f"{path} exists and holds 9 bytes, which a new store will not overwrite"):
        DiskStore(LAYOUT, path)
    assert path.read_text() == "chapter 1"


def test_an_empty_file_will_do(tmp_path):
    (tmp_path / "rows").touch()
    with closing(DiskStore(LAYOUT, tmp_path / "rows")) as store:
        store.write(slots(0), row(0))


def test_no_two_stores_share_a_file(disk):
    _, file = disk
    with pytest.raises(StoreError, match=f"{file.path} is in use by another store; give each store its own file"):
        DiskStore(LAYOUT, file.path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "cannot open .*: Is a directory; check the path"),
        ("nowhere/rows", "cannot open .*rows: No such file or directory; check the path"),
    ],
)
def test_paths_that_cannot_be_opened(tmp_path, path, message):
    with pytest.raises(StoreError, match=message):
        DiskStore(LAYOUT, tmp_path / path)


def test_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreError, match="pipe is not a regular file"):
        DiskStore(LAYOUT, tmp_path / "pipe")


def test_a_disk_that_is_really_full(tmp_path):
    with mounted(tmp_path / "small", "size=1m") as place:
        layout = StoreLayout(num_slots=64, row_shape=(1 << 14,))  # 4 MiB
        with pytest.raises(StoreError, match=r"small will take .*\(4194304 bytes\) more, but the disk has .* free"):
            check_space([needs_of("stores", [(layout.nbytes, place / "rows")])])
        store = DiskStore(layout, place / "rows")
        values = store.write(slots(0, 1), gaussian(2, 1 << 14))
        store.flush()
        with pytest.raises(StoreError, match="No space left on device"):
            for slot in range(2, 64):
                store.write(slots(slot), gaussian(1, 1 << 14))
            store.flush()
        store.close()
        assert (place / "rows").read_bytes()[: 2 * layout.row_bytes] == values.numpy().tobytes()
