"""What a flow promises whatever its connections lose: every packet once, and in order."""

import random

import pytest

from thinwire.pipeline.processes.zeromq.flows import Inflow, Outflow


def test_packets_are_kept_until_they_are_acknowledged():
    flow = Outflow()
    assert [flow.add(letter) for letter in "abc"] == [0, 1, 2]
    assert flow.acknowledge(2) == ["a", "b"]
    assert list(flow.kept()) == [(2, "c")]
    assert flow.acknowledge(2) == []
    assert flow.acknowledge(1) == []
    assert (flow.acknowledge(3), len(flow)) == (["c"], 0)


def test_what_was_never_sent_cannot_be_acknowledged():
    flow = Outflow()
    flow.add("a")
    assert flow.acknowledge(2) is None
    assert len(flow) == 1


def test_a_packet_is_taken_once_and_in_its_turn():
    flow = Inflow()
    assert [flow.takes(number) for number in (0, 0, 2, 1, 1, 2)] == [True, False, False, True, False, True]
    assert flow.expected == 3


@pytest.mark.parametrize("seed", range(50))
def test_connections_that_lose_what_is_under_way_lose_nothing(seed):
    """Each connection carries some packets, loses the rest of them, and some acknowledgements too."""
    chance = random.Random(seed)
    sending, receiving, arrived, sent = Outflow(), Inflow(), [], 0
    while sent < 100 or len(sending):
        under_way = list(sending.kept())  # a new connection: what is kept goes out again
        for _ in range(chance.randint(0, 10)):
            under_way.append((sending.add(sent), sent))
            sent += 1
        for number, packet in under_way[: chance.randint(0, len(under_way))]:
            if receiving.takes(number):
                arrived.append(packet)
            if chance.random() < 0.3:
                assert sending.acknowledge(receiving.expected) is not None
        if chance.random() < 0.9:
            sending.acknowledge(receiving.expected)
    assert arrived == list(range(sent))
