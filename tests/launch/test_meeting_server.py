"""Replicas on several hosts: the meeting place that listens, and the world to it, over ZeroMQ in one process."""

import asyncio
import os
import resource
import socket
from dataclasses import replace

import pytest

pytest.importorskip("zmq", reason="needs pyzmq")

from support.meeting_host import LONG, TIMEOUT, Host, Meeting, met
from support.meeting_world import in_world
from thinwire.launch import cli
from thinwire.launch.run.crews.remote.settings import ProxySettings
from thinwire.launch.run.crews.remote.stream import (
    ACK,
    HELLO,
    LAUNCHER,
    PIECE,
    REFUSAL,
    UNKNOWN,
    VERSION,
    WELCOME,
    pack,
)
from thinwire.launch.shared.exit_codes import FailedError
from thinwire.pipeline.zeromq.keys import Keys


def test_replicas_exchange_and_the_meeting_place_ends_with_them(tmp_path):
    async def scene():
        async with met(tmp_path) as (place, settings):
            hosts = [Host(replace(settings, replica=replica)) for replica in range(2)]
            assert await asyncio.gather(*(host.begin() for host in hosts)) == [None, None]
            frames = [LONG + bytes([host.replica]) for host in hosts]
            exchanges = (host.exchange(3, frame, last=True) for host, frame in zip(hosts, frames, strict=True))
            found = await asyncio.gather(*exchanges)
            assert found[0].samples == {0: 4, 1: 4}
            assert found[0].frames == {1: [LONG + b"\1"]} and found[1].frames == {0: [LONG + b"\0"]}
            for host in hosts:
                host.gives(LONG, step=3)
            assert await asyncio.gather(*(host.leave() for host in hosts)) == [None, None]
            await asyncio.wait_for(place.serving, TIMEOUT)
            assert place.told[-1] == "all replicas have ended"
            assert {"replica 0 has come", "replica 1 has ended"} <= set(place.told)

    asyncio.run(scene())


def test_the_meeting_place_of_replicas_that_failed_does_not_say_that_they_have_ended_well(tmp_path):
    """It did, and with status 0."""

    async def scene():
        async with met(tmp_path) as (place, settings):
            hosts = [Host(replace(settings, replica=replica)) for replica in range(2)]
            assert await asyncio.gather(*(host.begin() for host in hosts)) == [None, None]
            await asyncio.gather(*(host.leave() for host in hosts))
            with pytest.raises(FailedError, match="no replica has reached the end of the run; their hosts say why"):
                await asyncio.wait_for(place.serving, TIMEOUT)
            assert "replica 0 has left before the end of the run" in place.told

    asyncio.run(scene())


