"""Replicas on several hosts: their membership server and their launchers, over ZeroMQ in one process; and without."""

import os
import resource
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

pytest.importorskip("zmq", reason="needs pyzmq")

from support.membership_hosts import LONG, Host, Serving, serving
from support.membership_world import World
from thinwire.launch import cli
from thinwire.launch.shared.control_groups import allow_many_files
from thinwire.pipeline.processes.zeromq.keys import Keys


def together(*calls):
    """Call several functions at once; what they return."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def begun(*hosts):
    return together(*(lambda host=host: host.attendance.begin(0, "x") for host in hosts))


@pytest.mark.slow
def test_replicas_exchange_and_the_server_is_over_with_them(tmp_path):
    with serving(tmp_path) as (server, settings):
        hosts = [Host(replace(settings, replica=replica)) for replica in range(2)]
        assert begun(*hosts) == [None, None]
        found = together(
            *(lambda host=host: host.exchange(3, LONG + bytes([host.replica]), last=True) for host in hosts)
        )
        assert found[0].samples == {0: 4, 1: 4}
        assert found[0].frames == {1: [LONG + b"\1"]} and found[1].frames == {0: [LONG + b"\0"]}
        for host in hosts:
            host.gives(LONG, step=3)
        assert [host.leave() for host in hosts] == [None, None]
        server.wait_for("replica 0 has come", "replica 0 has ended", "replica 1 has ended")
        assert server.server.is_over and server.server.ended() == "all replicas have ended"


@pytest.mark.slow
def test_the_server_of_replicas_that_failed_does_not_say_that_they_have_ended_well(tmp_path):
    """It did, and with status 0."""
    with serving(tmp_path) as (server, settings):
        hosts = [Host(replace(settings, replica=replica)) for replica in range(2)]
        assert begun(*hosts) == [None, None]
        for host in hosts:
            host.leave()
        server.wait_for(*(f"replica {replica} has left before the end of the run" for replica in range(2)))
        assert server.server.is_over and server.server.ended() is None


@pytest.fixture
def few_files():
    """A shell's usual limit of open files, which strangers can use up; and what the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft // 2, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_strangers_change_nothing(tmp_path, few_files):
    """Some write garbage; one speaks ZeroMQ, and has other keys. Those with the keys are let in beside them.

    Strangers who held a thousand connections kept replicas out for as long as they liked.
    """
    allow_many_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few_files
    with serving(tmp_path) as (server, settings):
        host, _, port = settings.place.partition(":")
        strangers = [socket.create_connection((host, int(port))) for _ in range(10)]
        for stranger in strangers:
            stranger.sendall(os.urandom(4096))
        Keys.fresh().write(tmp_path / "others")
        other = replace(settings, keys=str(tmp_path / "others"), replica=1, heartbeat=0.3, timeout=1.0)
        ending = Host(other).ending()
        assert ending.lasting and "did not answer for 1 s (wire.timeout)" in ending.text
        hosts = [Host(replace(settings, replica=replica)) for replica in range(2)]
        assert begun(*hosts) == [None, None]
        assert sorted(server.told) == ["replica 0 has come", "replica 1 has come"]
        for each in strangers:
            each.close()


@pytest.mark.parametrize(
    ("replica", "agreed", "said"),
    [
        (1, {"model.name": '"vit"'}, 'these differ: model.name ("gpt2" at the server, "vit" here)'),
        (1, {"the samples of training": "def"}, "the samples of training (abc at the server, def here)"),
        (2, {}, "the run has replicas 0 to 1"),
    ],
)
def test_who_does_not_fit_is_refused_with_a_sentence(tmp_path, replica, agreed, said):
    with serving(tmp_path) as (server, settings):
        Host(settings)
        server.wait_for("replica 0 has come")
        ending = Host(replace(settings, replica=replica, agreed={**settings.agreed, **agreed})).ending()
        assert ending.lasting and said in ending.text
        assert server.told == ["replica 0 has come"]


def test_a_server_that_was_started_again_has_its_replicas_start_again(tmp_path):
    with serving(tmp_path) as (server, settings):
        host = Host(replace(settings, heartbeat=1.0))
        server.wait_for("replica 0 has come")
        server.mesh.close()
        another = Serving(Keys.read(tmp_path / "keys"), int(settings.place.partition(":")[2]))
        ending = host.ending()
        assert not ending.lasting and "starts again: it was started again, or received nothing" in ending.text
        another.mesh.close()


