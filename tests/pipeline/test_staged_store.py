"""Buffers in the host's memory or on its disk, for a stage on a GPU: in order, ahead, without a wait for the GPU."""

import random
import threading
from contextlib import closing

import pytest
import torch

from support.codec_helpers import gaussian
from support.gpus import Streams
from support.slow_disk import LAYOUT, PATIENCE, GatedFile
from thinwire.compress.stores.disk import DiskStore
from thinwire.compress.stores.memory import MemoryStore
from thinwire.compress.stores.store import StoreError, StoreLayout
from thinwire.pipeline.devices.courier import Courier
from thinwire.pipeline.devices.device import CPU
from thinwire.pipeline.devices.staged_store import MOST_WRITES, RowLanes, StagedStore
from thinwire.pipeline.devices.staging import Ways
from thinwire.pipeline.devices.streams import CopyStream


def slots(*indices):
    return torch.tensor(indices)


def staged(host):
    return StagedStore(host, RowLanes(CopyStream(CPU), Courier("reader", CPU), Courier("writer", CPU)))


def orders(streams, *kinds):
    return [entry for entry in streams.log if entry[0] in kinds]


def waits(streams):
    """The threads that waited for a moment of the GPU."""
    return {entry[2] for entry in orders(streams, "waited for")}


def wait_for(condition):
    """Until a condition holds that another thread brings about."""
    pause = threading.Event()
    for _ in range(PATIENCE * 1000):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError("it never came")


def test_a_write_leaves_through_pinned_memory_while_the_launching_thread_goes_on(monkeypatch):
    streams = Streams(monkeypatch, in_time=False)
    host = MemoryStore(LAYOUT)
    store, values = staged(host), gaussian(2, 3, 5)
    store.write(slots(1, 2), values)
    values.zero_()  # as compute does with memory that it uses again
    assert store.known(slots(0, 1, 2)).tolist() == [False, True, True]
    assert not host._rows.any(), "nothing is in the host's store before its copy is done"
    assert [entry for entry in streams.log if entry[0] in ("recorded", "side holds for", "on")] == [
        ("recorded", "compute 0"), ("side holds for", "compute 0"), ("on", "side"), ("recorded", "side 0"),
    ]  # fmt: skip
    streams.side.moments[0].come()
    store.flush()
    assert torch.equal(host._values[1:3], gaussian(2, 3, 5))
    assert waits(streams) == {"writer"}


def test_the_rows_of_the_next_message_are_fetched_while_one_is_coded(monkeypatch):
    streams = Streams(monkeypatch)
    store, values = staged(MemoryStore(LAYOUT)), gaussian(6, 3, 5)
    store.write(slots(0, 1, 2, 3, 4, 5), values)
    store.flush()
    for pair in ((0, 1), (2, 3), (4, 5)):
        store.prefetch(slots(*pair))
    wait_for(lambda: len(orders(streams, "on")) == 2)  # that of the write, and that of the first fetch
    streams.log.clear()
    loan = store.borrow(slots(0, 1))
    assert torch.equal(loan.parts[0], values[:2])
    wait_for(lambda: orders(streams, "on"))
    assert len(orders(streams, "on")) == 1, "one message ahead, and no more"
    assert torch.equal(loan.parts[0], values[:2]), "the rows of a message are another memory than those ahead"
    assert torch.equal(store.borrow(slots(2, 3)).parts[0], values[2:4])
    assert orders(streams, "compute holds for") == [("compute holds for", f"side {index}") for index in (1, 2)]
    assert not waits(streams) - {"reader"}


def test_memory_on_the_gpu_is_filled_again_only_after_the_compute_that_read_it(monkeypatch):
    streams = Streams(monkeypatch)
    store = staged(MemoryStore(LAYOUT))
    store.write(slots(0, 1, 2), gaussian(3, 3, 5))
    store.flush()
    for slot in range(3):
        store.prefetch(slots(slot))
    first = store.borrow(slots(0)).parts[0]
    read = len(streams.compute.moments)
    store.borrow(slots(1))
    third = store.borrow(slots(2)).parts[0]
    assert third.data_ptr() == first.data_ptr()
    assert ("side holds for", f"compute {read}") in streams.log


def test_rows_that_are_lent_stay_though_those_ahead_are_given_up(monkeypatch):
    Streams(monkeypatch)
    store = staged(MemoryStore(LAYOUT))
    store.write(slots(0, 1, 2), gaussian(3, 3, 5))
    store.flush()
    for slot in (0, 1):
        store.prefetch(slots(slot))
    lent = store.borrow(slots(0)).parts[0]
    store.write(slots(1), torch.ones(1, 3, 5))  # its rows were ahead
    store.prefetch(slots(2))
    store._ahead.copied.result()
    assert store._ahead.rows.data_ptr() != lent.data_ptr()
    assert torch.equal(lent, gaussian(3, 3, 5)[:1])


def test_a_fetch_of_rows_that_are_still_leaving_comes_after_them(monkeypatch):
    streams = Streams(monkeypatch, in_time=False)
    store = staged(MemoryStore(LAYOUT))
    store.write(slots(3), gaussian(1, 3, 5))
    store.prefetch(slots(3))
    assert len(orders(streams, "on")) == 1, "the copy out, and no copy in"
    streams.side.moments[0].come()
    assert torch.equal(store.read(slots(3)), gaussian(1, 3, 5))
    assert waits(streams) == {"writer"}


