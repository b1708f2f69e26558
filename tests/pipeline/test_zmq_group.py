"""The process group over ZeroMQ, as torch and the transport use it, on real processes."""

from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("zmq", reason="needs pyzmq")

from support.processes import run
from thinwire.pipeline.errors import MismatchError, PeerError
from thinwire.pipeline.processes.transport import ProcessGroupReceiver, ProcessGroupSender, reaching
from thinwire.pipeline.processes.zeromq.group import MeshSettings, register
from thinwire.pipeline.processes.zeromq.keys import Keys

pytestmark = pytest.mark.processes

KEYS = Keys.fresh()


def in_group(target, keys, rank, *args):
    """Call `target` with a group over ZeroMQ of all processes; all leave it together."""
    register()
    settings = MeshSettings(keys=keys[rank] if isinstance(keys, list) else keys)
    group = dist.new_group(backend="zmq", pg_options=settings, timeout=timedelta(seconds=30))
    result = target(rank, group, *args)
    dist.barrier(group)
    group.shutdown()
    return result


def on_processes(target, count, *args, keys=KEYS):
    return run(partial(in_group, target, keys), count, *args)


def collectives(rank, group):
    mine = torch.tensor([rank, 10 * rank])
    everyone = [torch.zeros_like(mine) for _ in range(3)]
    dist.all_gather(everyone, mine, group=group)
    mine += 1000  # what was gathered is what was there at the call
    to_last = [torch.zeros_like(mine) for _ in range(3)] if rank == 2 else None
    dist.gather(mine, to_last, group=group, group_dst=2)
    told = torch.full((2, 2), float(rank), dtype=torch.float64)
    dist.broadcast(told, group=group, group_src=1)
    dist.barrier(group)
    return [one.tolist() for one in everyone], to_last and [one.tolist() for one in to_last], told.tolist()


def test_collectives_give_what_all_processes_said():
    everyone = [[0, 0], [1, 10], [2, 20]]
    found = on_processes(collectives, 3)
    assert [gathered for gathered, _, _ in found] == [everyone] * 3
    assert [to_last for _, to_last, _ in found] == [None, None, [[1000, 1000], [1001, 1010], [1002, 1020]]]
    assert [told for _, _, told in found] == [[[1.0, 1.0], [1.0, 1.0]]] * 3


def point_to_point(rank, group):
    """Tags keep messages apart; those of one tag come in order; receives may be posted before or after."""
    if rank == 0:
        works = [
            dist.isend(torch.full((number,), float(number)), group=group, group_dst=1, tag=tag)
            for tag, number in ((1, 3), (2, 5), (1, 4), (2, 0))
        ]
        return [work.wait() for work in works]
    buffers = {name: torch.full((6,), -1.0) for name in ("2a", "1a", "1b", "2b")}
    works = [dist.irecv(buffer, group=group, group_src=0, tag=int(name[0])) for name, buffer in buffers.items()]
    assert all(work.wait() for work in works)
    return {name: buffer.tolist() for name, buffer in buffers.items()}


def test_messages_of_a_tag_arrive_in_order_and_may_be_short():
    sent, received = on_processes(point_to_point, 2)
    assert sent == [True] * 4
    assert received == {
        "1a": [3.0] * 3 + [-1.0] * 3,
        "1b": [4.0] * 4 + [-1.0] * 2,
        "2a": [5.0] * 5 + [-1.0],
        "2b": [-1.0] * 6,
    }


def frames(rank, group):
    ends = {"peer": 1 - rank, "group": group, "tag": 7, "timeout": timedelta(seconds=30)}
    lengths = (1000, 1, 500)
    if rank == 0:
        sender = ProcessGroupSender(1000, **ends)
        for length in lengths:
            buffer = sender.take()
            buffer[:length] = length % 251
            sender.send(buffer, length, "sending")
        sender.flush()
        return [len(sender.take()) for _ in range(4)]
    receiver = ProcessGroupReceiver(1000, **ends)
    receiver.post(3, "stage 1 was making room")
    got = []
    for length in lengths:
        buffer = receiver.receive("waiting")
        got.append(bool((buffer[:length] == length % 251).all()))
        receiver.give(buffer)
    return got


def test_it_carries_the_frames_of_a_stream():
    assert on_processes(frames, 2) == [[1000] * 4, [True] * 3]


def too_long(rank, group):
    """Over gloo this ends the process that receives."""
    if rank == 0:
        dist.send(torch.ones(5), group=group, group_dst=1)
        return None
    with pytest.raises(PeerError) as caught, reaching("stage 1 was waiting for news"):
        dist.recv(torch.zeros(4), group=group, group_src=0)
    return str(caught.value)


def test_a_message_that_is_too_long_is_an_error_and_no_crash():
    assert on_processes(too_long, 2)[1] == (
        "stage 1 was waiting for news: receiving from process 0 failed: 20 bytes came where 16 at most are expected"
    )


def silent(rank, group):
    if rank == 0:
        return None
    with pytest.raises(PeerError) as caught, reaching("stage 1 was waiting for news"):
        dist.irecv(torch.zeros(4), group=group, group_src=0).wait(timedelta(seconds=0.2))
    return str(caught.value)


def test_a_silent_peer_is_told_after_the_time_out():
    told = on_processes(silent, 2)[1]
    assert told.startswith("stage 1 was waiting for news: receiving from process 0 took longer than 0.2 s ("), told


def strangers(rank):
    register()
    settings = MeshSettings(keys=Keys.fresh())
    with pytest.raises(MismatchError) as caught:
        dist.new_group(backend="zmq", pg_options=settings)
    return str(caught.value)


def test_other_keys_are_told_at_once():
    told = run(strangers, 2)
    assert told == [
        f"process {1 - rank} has other keys; give every process the same file as wire.keys" for rank in range(2)
    ]
