"""The store on disk: off its caller's path, bounded in memory, and clear about a disk that fails.

Nothing here is timed. A gate stops the file's reads or writes until it is opened, so what returns while it is closed
did not wait for the disk.
"""

import errno
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from support.codec_helpers import assert_identical, gaussian
from support.slow_disk import BRIEFLY, LAYOUT, PATIENCE, GatedFile, row, rows, slots, stored_in
from thinwire.compress.stores.disk import DiskStore
from thinwire.compress.stores.store import StoreError


@pytest.fixture
def disk(tmp_path):
    """Makes stores on gated files, with room for so many rows on either way, and closes them at the end."""
    made = []

    def make(pending=16, ahead=16, **options):
        bounds = {"pending_bytes": pending * LAYOUT.row_bytes, "ahead_bytes": ahead * LAYOUT.row_bytes}
        store = DiskStore(LAYOUT, tmp_path / f"rows-{len(made)}", open_file=GatedFile, **bounds, **options)
        made.append((store, store._file))
        return made[-1]

    yield make
    for store, file in made:
        file.may_read.set()
        file.may_write.set()
        store.close(PATIENCE)


@pytest.fixture
def background():
    """Runs a call in a thread of its own."""
    with ThreadPoolExecutor() as pool:
        yield lambda call, *arguments: pool.submit(call, *arguments)


def wait_until_ready(store, count):
    with store._changed:
        assert store._changed.wait_for(lambda: len(store._ready) == count, PATIENCE)


def test_a_write_and_a_read_of_the_same_slot_do_not_wait(disk):
    """A sample that is the last of an epoch and the first of the next."""
    store, file = disk()
    file.may_write.clear()
    file.may_read.clear()
    store.write(slots(5), row(1))
    file.wait_until(lambda: file.writes[5])
    assert_identical(store.read(slots(5)), row(1))
    store.write(slots(5), row(2))  # while the first is on its way
    assert_identical(store.read(slots(5)), row(2))
    assert stored_in(file, 5) == 0 and not file.reads
    file.may_write.set()
    store.flush()
    assert stored_in(file, 5) == 2


def test_values_are_copied_before_a_write_returns(disk):
    store, file = disk()
    file.may_write.clear()
    values = row(1)
    store.write(slots(5), values)
    values.zero_()
    assert_identical(store.read(slots(5)), row(1))
    file.may_write.set()
    store.flush()
    assert stored_in(file, 5) == 1


def test_what_was_announced_before_its_last_write_is_read_without_the_disk(disk):
    store, file = disk()
    store.write(slots(5, 6), rows(2))
    store.flush()
    store.prefetch(slots(5))
    file.wait_until(lambda: file.reads[5])
    store.write(slots(5), row(2))
    store.flush()
    file.may_read.clear()
    assert_identical(store.read(slots(5)), row(2))


def test_what_is_being_read_ahead_when_it_is_written_is_read_without_the_disk(disk):
    store, file = disk()
    store.write(slots(5, 6), torch.cat([row(1), row(6)]))
    store.flush()
    file.may_read.clear()
    store.prefetch(slots(5, 6))
    file.wait_until(lambda: file.reads[5])
    store.write(slots(5, 6), torch.cat([row(2), row(7)]))  # 6 is still waiting for its turn
    store.flush()
    assert_identical(store.read(slots(5)), row(2))
    assert_identical(store.read(slots(6)), row(7))
    assert file.reads == {5: 1}
    file.may_read.set()
    assert_identical(store.read(slots(5, 6)), torch.cat([row(2), row(7)]))


def test_what_was_read_ahead_is_read_without_the_disk(disk):
    store, file = disk()
    values = store.write(slots(3, 9, 4), rows(3))
    store.flush()
    store.prefetch(slots(4, 3, 9))
    file.wait_until(lambda: len(file.reads) == 3)
    assert_identical(store.read(slots(3, 9, 4)), values)
    assert file.reads == {3: 1, 9: 1, 4: 1}


def test_what_is_on_its_way_to_the_disk_is_announced_without_the_disk(disk):
    store, file = disk()
    file.may_write.clear()
    file.may_read.clear()
    store.write(slots(3), row(3))
    store.prefetch(slots(3))
    assert_identical(store.read(slots(3)), row(3))
    assert not file.reads


def test_nothing_is_read_twice(disk, background):
    store, file = disk()
    store.write(slots(3), row(3))
    store.flush()
    file.may_read.clear()
    store.prefetch(slots(3))
    file.wait_until(lambda: file.reads[3])
    reading = background(store.read, slots(3))
    file.may_read.set()
    assert_identical(reading.result(PATIENCE), row(3))
    assert file.reads == {3: 1}