@pytest.fixture
def few_files():
    """A shell's usual limit of open files, which strangers can use up; and what the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft // 2, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_strangers_change_nothing(tmp_path, few_files):
    """Some write garbage; one speaks ZeroMQ, and has other keys. Those with the keys are let in beside them.

    Strangers who held a thousand connections kept replicas out for as long as they liked.
    """

    async def scene():
        async with met(tmp_path) as (place, settings):
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few_files
            host, _, port = settings.address.partition(":")
            strangers = [socket.create_connection((host, int(port))) for _ in range(10)]
            for stranger in strangers:
                stranger.sendall(os.urandom(4096))
            Keys.fresh().write(tmp_path / "others")
            other = replace(settings, keys=str(tmp_path / "others"), replica=1, heartbeat=0.3, timeout=1.0)
            with_other_keys = Host(other)
            ending = await with_other_keys.leading
            assert ending.lasting and "was not heard for 1 s (wire.timeout)" in ending.text
            hosts = [Host(replace(settings, replica=replica)) for replica in range(2)]
            assert await asyncio.gather(*(host.begin() for host in hosts)) == [None, None]
            assert sorted(place.told) == ["replica 0 has come", "replica 1 has come"]
            for stranger in strangers:
                stranger.close()

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("replica", "agreed", "said"),
    [
        (1, {"model.name": '"vit"'}, 'these differ: model.name ("gpt2" at the meeting place, "vit" here)'),
        (1, {"the samples of training": "def"}, "the samples of training (abc at the meeting place, def here)"),
        (2, {}, "the run has replicas 0 to 1"),
    ],
)
def test_who_does_not_fit_is_sent_away_with_a_sentence(tmp_path, replica, agreed, said):
    async def scene():
        async with met(tmp_path) as (place, settings):
            first = Host(settings)
            while not place.told:
                await asyncio.sleep(0.01)
            second = Host(replace(settings, replica=replica, agreed={**settings.agreed, **agreed}))
            ending = await second.leading
            assert ending.lasting and said in ending.text
            assert place.told == ["replica 0 has come"]
            await first.leave()

    asyncio.run(scene())


def test_a_meeting_place_that_was_started_again_has_its_replicas_start_again(tmp_path):
    async def scene():
        async with met(tmp_path) as (place, settings):
            host = Host(replace(settings, heartbeat=1.0))
            while not place.told:
                await asyncio.sleep(0.01)
            await place.close()
            another = Meeting(Keys.read(tmp_path / "keys"), settings.address)
            ending = await host.leading
            assert not ending.lasting and "it has been started again, so this replica comes anew" in ending.text
            await another.close()

    asyncio.run(scene())


def test_an_address_that_is_none_is_a_sentence(tmp_path):
    async def scene():
        Keys.fresh().write(tmp_path / "keys")
        host = Host(ProxySettings("-:1", str(tmp_path / "keys"), 0, TIMEOUT, TIMEOUT, {}))
        ending = await host.leading
        assert ending.lasting and "replicas.meeting must be ADDRESS:PORT" in ending.text

    asyncio.run(scene())


def test_who_waits_in_vain_for_another_one_to_go_is_told_so(tmp_path):
    async def scene():
        async with met(tmp_path) as (place, settings):
            first = Host(settings)
            while not place.told:
                await asyncio.sleep(0.01)
            second = Host(replace(settings, timeout=0.5))
            ending = await second.leading
            assert ending.lasting and "because replica 0 is there already; end the other one" in ending.text
            await first.leave()

    asyncio.run(scene())


def test_a_silent_replica_is_lost_and_comes_anew():
    async def scene(world):
        _, server = world.enter(b"a", 0)
        await world.wait(5)
        assert world.told == ["replica 0 has come"]
        await world.wait(2)
        assert world.told[1:] == ["replica 0 is lost: nothing was heard of it for 6 s"]
        world.server.take(b"a", pack(ACK, 0))
        assert world.sent[b"a"][-1][0] == UNKNOWN
        kind, _, words = world.hello(b"b", 0, "session", server)
        assert kind == REFUSAL and not words["lasting"] and "was lost there" in words["text"]
        assert world.hello(b"c", 0, "another session")[0] == WELCOME

    in_world(scene)


def test_a_broken_connection_loses_nothing():
    async def scene(world):
        stream, server = world.enter(b"a", 0)
        await world.wait(1)
        stream.interrupt()
        stream.write(0, {"kind": "begin", "held": 0, "digest": "x"})
        kind, expected, _ = world.hello(b"b", 0, "session", server)
        assert kind == WELCOME and expected > 0
        stream.begin(lambda *packet: world.server.take(b"b", pack(*packet)), expected)
        await world.wait(11, b"b")
        assert any(kind == PIECE for kind, *_ in world.sent[b"b"]), "it may go on alone after the time-out"
        assert world.told == ["replica 0 has come"]

    in_world(scene)


def test_a_replica_has_one_host():
    async def scene(world):
        world.hello(b"a", 0, "session")
        kind, _, words = world.hello(b"b", 0, "another session")
        assert kind == REFUSAL and words["waits"] and words["text"] == "replica 0 is there already"

    in_world(scene)


def test_packets_that_are_none_change_nothing():
    async def scene(world):
        world.hello(b"a", 0, "session")
        endless = b'{"replica": 1e999, "session": "x", "agreed": {}, "server": null, "expected": 0}'
        hellos = [pack(HELLO, VERSION, words) for words in (b"?", b"[]", b"[" * 100_000, endless)]
        for parts in ([], [b"x"], [b"", b""], *hellos, pack(HELLO, 99, b"{}"), pack(ACK, 7)):
            world.server.take(b"a", parts)
            assert world.sent[b"a"][-1][0] == REFUSAL
        world.server.take(b"a", pack(b"?", 0))
        world.server.take(b"a", pack(PIECE, 0, b"\xff" * 100))
        await world.wait(1, b"a")
        assert not world.server.is_over

    in_world(scene)


def test_it_waits_for_replicas_that_may_come_back_before_it_ends(monkeypatch):
    async def scene(world):
        streams = [world.enter(bytes([replica]), replica)[0] for replica in range(2)]
        await world.wait(1, b"\0", b"\1")
        monkeypatch.setattr(world.server._meeting, "has_reached_end", lambda replica: replica == 0)
        streams[0].write(LAUNCHER, {"kind": "loses", "replica": 0, "for_good": True})
        await world.wait(7, b"\0")
        assert world.told[-2:] == ["replica 0 has ended", "replica 1 is lost: nothing was heard of it for 6 s"]
        assert not world.server.is_over
        await world.wait(11)
        assert world.server.is_over
        world.server.tell_end()
        assert world.told[-1] == "the run has ended without replica 1"

    in_world(scene)


def test_another_release_of_torch_is_told_and_let_in():
    async def scene(world):
        for replica, release in enumerate(["2.11", "2.13"]):
            kind, _, words = world.hello(
                bytes([replica]), replica, "session", agreed=[("the release of torch", release)]
            )
            assert kind == WELCOME
        said = "it has torch 2.13, and another replica has 2.11: their weights may differ in the last bits"
        assert said in words["noted"] and world.told == [f"replica 1 comes; {words['noted']}"]
        assert world.hello(b"c", 1, "session", agreed=[("the release of torch", "2.11")])[2]["noted"] is None

    in_world(scene)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--listen", "0.0.0.0:29600"], "--listen must name one address of this host"),
        (
            ["--listen", "0.0.0.00:29600"],
            "or [fd00::1]:29600, got 0.0.0.00:29600",
        ),
        (
            ["--listen", "10.0.0.1:99999"],
            "or [fd00::1]:29600, got 10.0.0.1:99999",
        ),
        (["--listen", "here"], "or [fd00::1]:29600, got here"),
        (["--listen", "fd00::1:29600"], "--listen must be ADDRESS:PORT"),
        (["--listen", "[::]:29600"], "--listen must name one address of this host"),
        (["--listen", "[fd00::1]:29600"], "replicas.membership must be elastic, and replicas.count above 1"),
        (["--listen", "127.0.0.1:29600"], "replicas.membership must be elastic, and replicas.count above 1"),
        ([], "the following arguments are required: --listen"),
    ],
)
def test_a_mistake_on_the_command_line_is_a_sentence(options, said, capsys):
    assert cli.main(["meet", "quickstart", *options]) == 2
    assert said in capsys.readouterr().err