@pytest.mark.slow
def test_who_waits_in_vain_for_another_one_to_go_is_told_so(tmp_path):
    with serving(tmp_path) as (server, settings):
        Host(settings)
        server.wait_for("replica 0 has come")
        ending = Host(replace(settings, timeout=1.0)).ending()
        assert ending.lasting and "because replica 0 is there already; end the other one" in ending.text


def test_a_message_that_is_too_long_is_refused_before_it_arrives(tmp_path):
    with serving(tmp_path) as (server, settings):
        hosts = [Host(replace(settings, replica=replica)) for replica in range(2)]
        assert begun(*hosts) == [None, None]
        hosts[0].gives(bytes(2 << 20))
        for client in (hosts[0].client, hosts[0].launcher.client):
            assert "a message must have at most 1048576 bytes, got 2097" in hosts[0].ending(client).text
        assert hosts[0].ending().lasting
        assert server.told[-1].startswith("replica 0 is lost: it sent an invalid message: a message must have at most")
        assert hosts[1].launcher.client.ending is None


def test_a_silent_replica_is_lost_and_may_come_again():
    world = World()
    world.enter(1, 0)
    world.begin(2, 0)
    world.wait(5)
    assert world.told == ["replica 0 has come"]
    world.wait(2)
    assert world.told[1:] == ["replica 0 is lost: it sent nothing for 6 s"]
    assert world.forgotten == {1, 2}, "the network refuses them from now on"
    world.enter(3, 0, "another")
    assert world.told[-1] == "replica 0 has come"


def test_a_server_that_had_no_turn_itself_loses_nobody():
    world = World()
    world.enter(1, 0)
    world.now += 100
    world.server.look()
    world.wait(1, 1)
    assert world.told == ["replica 0 has come"]


def test_a_replica_has_one_host():
    world = World()
    world.enter(1, 0)
    kind, words = world.greet(2, 0)
    assert kind == "wait" and words["text"] == "replica 0 is there already"


def test_a_process_may_be_faster_than_its_launcher_and_an_earlier_one_is_not_heard():
    world = World()
    world.enter(1, 0)
    world.enter(2, 1)
    world.begin(3, 0)
    world.begin(4, 1, life="next")
    assert 3 not in world.sent, "the other one may have newer weights"
    world.say(2, "loses", replica=1, life="life 1", for_good=False)
    world.say(2, "comes", replica=1, life="next 1")
    assert [world.answers(peer)[0] for peer in (3, 4)] == ["go", "go"]
    world.begin(5, 1)
    assert 5 not in world.sent and world.told[-1] == "replica 1 has come"


def test_it_waits_for_replicas_that_may_come_back_before_it_is_over(monkeypatch):
    world = World()
    for replica in range(2):
        world.enter(replica, replica)
    monkeypatch.setattr(world.server._rules, "has_reached_end", lambda replica: replica == 0)
    world.wait(1, 0, 1)
    world.say(0, "loses", replica=0, life="life 0", for_good=True)
    world.wait(7, 0)
    assert world.told[-2:] == ["replica 0 has ended", "replica 1 is lost: it sent nothing for 6 s"]
    assert not world.server.is_over
    world.wait(11)
    assert world.server.is_over and world.server.ended() == "the run has ended without replica 1"


def test_another_release_of_torch_is_told_and_let_in():
    world = World()
    for replica, release in enumerate(["2.11", "2.13"]):
        kind, words = world.greet(replica, replica, [("the release of torch", release)])
        assert kind == "welcome"
    said = "it has torch 2.13, and another replica has 2.11: their weights may differ in the last bits"
    assert said in words["noted"] and world.told == [f"replica 1 comes; {words['noted']}"]
    assert world.greet(1, 1, [("the release of torch", "2.11")])[1]["noted"] == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--listen", "0.0.0.0:29600"], "--listen must name one address of this host"),
        (["--listen", "0.0.0.00:29600"], "or [fd00::1]:29600, got 0.0.0.00:29600"),
        (["--listen", "10.0.0.1:99999"], "or [fd00::1]:29600, got 10.0.0.1:99999"),
        (["--listen", "here"], "or [fd00::1]:29600, got here"),
        (["--listen", "fd00::1:29600"], "--listen must be ADDRESS:PORT"),
        (["--listen", "[::]:29600"], "--listen must name one address of this host"),
        (["--listen", "[fd00::1]:29600"], "replicas.membership must be elastic, and replicas.count above 1"),
        (["--listen", "127.0.0.1:29600"], "replicas.membership must be elastic, and replicas.count above 1"),
        ([], "the following arguments are required: --listen"),
    ],
)
def test_a_mistake_on_the_command_line_is_a_sentence(options, said, capsys):
    assert cli.main(["server", "quickstart", *options]) == 2
    assert said in capsys.readouterr().err