def test_digests_leave_alone_what_was_read_ahead(disk):
    store, file = disk()
    store.write(slots(3), row(3))
    store.flush()
    store.prefetch(slots(3))
    file.wait_until(lambda: file.reads[3])
    before = store.digests()
    file.may_read.clear()
    assert_identical(store.read(slots(3)), row(3))
    file.may_read.set()
    assert store.digests() == before


def test_a_write_waits_while_too_many_are_pending(disk, background):
    store, file = disk(pending=2)
    file.may_write.clear()
    store.write(slots(0, 1), rows(2))
    store.write(slots(1), row(1))  # takes no more room
    third = background(store.write, slots(2), row(2))
    with pytest.raises(TimeoutError):
        third.result(BRIEFLY)
    assert len(store._pending) == 2
    file.may_write.set()
    third.result(PATIENCE)
    assert_identical(store.read(slots(1, 2)), torch.cat([row(1), row(2)]))


def test_one_write_may_be_larger_than_the_bound(disk):
    store, file = disk(pending=2)
    values = store.write(torch.arange(16), rows(16))
    store.flush()
    assert_identical(store.read(torch.arange(16)), values)
    assert sum(file.writes.values()) == 16


def test_reading_ahead_stops_when_there_is_no_room(disk):
    store, file = disk(ahead=3)
    values = store.write(torch.arange(16), rows(16))
    store.flush()
    store.prefetch(torch.arange(8))
    file.wait_until(lambda: len(file.reads) == 3)
    with file.begun:
        assert not file.begun.wait_for(lambda: len(file.reads) > 3, BRIEFLY)
    for slot in range(8):
        file.wait_until(lambda slot=slot: len(file.reads) == min(slot + 3, 8))
        assert_identical(store.read(slots(slot)), values[slot : slot + 1])
    assert file.reads == dict.fromkeys(range(8), 1)


def test_rows_announced_in_vain_give_way(disk):
    """As when an evaluation stops early: what it announced must not take the room for ever."""
    store, file = disk(ahead=2)
    store.write(torch.arange(16), rows(16))
    store.flush()
    store.prefetch(slots(0, 1))
    file.wait_until(lambda: len(file.reads) == 2)
    store.prefetch(slots(2, 3, 4))
    store.read(slots(2))
    file.wait_until(lambda: file.reads[3] and file.reads[4])
    assert len(store._ready) + len(store._reading) <= 2


def test_rows_announced_again_stay(disk):
    store, file = disk(ahead=2)
    values = store.write(torch.arange(16), rows(16))
    store.flush()
    store.prefetch(slots(0, 1))
    wait_until_ready(store, 2)
    store.prefetch(slots(0, 2))
    store.read(slots(2))
    store.prefetch(slots(3))
    file.wait_until(lambda: file.reads[3])  # in the place of 1
    assert_identical(store.read(slots(0)), values[:1])
    assert file.reads[0] == 1


def test_rows_written_after_they_were_announced_take_no_room_of_others(disk):
    store, file = disk(ahead=2)
    store.write(torch.arange(16), rows(16))
    store.flush()
    store.prefetch(slots(0, 1))
    wait_until_ready(store, 2)
    file.may_read.clear()
    file.may_write.clear()
    store.write(slots(2), row(2))
    store.prefetch(slots(2, 3, 4))
    store.read(slots(2))
    file.wait_until(lambda: file.reads[3])  # in the place of 0
    store.write(slots(4), row(4))  # in the place of 1
    assert len(store._ready) + len(store._reading) == 2
    assert_identical(store.read(slots(4)), row(4))


def test_unknown_slots_take_no_room(disk):
    store, file = disk(ahead=1)
    store.write(slots(9), row(9))
    store.flush()
    store.prefetch(slots(1, 2, 9))
    file.wait_until(lambda: file.reads[9])
    assert file.reads == {9: 1}


@pytest.mark.slow
def test_many_threads_share_a_store(disk):
    store, _ = disk(pending=2, ahead=2)

    def work(first):
        mine = torch.arange(first, 16, 4)
        for turn in range(50):
            values = store.write(mine, gaussian(4, *LAYOUT.row_shape, seed=16 * turn + first))
            store.prefetch(mine.flip(0))
            if turn % 7 == 0:
                store.flush()
            assert_identical(store.read(mine), values)
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_a_full_disk(disk):
    store, file = disk()
    store.write(slots(0), row(7))
    store.flush()
    file.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    store.write(slots(1), row(1))
    message = f"cannot write {file.path}: No space left on device; free some space there or name a file on a larger"
    raised = []
    for call in (store.flush, lambda: store.read(slots(0)), store.digests, lambda: store.prefetch(slots(0))):
        with pytest.raises(StoreError) as error:
            call()
        assert message in str(error.value)
        assert isinstance(error.value.__cause__, OSError)
        raised.append(error.value)
    assert len(set(map(id, raised))) == 4, "one exception raised again and again gathers every traceback"
    store.close()
    assert stored_in(file, 0) == 7