def test_rows_written_after_they_were_fetched_are_fetched_again(monkeypatch):
    Streams(monkeypatch)
    store = staged(MemoryStore(LAYOUT))
    store.write(slots(3, 4), gaussian(2, 3, 5))
    store.prefetch(slots(3, 4))
    store.write(slots(4), torch.ones(1, 3, 5))
    assert torch.equal(store.read(slots(3, 4)), torch.cat([gaussian(2, 3, 5)[:1], torch.ones(1, 3, 5)]))


def test_with_many_rows_on_their_way_a_write_waits_for_the_first(monkeypatch):
    streams = Streams(monkeypatch, in_time=False)
    store = staged(MemoryStore(LAYOUT))
    for slot in range(MOST_WRITES):
        store.write(slots(slot % 16), torch.full((1, 3, 5), float(slot)))
    done = threading.Event()
    other = threading.Thread(target=lambda: (store.write(slots(0), torch.ones(1, 3, 5)), done.set()))
    other.start()
    assert not done.wait(0.05)
    streams.side.moments[0].come()
    assert done.wait(PATIENCE)
    other.join()
    for moment in streams.side.moments:
        moment.come()
    assert torch.equal(store.read(slots(0)), torch.ones(1, 3, 5))


@pytest.mark.parametrize("medium", ["memory", "disk"])
@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_any_order_of_calls_gives_the_bits_of_a_store_without_a_gpu(monkeypatch, tmp_path, medium, bits):
    Streams(monkeypatch)
    layout = StoreLayout(num_slots=9, row_shape=(3, 5), bits=bits)
    host = MemoryStore(layout) if medium == "memory" else DiskStore(layout, tmp_path / "rows")
    store, plain, draw = staged(host), MemoryStore(layout), random.Random(bits)
    saved = None
    with closing(store):
        for step in range(150):
            chosen = slots(*draw.sample(range(9), draw.randint(1, 4)))
            match draw.choice(["prefetch", "prefetch", "borrow", "borrow", "write", "read", "save", "load"]):
                case "prefetch":
                    store.prefetch(chosen)
                case "borrow":
                    loans = [each.borrow(chosen) for each in (store, plain)]
                    for loan in loans:
                        for part in loan.parts:
                            part.add_(gaussian(1, seed=step))
                    store.keep(loans[0])
                    plain.keep(loans[1])
                case "write":
                    values = gaussian(len(chosen), 3, 5, seed=step)
                    assert torch.equal(store.write(chosen, values), plain.write(chosen, values))
                case "read":
                    assert torch.equal(store.read(chosen), plain.read(chosen))
                case "save":
                    saved = store.state_dict()
                    assert torch.equal(saved["rows"], plain.state_dict()["rows"])
                case "load" if saved is not None:
                    store.load_state_dict(saved)
                    plain.load_state_dict(saved)
        assert store.digests() == plain.digests()
        kept = [each.snapshot() for each in (store, plain)]
        assert kept[0].slots == kept[1].slots
        for one, other in zip(kept[0].rows, kept[1].rows, strict=True):
            assert torch.equal(one, other)


def test_saved_rows_are_restored_and_count_as_saved(monkeypatch):
    Streams(monkeypatch)
    store = staged(MemoryStore(LAYOUT))
    store.write(slots(1), torch.ones(1, 3, 5))
    known = torch.zeros(16, dtype=torch.bool)
    known[5] = True
    store.restore(known, [([5], LAYOUT.encode(gaussian(1, 3, 5)))])
    assert store.known(slots(1, 5)).tolist() == [False, True]
    assert torch.equal(store.read(slots(5)), gaussian(1, 3, 5))
    assert store.snapshot().slots == []


def test_a_disk_that_fails_behind_the_launching_thread_is_told_there(monkeypatch, tmp_path):
    Streams(monkeypatch)
    store = staged(DiskStore(LAYOUT, tmp_path / "rows", open_file=GatedFile))
    store.write(slots(2), gaussian(1, 3, 5))
    store.flush()
    store._host._file.error = OSError(5, "Input/output error")
    store.prefetch(slots(2))
    with pytest.raises(StoreError, match=r"cannot read .*rows: Input/output error"):
        store.borrow(slots(2))
    store.close()
    assert store._host.closed


def test_rows_on_their_way_are_written_before_the_close_though_those_ahead_cannot_be_read(monkeypatch):
    streams = Streams(monkeypatch, in_time=False)
    store = staged(MemoryStore(LAYOUT))
    store.write(slots(5), gaussian(1, 3, 5))
    streams.side.moments[0].come()
    store.flush()

    def fail(chosen):
        raise StoreError("cannot read the rows")

    monkeypatch.setattr(store._host, "_take", fail)
    store.prefetch(slots(5))
    store.write(slots(2), torch.ones(1, 3, 5))
    written = []
    monkeypatch.setattr(store._host, "close", lambda: written.append(store._host._load([2]).clone()))
    threading.Timer(0.05, streams.side.moments[-1].come).start()
    with pytest.raises(StoreError, match="cannot read the rows"):
        store.close()
    assert torch.equal(LAYOUT.decode(written[0]), torch.ones(1, 3, 5))


def test_only_a_store_of_the_host_is_staged_and_only_for_a_gpu(monkeypatch):
    Streams(monkeypatch)
    host, ways = MemoryStore(LAYOUT), Ways()
    assert ways.store(host, CPU) is host
    seen = ways.store(host, torch.device("cuda", 0))
    assert isinstance(seen, StagedStore) and seen.device == torch.device("cuda", 0)
    assert ways.store(seen, torch.device("cuda", 0)) is seen
