import threading

import pytest
import torch

from support.gpus import GPU, FakeGpu, Streams
from support.processes import run
from support.toy import train
from thinwire.pipeline.devices.courier import Courier, promised
from thinwire.pipeline.devices.device import CPU
from thinwire.pipeline.devices.staged_store import StagedStore
from thinwire.pipeline.devices.staging import StagedReceiver, StagedSender, Ways
from thinwire.pipeline.devices.streams import CopyStream
from thinwire.pipeline.wire.boundary import FiniteFlags

CAPACITY = 80


class Transport:
    """Lends buffers, and writes down what is sent and what comes back."""

    def __init__(self, log):
        self.log, self.sent, self.back = log, [], []

    def take(self):
        return torch.zeros(CAPACITY, dtype=torch.uint8)

    def send(self, buffer, nbytes, what, seal):
        nbytes = seal(buffer, nbytes)
        self.log.append(("sent", what, threading.current_thread().name))
        self.sent.append(buffer[:nbytes].clone())

    def flush(self):
        self.log.append(("flushed",))

    def give(self, buffer):
        self.back.append(buffer)


def seal(frame, nbytes):
    frame[0] = 255
    return nbytes


def test_the_launching_thread_gives_orders_and_the_courier_waits_and_sends_in_order(monkeypatch):
    streams = Streams(monkeypatch, in_time=False)
    transport = Transport(streams.log)
    way = StagedSender(transport, CAPACITY, CopyStream(CPU), Courier("courier", CPU))
    for index in range(3):
        way.send(way.take().fill_(index), 64, f"frame {index}", seal)
    assert transport.sent == [], "nothing leaves before its copy is done"
    # the second copy is done first, and waits for its turn
    for place in (1, 0, 2):
        streams.side.moments[place].come()
    way.flush()
    assert [entry for entry in streams.log if entry[0] in ("waited for", "sent", "flushed")] == [
        *(
            entry
            for index in range(3)
            for entry in (("waited for", f"side {index}", "courier"), ("sent", f"frame {index}", "courier"))
        ),
        ("flushed",),
    ]
    # each copy follows what compute was asked for until then
    orders = [entry for entry in streams.log if entry[0] in ("recorded", "side holds for", "on")]
    assert orders[:4] == [
        ("recorded", "compute 0"), ("side holds for", "compute 0"), ("on", "side"), ("recorded", "side 0"),
    ]  # fmt: skip
    assert [frame[:2].tolist() for frame in transport.sent] == [[255, index] for index in range(3)]


def test_compute_writes_a_frame_again_only_after_its_copy_and_the_host_does_not_wait(monkeypatch):
    streams = Streams(monkeypatch, in_time=False)
    way = StagedSender(Transport(streams.log), CAPACITY, CopyStream(CPU), Courier("courier", CPU))
    frame = way.take()
    way.send(frame, 64, "a frame", seal)
    assert way.take() is frame
    assert streams.log[-1] == ("compute holds for", "side 0")
    streams.side.moments[0].come()
    way.flush()


def test_a_received_frame_is_decoded_after_its_copy_and_given_back_after_it(monkeypatch):
    streams = Streams(monkeypatch, in_time=False)
    transport = Transport(streams.log)
    way = StagedReceiver(transport, CAPACITY, CopyStream(CPU))
    first, second = (torch.full((CAPACITY,), value, dtype=torch.uint8) for value in (1, 2))
    brought = way.bring(first, 70)
    assert streams.log[-1] == ("compute holds for", "side 0")
    assert brought[:70].tolist() == [1] * 70
    way.give(brought)
    assert transport.back == [], "the transport would receive into a frame that is still copied"
    decoded = streams.compute.moments[-1]
    streams.side.moments[0].come()
    assert way.bring(second, 70) is brought
    assert ("side holds for", decoded.name) in streams.log
    assert [each is first for each in transport.back] == [True]
    assert not [entry for entry in streams.log if entry[0] == "waited for"]


def test_what_fails_in_the_courier_is_raised_where_frames_are_sent():
    courier, done = Courier("courier", CPU), []

    def fail():
        raise ConnectionError("the peer is gone")

    for job in (lambda: done.append(1), fail, lambda: done.append(2)):
        courier.submit(job)
    with pytest.raises(ConnectionError, match="the peer is gone"):
        courier.drain()
    with pytest.raises(ConnectionError, match="the peer is gone"):
        courier.submit(lambda: done.append(3))
    assert done == [1]


