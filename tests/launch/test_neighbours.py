"""Neighbours that hear each other, and strangers that nobody hears."""

import os
import queue
import signal
import socket
import struct
import threading
import time
from contextlib import suppress

import pytest
import torch.distributed as dist

from support import processes
from thinwire.launch.processes.heartbeat import Pulse, Silence
from thinwire.launch.processes.neighbours import Neighbours
from thinwire.launch.shared.doing import Doing
from thinwire.pipeline.errors import PeerError, WireError
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.processes.placement import Placement

CHAIN = Placement({0: 0, 1: 1, 2: 2})
TIMEOUT = 30


class Noted(Silence):
    """A silence that has an event for the first word of a neighbour that trains."""

    def __init__(self):
        super().__init__(1.5, 60)
        self.first = threading.Event()

    def received(self, rank, doing):
        super().received(rank, doing)
        if doing is Doing.TRAINING:
            self.first.set()


def begin(rank):
    """What a process of a chain of three hears: lost neighbours, as (rank, sentence), and the first word of one."""
    lost, pulse, silence = queue.Queue(), Pulse(), Noted()
    pulse.doing = lambda: Doing.TRAINING
    Neighbours(CHAIN, rank, pulse, silence, TIMEOUT).begin(lambda rank, said: lost.put((rank, said)))
    return lost, silence.first


def one_is_stopped(rank):
    """The middle process is stopped; its neighbours say whom they lost, and end it."""
    store = dist.distributed_c10d._get_default_store()
    lost, first = begin(rank)
    if rank == 1:
        store.set("pid", str(os.getpid()))
        store.wait(["0 hears", "2 hears"])
        os.kill(os.getpid(), signal.SIGSTOP)
    assert first.wait(TIMEOUT)
    store.set(f"{rank} hears", "")
    found, said = lost.get(timeout=TIMEOUT)
    pid = int(store.get("pid"))
    if rank == 0:
        store.wait(["heard by 2"])
        os.kill(pid, signal.SIGKILL)
    else:
        store.set("heard by 2", "")
    return found, said.startswith("sent no heartbeat for")


def all_end(rank):
    """Each process ends 2.5 s after the one before; the last one says how many neighbours each has lost."""
    store = dist.distributed_c10d._get_default_store()
    lost, _ = begin(rank)
    store.set(f"{rank} begins", "")
    store.wait([f"{each} begins" for each in range(3)])
    time.sleep(2.5 * rank)
    store.set(f"lost by {rank}", str(lost.qsize()))
    if rank < 2:
        os._exit(0)
    return [int(store.get(f"lost by {each}")) for each in range(3)]


@pytest.mark.processes
@pytest.mark.slow
def test_both_neighbours_of_a_stopped_process_notice():
    outcomes = processes.outcomes_of(one_is_stopped, 3)
    assert outcomes == {0: (True, (1, True)), 2: (True, (1, True))}


def one_ends_early(rank, calls):
    """The middle process ends before it has taken part, or as it calls; what the others say."""
    if rank == 1:
        Neighbours._call = lambda *_: os._exit(0)
    if rank == 1 and not calls:
        os._exit(0)
    with pytest.raises(PeerError) as caught:
        begin(rank)
    return str(caught.value)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("calls", [False, True])
def test_a_neighbour_that_ends_before_its_first_heartbeat_is_noticed_at_once(calls):
    """Its neighbours waited in the rendezvous store until their time-out, or took its silence for nothing."""
    outcomes = processes.outcomes_of(one_ends_early, 3, calls, timeout=45)
    assert {rank: ok for rank, (ok, _) in outcomes.items()} == {0: True, 2: True}, outcomes
    assert outcomes[0][1].startswith("stage 0 was waiting for "), outcomes


@pytest.mark.processes
@pytest.mark.slow
def test_an_end_is_no_silence():
    assert processes.outcomes_of(all_end, 3) == {2: (True, [0, 0, 0])}


def message(token, rank, said=b"t"):
    return struct.pack("!16sIc", token, rank, said)


def called(address):
    connection = socket.create_connection(address, TIMEOUT)
    connection.settimeout(TIMEOUT)
    return connection


def is_closed(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.fixture
def told(alone, monkeypatch):
    """What this process has told the others: the token of the run, and where it listens."""
    said = []
    monkeypatch.setattr(collectives, "everyone", lambda where, mine: said.extend(mine) or [mine])
    return said


@pytest.fixture
def heard(told):
    """The process of stage 0: where it listens, the token of its run, and whom it lost."""
    lost, _ = begin(0)
    return told[1], told[0].encode(), lost


@pytest.mark.slow
def test_strangers_are_cut_off_and_change_nothing(heard):
    address, token, lost = heard
    strangers = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        message(bytes(16), 1),
        message(token, 2),
        message(token, 7),
    ]
    for said in strangers:
        with called(address) as connection:
            connection.sendall(said)
            assert is_closed(connection), said
    held = [called(address) for _ in range(40)]
    assert is_closed(held[0]), "those that say nothing are few at any time"
    for _ in range(300):  # one that speaks as it goes was read after it was closed, and nobody was heard any more
        held.append(called(address))
        with suppress(OSError):
            held[-17].send(b"?")
    with called(address) as neighbour:
        neighbour.sendall(message(token, 1))
        assert neighbour.recv(21) == message(token, 0)
        with pytest.raises(OSError):
            while True:  # until the thread has closed it
                called(address).close()
                time.sleep(0.05)
        assert lost.get(timeout=TIMEOUT)[0] == 1, "it says nothing more"
    for connection in held:
        connection.close()


TOLD = [
    *(3, "one", ["127.0.0.1", "port"], "\x1b[2J"),
    *(["::1", 1 << 70], ["127.0.0.1", 70000], ["127.0.0.1", 0], ["\x1b[2J", 29500], ["nowhere", 29500]),
]


@pytest.mark.parametrize("sent", TOLD)
def test_an_address_that_is_none_is_one_sentence(alone, monkeypatch, sent):
    """Whoever reached the store could write one there: the process ended in a traceback."""
    monkeypatch.setattr(collectives, "everyone", lambda where, mine: [["0" * 16, sent], mine])
    with pytest.raises(WireError, match="process 0 must send its address, and sent ") as caught:
        begin(1)
    assert str(caught.value).isprintable()


@pytest.mark.slow
def test_a_neighbour_that_closes_before_the_first_step_is_lost(told):
    lost, pulse = queue.Queue(), Pulse()
    pulse.doing = lambda: Doing.BUILDING
    Neighbours(CHAIN, 0, pulse, Noted(), TIMEOUT).begin(lambda rank, said: lost.put((rank, said)))
    token, address = told
    with called(address) as neighbour:
        neighbour.sendall(message(token.encode(), 1, b"b"))
        assert neighbour.recv(1)
    rank, said = lost.get(timeout=TIMEOUT)
    assert (rank, said.partition(":")[0]) == (1, "closed its connection before the first step")


@pytest.mark.slow
def test_a_neighbour_that_closes_is_no_longer_expected(heard):
    address, token, lost = heard
    with called(address) as neighbour:
        neighbour.sendall(message(token, 1) * 3)
        assert neighbour.recv(1)
    with pytest.raises(queue.Empty):
        lost.get(timeout=2.5)
