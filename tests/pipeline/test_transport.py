import os
import re
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from support.processes import outcomes_of, run
from thinwire.compress import CodecError
from thinwire.models.errors import ModelError
from thinwire.pipeline.errors import PeerError, WireError
from thinwire.pipeline.processes.transport import (
    MemoryEnd,
    Pool,
    ProcessGroupReceiver,
    ProcessGroupSender,
    reaching,
)

pytestmark = pytest.mark.processes


def sender(capacity, seconds=30.0):
    return ProcessGroupSender(capacity, peer=1, group=dist.group.WORLD, tag=7, timeout=timedelta(seconds=seconds))


def receiver(capacity, seconds=30.0):
    return ProcessGroupReceiver(capacity, peer=0, group=dist.group.WORLD, tag=7, timeout=timedelta(seconds=seconds))


def frames_in_order(rank):
    if rank == 0:
        end = sender(1000)
        for length in (1000, 1, 500):
            buffer = end.take()
            buffer[:length] = length % 251
            end.send(buffer, length, "sending")
        end.flush()
        return [len(end.take()) for _ in range(4)]
    end = receiver(1000)
    end.post(3, "stage 1 was making room")
    got = []
    for length in (1000, 1, 500):
        buffer = end.receive("waiting")
        got.append(bool((buffer[:length] == length % 251).all()))
        end.give(buffer)
    return got


def test_frames_arrive_in_order_in_buffers_of_the_largest_size():
    sent, received = run(frames_in_order, 2)
    assert received == [True] * 3
    assert sent == [1000] * 4


def profiled_frame(rank):
    """What a profile has recorded that ended before its frame was waited for: torch crashes where that is the frame."""
    ends = sender(10), receiver(10)
    with torch.profiler.profile() as profile:
        if rank == 0:
            ends[0].send(ends[0].take(), 10, "sending")
        else:
            ends[1].post(1, "stage 1 was making room")
        torch.ones(1).abs()
    ends[0].flush() if rank == 0 else ends[1].receive("waiting")
    return {event.key for event in profile.key_averages()}


def test_a_frame_under_way_when_a_profile_ends_is_no_part_of_it():
    for recorded in run(profiled_frame, 2):
        assert "aten::abs" in recorded
        assert not [name for name in recorded if "gloo" in name]


def silent_peer(rank):
    if rank == 1:
        end = receiver(10, seconds=0.5)
        end.post(1, "stage 1 was making room")
        with pytest.raises(PeerError) as caught:
            end.receive("stage 1 was waiting for news")
        return str(caught.value)
    return None


def test_a_silent_peer_is_told_after_the_time_out():
    assert (
        run(silent_peer, 2)[1] == "stage 1 was waiting for news: Timed out waiting 500ms for recv operation to complete"
    )


def dead_peer(rank):
    posted = torch.zeros(1)
    if rank == 0:
        dist.recv(posted, src=1)
        os.kill(os.getpid(), signal.SIGKILL)
    end = receiver(10)
    end.post(1, "stage 1 was making room")
    dist.send(posted, dst=0)
    with pytest.raises(PeerError) as caught:
        end.receive("stage 1 was waiting for news")
    return str(caught.value)


def test_a_dead_peer_is_told_at_once():
    outcomes = outcomes_of(dead_peer, 2)
    assert 0 not in outcomes
    returned, told = outcomes[1]
    assert returned, told
    assert re.match(r"stage 1 was waiting for news: .*(closed|reset) by peer", told), told


@pytest.mark.parametrize("error", [CodecError("a payload"), ModelError("a model"), WireError("a frame")])
def test_errors_of_ours_pass_where_others_say_what_was_awaited(error):
    """CodecError is a ValueError too, which C++ raises where a length was damaged: a payload was said to be a peer."""
    with pytest.raises(type(error), match=str(error)), reaching("waiting for news"):
        raise error
    with pytest.raises(PeerError, match="waiting for news: vector"), reaching("waiting for news"):
        raise ValueError("vector::reserve")


def test_a_pool_lends_what_it_was_given_before_it_allocates():
    pool = Pool(16)
    first = pool.take()
    pool.give(first)
    assert pool.take() is first
    assert pool.take() is not first


def test_memory_keeps_the_order_and_copies_nothing():
    end = MemoryEnd(8)
    buffers = [end.take() for _ in range(3)]
    for buffer in buffers:
        end.send(buffer, 8, "sending")
    assert [end.receive("waiting") is buffer for buffer in buffers] == [True] * 3