def test_the_next_call_says_so_whichever_it_is(disk, background):
    store, file = disk()
    store.write(slots(0), row(0))
    store.flush()
    file.may_read.clear()
    store.prefetch(slots(0))
    file.wait_until(lambda: file.reads[0])
    reading = background(store.read, slots(0))  # waits for the reader
    file.error = OSError(errno.EIO, os.strerror(errno.EIO))
    file.may_read.set()
    with pytest.raises(StoreError, match=r"cannot read .*: Input/output error; check the path and the disk"):
        reading.result(PATIENCE)
    with pytest.raises(StoreError, match="Input/output error"):
        store.write(slots(1), row(1))


def test_a_write_that_waits_for_room_is_told(disk, background):
    store, file = disk(pending=1)
    file.may_write.clear()
    store.write(slots(0), row(0))
    waiting = background(store.write, slots(1), row(1))
    file.error = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    file.may_write.set()
    with pytest.raises(StoreError, match="free some space there"):
        waiting.result(PATIENCE)


def test_closing_raises_what_no_call_has(disk):
    store, file = disk()
    file.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    store.write(slots(0), row(0))
    with pytest.raises(StoreError, match="No space left"):
        store.close()
    store.close()


def test_a_deleted_file(disk):
    store, file = disk()
    store.write(slots(0), row(0))
    store.flush()
    file.path.unlink()
    file.path.write_text("another file of the same name")
    store.write(slots(1), row(1))
    with pytest.raises(StoreError, match=f"{file.path} was deleted while the store was using it"):
        store.flush()
    assert file.path.read_text() == "another file of the same name"


@pytest.mark.parametrize("call", ["read", "flush"])
def test_a_file_cut_short(disk, call):
    """Rows before the cut would still be right, and later ones zeros."""
    store, file = disk()
    store.write(slots(0, 15), rows(2))
    store.flush()
    os.truncate(file.path, LAYOUT.row_bytes)
    with pytest.raises(StoreError, match=rf"rows-0 was cut from {LAYOUT.nbytes} to {LAYOUT.row_bytes} bytes"):
        store.read(slots(0)) if call == "read" else store.flush()
    assert file.path.stat().st_size == LAYOUT.row_bytes


@pytest.mark.parametrize("way", ["may_read", "may_write"])
def test_closing_gives_up_on_a_disk_that_does_not_answer(disk, way):
    store, file = disk()
    store.write(slots(0), row(0))
    store.flush()
    getattr(file, way).clear()
    store.prefetch(slots(0))
    store.write(slots(1), row(1))
    file.wait_until(lambda: file.reads[0] if way == "may_read" else file.writes[1])
    with pytest.raises(StoreError, match=f"{file.path} did not answer within {BRIEFLY} s of closing"):
        store.close(BRIEFLY)
    os.fstat(file._fd)  # still open: the thread is using it


def test_closing_wakes_whoever_waits(disk, background):
    store, file = disk(pending=1)
    file.may_write.clear()
    store.write(slots(0), row(0))
    waiting = background(store.write, slots(1), row(1))
    file.wait_until(lambda: file.writes[0])
    closing = background(store.close)
    with pytest.raises(StoreError, match="is closed"):
        waiting.result(PATIENCE)
    file.may_write.set()
    closing.result(PATIENCE)
    assert stored_in(file, 0) == 0 and stored_in(file, 1) == 0


def test_closing_writes_what_is_pending(disk, background):
    store, file = disk()
    file.may_write.clear()
    store.write(slots(0, 1, 2), torch.cat([row(1), row(2), row(3)]))
    closing = background(store.close)
    with store._changed:
        assert store._changed.wait_for(lambda: store.closed, PATIENCE)
    file.may_write.set()
    closing.result(PATIENCE)
    assert [stored_in(file, slot) for slot in range(3)] == [1, 2, 3]


def test_after_closing(disk):
    store, file = disk()
    store.write(slots(2), row(2))
    store.close()
    assert stored_in(file, 2) == 2
    for call in (store.flush, lambda: store.read(slots(2)), lambda: store.write(slots(2), row(3))):
        with pytest.raises(StoreError, match=f"the store in {file.path} is closed"):
            call()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file._fd)


def test_our_own_mistakes_in_the_background_are_not_silent(disk):
    store, file = disk()
    file.error = ZeroDivisionError("ours")
    store.write(slots(0), row(0))
    with pytest.raises(StoreError, match=r"rows-0 failed: ZeroDivisionError\('ours'\)"):
        store.flush()