def test_a_courier_begins_with_its_gpu_and_not_the_first_one(monkeypatch):
    chosen = []
    monkeypatch.setattr(
        torch.accelerator, "set_device_index", lambda index: chosen.append((index, threading.current_thread().name))
    )
    for device in (torch.device("cuda", 2), CPU):
        courier = Courier(f"courier of {device}", device)
        courier.submit(lambda: None)
        courier.drain()
    assert chosen == [(2, "courier of cuda:2")]


def test_a_courier_that_cannot_use_its_gpu_says_so(monkeypatch):
    """Its thread ended, and who waited for a job waited for ever."""

    def fail(device):
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr("thinwire.pipeline.devices.courier.make_current", fail)
    courier, done = Courier("courier", CPU), []
    future = promised(courier, lambda: done.append(1))
    with pytest.raises(RuntimeError, match="the GPU is gone"):
        future.result(60)
    with pytest.raises(RuntimeError, match="the GPU is gone"):
        courier.drain()
    assert not done


def test_between_stages_of_one_process_nothing_is_left_to_a_thread(monkeypatch):
    streams = Streams(monkeypatch)
    way = StagedSender(Transport(streams.log), CAPACITY, CopyStream(CPU), None)
    way.send(way.take(), 64, "a frame", seal)
    assert ("sent", "a frame", threading.main_thread().name) in streams.log
    way.flush()
    assert streams.log[-1] == ("flushed",)


def test_flags_are_read_once_and_name_the_first_bad_tensor():
    flags = FiniteFlags()
    flags.add(torch.ones(3), "good")
    flags.add(torch.arange(3), "whole numbers")
    flags.add(torch.tensor([1.0, torch.nan]), "bad")
    flags.add(torch.tensor([torch.inf]), "worse")
    assert flags.first_bad() == "bad"
    assert flags.first_bad() is None


def test_flags_of_a_gpu_are_ordered_without_a_look_at_it():
    flags = FiniteFlags()
    with FakeGpu():
        flags.add(torch.empty(5, device=GPU), "a tensor")


@pytest.mark.parametrize(
    "pair", [("q(4)", "q(8)"), ("aqsgd(q(4))", "ef(topk(0.25))"), ("aqsgd(q(4), store_bits=8)", "q(8)")]
)
def test_staged_frames_and_buffers_carry_the_same_numbers(monkeypatch, alone, pair):
    options = {"compression": dict(zip(("activations", "gradients"), pair, strict=True)), "simulated": True}
    straight = train(0, options)
    streams = Streams(monkeypatch)
    monkeypatch.setattr(Ways, "departing", staged_departing)
    monkeypatch.setattr(Ways, "arriving", staged_arriving)
    monkeypatch.setattr(Ways, "store", staged_store)
    staged = train(0, options)
    assert_same(straight, staged)
    assert straight[3] == staged[3], "the buffers of feedback differ"
    # a frame is copied out and in; each of its messages brings and takes rows where feedback has them
    copies = len([entry for entry in streams.log if entry[0] == "on"])
    assert copies == 2 * 2 * 4 * 3 if pair == ("q(4)", "q(8)") else copies > 2 * 2 * 4 * 3
    waited = {entry[2] for entry in streams.log if entry[0] == "waited for" and "rows" in entry[2]}
    assert waited <= {"thinwire reads rows", "thinwire writes rows"}


def staged_departing(self, transport, capacity, device, *, at_once):
    courier = None if at_once else self._courier(device)
    return StagedSender(transport, capacity, self._stream(device), courier)


def staged_arriving(self, transport, capacity, device):
    return StagedReceiver(transport, capacity, self._stream(device))


def staged_store(self, store, device):
    return StagedStore(store, self._rows(device))


def train_staged(rank, options):
    with pytest.MonkeyPatch.context() as patch:
        streams = Streams(patch)
        patch.setattr(Ways, "departing", staged_departing)
        patch.setattr(Ways, "arriving", staged_arriving)
        patch.setattr(Ways, "store", staged_store)
        found = train(rank, options)
    return found, {entry[2] for entry in streams.log if entry[0] == "waited for"}


@pytest.mark.processes
def test_a_courier_in_each_process_sends_what_the_launching_thread_encodes(alone):
    options = {"schedule": "1f1b", "compression": {"activations": "q(4)", "gradients": "q(8)"}}
    results = run(train_staged, 2, options)
    simulated = train(0, options | {"simulated": True})
    losses = next(found[0] for found, _ in results if found[0] is not None)
    weights = {stage: state for found, _ in results for stage, state in found[1].items()}
    assert_same(simulated, (losses, weights))
    assert [waited for _, waited in results] == [{"thinwire courier"}] * 2


def assert_same(one, other):
    assert one[0] == other[0]
    for stage, state in one[1].items():
        for name, tensor in state.items():
            assert torch.equal(tensor, other[1][stage][name]), f"stage {stage}, {name}"
