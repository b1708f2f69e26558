"""`thinwire doctor --peers`: who reaches whom between hosts, what is wrong where one is not reached, and strangers."""

import json
import os
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

from support.commands import THINWIRE, free_port, started
from support.hosts import WIRE, hosts
from support.tiny_run import write_recipe
from thinwire.launch import cli
from thinwire.launch.doctor import peers
from thinwire.launch.doctor.calls import MACHINES, Call, rate_of
from thinwire.pipeline.errors import OptionsError

in_namespaces = [pytest.mark.namespaces, pytest.mark.usefixtures("can_make_hosts")]
LIST = ["10.0.0.1:29500", "10.0.0.2:29500", "10.0.0.3:29500"]


def told(made, folder, *words, lists=(LIST, LIST, LIST), wait=30, **environment):
    """What the command prints on each host: the status, the document or nothing, and the errors."""
    with ExitStack() as stack:
        commands = [
            stack.enter_context(
                started(
                    host.command([*THINWIRE, "doctor", *words, "--peers", *places, "--wait", str(wait), "--json"]),
                    folder,
                    **environment,
                )
            )
            for host, places in zip(made, lists, strict=False)
        ]
        for command in commands:
            command.wait()
        return [
            (command.process.returncode, json.loads(command.stdout or "null"), command.stderr) for command in commands
        ]


def host_of(place):
    """The last number of its address."""
    return int(place.partition(":")[0].rpartition(".")[2])


def ways(document):
    """The rows of a document by hosts from and to: interface, latency, goodput, and what was found."""
    rows = document["tables"][0]["rows"]
    return {(host_of(one), host_of(other)): rest for one, other, *rest in rows}


def firewall(host, rules):
    """Rules for what comes in, by nft."""
    text = f"table inet t {{\nchain input {{\ntype filter hook input priority 0; {rules}\n}}\n}}"
    subprocess.run(host.command(["nft", "-f", "-"]), input=text, text=True, check=True)


@pytest.fixture
def needs_nft():
    nft = subprocess.run(["sh", "-c", "command -v nft"], capture_output=True, check=False)
    if nft.returncode:
        pytest.skip("needs root and nft, for a firewall in a network namespace")


class TestHosts:
    pytestmark = in_namespaces

    def test_all_print_the_same_ways_with_the_goodput_of_each_and_the_cost_of_a_recipe(self, tmp_path):
        write_recipe(tmp_path)
        with hosts(3, "100mbit,100mbit,20mbit") as made:
            (first, document, _), *others = told(made, tmp_path, "tiny.yaml")
        assert [first, *(status for status, *_ in others)] == [0, 0, 0]
        assert all(other["tables"] == document["tables"] for _, other, _ in others)
        found = ways(document)
        assert {way[0] for way in found.values()} == {WIRE} and {way[3] for way in found.values()} == {"reached"}
        for pair, (_, latency, rate, _) in found.items():
            # the other cores and the timers of the kernel take some of it; a link lets through no more than its rate
            assert latency > 0 and rate <= (20 if 3 in pair else 100) * 1.02, found
            assert rate > 10 and (3 in pair or rate > 25), found
        slowest = min(found[pair][2] for pair in ((1, 2), (2, 1), (2, 3), (3, 2)))
        [note] = document["notes"]
        assert note.startswith(f"thinwire predict tiny.yaml --bandwidth {slowest * 1e3:.0f}kbit --latency "), note
        assert " samples/s with q(4)/q(8), " in note and " for 2 steps, if every link" in note, note

    def test_a_closed_port_and_a_closed_range_of_ports_are_told_apart(self, tmp_path, needs_nft):
        with hosts(3, "100mbit") as made:
            firewall(made[1], "policy accept; tcp dport 29500 drop")
            firewall(made[2], "policy drop; ct state established,related accept; tcp dport 29500 accept")
            answers = told(made, tmp_path)
        assert [status for status, *_ in answers] == [1, 1, 1]
        found = ways(answers[0][1])
        for one in (1, 3):
            assert found[one, 2][3].startswith("no answer within 5 s: a firewall drops what comes to port 29500")
        for one in (1, 2):
            assert found[one, 3][3].startswith("port 29500 answers, and port "), found
            assert "let its machines reach all ports of each other" in found[one, 3][3]
        assert {found[one, 1][3] for one in (2, 3)} == {"reached"}

    def test_a_machine_that_does_not_reach_the_first_one_is_named_by_it_and_says_why(self, tmp_path, needs_nft):
        with hosts(3, "100mbit") as made:
            firewall(made[0], f"policy accept; ip saddr {made[1].address} drop")
            (_, document, _), cut_off, other = told(made, tmp_path, wait=6)
        found = ways(document)
        assert found[2, 1][3] == "it did not call 10.0.0.1:29500 within 6 s; what it prints itself says why"
        assert found[3, 2][3] == found[1, 3][3] == "reached" and other[1]["tables"] == document["tables"]
        assert cut_off[0] == 1 and cut_off[1] is None
        assert "the first machine, 10.0.0.1:29500: no answer within 5 s: a firewall drops" in cut_off[2]

    def test_lists_that_differ_and_a_machine_that_is_not_there(self, tmp_path):
        with hosts(2, "100mbit") as made:
            (_, document, _), other = told(made, tmp_path, lists=(LIST, LIST[:2]), wait=6)
        assert ways(document)[1, 3][3].startswith("no route (No route to host): the machine is off")
        assert ways(document)[1, 2][3].startswith("refused: nothing listens at port 29500")
        assert other[0] == 1
        assert "its list is --peers 10.0.0.1:29500 10.0.0.2:29500 10.0.0.3:29500; write the same" in other[2]

    def test_a_way_over_tailscale_is_direct_or_relayed(self, tmp_path):
        """On the interface and the addresses that its pages name; the program is a stand-in."""
        stand_in(tmp_path)
        places = ["100.64.0.1:29500", "100.64.0.2:29500"]
        with hosts(2, "100mbit") as made:
            for host in made:
                for words in (
                    f"address flush dev {WIRE}",
                    f"link set {WIRE} down name tailscale0",
                    "link set tailscale0 up",
                ):
                    subprocess.run(["ip", "-n", host.name, *words.split()], check=True)
                address = f"100.64.0.{host.index + 1}/10"
                subprocess.run(["ip", "-n", host.name, "address", "add", address, "dev", "tailscale0"], check=True)
            path = f"{tmp_path}:{os.environ['PATH']}"
            (status, document, _), _ = told(made, tmp_path, lists=(places, places), PATH=path)
        assert status == 0 and document["interface"] == "tailscale0"
        over = {pair: way[0] for pair, way in ways(document).items()}
        assert over[1, 2] == "tailscale0, relayed by fra"
        assert over[2, 1] == "tailscale0, direct or relayed: see tailscale ping 100.64.0.1"


def meeting(places, index, port=0):
    """One of several machines on loopback."""
    found = peers.resolved(places)
    return peers.Meeting(found, index, "lo", peers.listening(found[index].address, port or found[index].port))


@pytest.fixture
def pair():
    """The two machines of a list on loopback, and its places."""
    places = [f"127.0.0.{number}:{free_port()}" for number in (1, 2)]
    return meeting(places, 0), meeting(places, 1), places


def test_a_stranger_is_hung_up_on_and_one_of_the_list_gets_no_more_than_it_may(pair):
    first, second, places = pair
    asks = json.dumps({"peers": places, "join": None, "versions": "", "time": 0}).encode()
    for source, sent in (
        ("127.0.0.9", asks + b"\n"),
        ("127.0.0.2", b"x" * (1 << 17)),
        ("127.0.0.2", b"[" * 60000),
    ):
        with socket.create_connection(("127.0.0.1", first.peers[0].port), 10, (source, 0)) as stranger:
            answer = b""
            with suppress(ConnectionError):  # it hung up before it had read all
                stranger.sendall(sent)
                answer = stranger.recv(1)
            assert answer == b""
    joined = threading.Thread(target=second.meet, args=[10, []], daemon=True)
    joined.start()
    found, notes = first.meet(10, [])
    assert [way.fault for way in found.values()] == ["", ""] and notes == []
    assert second._measured(0).rate > 0
    with socket.create_connection(("127.0.0.1", first.peers[0].port), 10, ("127.0.0.2", 0)) as late:
        call = Call(late)
        call.say(peers=places, join=1, versions="", time=0)
        assert call.heard()["refused"].startswith("it measures already, without this machine")


@pytest.mark.parametrize("late", [range(3), range(1, 4), range(8, 11)], ids=["at first", "between", "at last"])
def test_what_arrives_late_and_at_once_is_not_what_a_link_carries(late):
    """Of a link of 20 Mbit/s, a machine that was busy told 23.6, and one behind a lost packet 25.9."""
    arrived = [(place / 10, 250_000 * (late[0] if place in late else place)) for place in range(11)]
    assert rate_of(arrived) == pytest.approx(20e6)


def test_a_link_that_brings_two_packets_is_measured():
    assert rate_of([(1.5, 1400), (3.0, 2800)]) == pytest.approx(8 * 1400 / 1.5)


def test_the_longest_list_is_told_whole_to_machines_that_came():
    """All ways in one line were longer than a line may be, and were told only once the last one was measured."""
    port = free_port()
    places = [f"127.0.0.{number}:{port}" for number in range(1, MACHINES + 1)]
    first, last = meeting(places, 0), meeting(places, MACHINES - 1)
    first._asked = lambda one, other, wait: peers.Way(fault=f"{one} to {other}: " + "x" * 500)
    with ThreadPoolExecutor() as pool:
        told_last = pool.submit(last.meet, 2, [])
        found, _ = first.meet(1, [])
    assert len(found) == MACHINES * (MACHINES - 1) and told_last.result() == (found, [])


def test_another_program_at_the_port_of_a_peer_is_told_in_its_own_words(pair):
    *_, places = pair
    places = [places[0], f"127.0.0.3:{free_port()}"]
    found = peers.resolved(places)
    one = peers.Meeting(found, 0, "lo", peers.listening("127.0.0.1", free_port()))
    assert one._measured(1).fault.startswith("refused: nothing listens at port ")
    with socket.create_server(("127.0.0.3", found[1].port)) as server:

        def speak():
            for words in (b"SSH-2.0-\x1b[1mOpenSSH\r\n", b""):
                connection, _ = server.accept()
                connection.recv(1 << 16)
                connection.sendall(words)
                connection.close()

        threading.Thread(target=speak, daemon=True).start()
        fault = one._measured(1).fault
        assert fault.startswith("another program listens there, and says b'SSH-2.0-\\x1b[1mOpenSSH"), fault
        assert one._measured(1).fault.startswith("it hung up: another program listens at port ")


def test_other_versions_and_another_time_are_a_sentence(pair):
    first, _, places = pair
    first._joined[1] = None, "thinwire 0.0.9 and torch 2.11.0", -95.2
    others, clock = first._differences()
    assert others.startswith(
        f"{places[1]} has thinwire 0.0.9 and torch 2.11.0, {places[0]} has thinwire 0.1.0 and torch "
    )
    assert clock == f"the clock of {places[1]} differs by -95 s from the clock of {places[0]}; set both by NTP"


@pytest.mark.parametrize(
    ("places", "said"),
    [
        (["10.0.0.1", "10.0.0.2:1"], "must be HOST:PORT for each machine, got '10.0.0.1'; a recipe goes before it"),
        (["nobody.invalid:1", "10.0.0.2:1"], "no address is known here for nobody.invalid:1: .*; write an address"),
        (["10.0.0.2:1"], "must name 2 to 32 machines, each once, got 10.0.0.2:1"),
        (["10.0.0.2:1", "10.0.0.2:1"], "must name 2 to 32 machines, each once"),
        (["localhost:1", "10.0.0.2:1"], "localhost:1 is loopback here, which others cannot reach"),
        (["[fd00::1]:1", "10.0.0.2:1"], "must be all IPv4 or all IPv6"),
        (
            ["198.51.100.7:1", "198.51.100.8:1"],
            "must name the first address of an interface of this machine, .*127.0.0.1.*NAT.* VPN",
        ),
    ],
)
def test_a_list_that_cannot_be_is_a_sentence(places, said):
    with pytest.raises(OptionsError, match=said):
        peers.own_place(peers.resolved(places))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nosuch"], "RECIPE must be a packaged name or the path of a YAML file, got 'nosuch'"),
        (["quickstart", "--training.stepz", "3"], "there is no option --training.stepz"),
        (["--gpus", "2"], "argument --peers: not allowed with argument --gpus"),
    ],
)
def test_a_mistake_in_other_words_is_told_before_the_others_are_asked(words, said, capsys):
    assert cli.main(["doctor", *words, "--peers", "127.0.0.1:1", "127.0.0.2:1"]) == 2
    assert capsys.readouterr().err.startswith(said)


def test_a_port_in_use_is_a_sentence(capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert cli.main(["doctor", "--peers", f"127.0.0.1:{port}", "127.0.0.2:1"]) == 2
    assert (
        capsys.readouterr().err == f"port {port} is in use; end what listens there, or write another on every machine\n"
    )


STATUS = {"Peer": {"key": {"TailscaleIPs": ["100.64.0.2", "fd7a:115c:a1e0::2"], "CurAddr": "", "Relay": "fra"}}}


def stand_in(folder):
    """A program `tailscale` in a folder, which prints STATUS."""
    command = folder / "tailscale"
    command.write_text(f"#!/bin/sh\necho '{json.dumps(STATUS)}'\n")
    command.chmod(0o755)
    return command


def test_tailscale_says_whether_a_way_is_relayed(monkeypatch, tmp_path):
    """By what `tailscale status --json` prints: https://pkg.go.dev/tailscale.com/ipn/ipnstate#PeerStatus."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert peers.path(WIRE, "100.64.0.2") == ""
    assert peers.path("tailscale0", "100.64.0.2") == ", direct or relayed: see tailscale ping 100.64.0.2"
    command = stand_in(tmp_path)
    assert peers.path("tailscale0", "100.64.0.2") == ", relayed by fra"
    command.write_text(command.read_text().replace('"CurAddr": ""', '"CurAddr": "192.0.2.7:41641"'))
    assert peers.path("tailscale0", "fd7a:115c:a1e0::2") == ", direct"
    assert peers.path("tailscale0", "100.64.0.3") == ", direct or relayed: see tailscale ping 100.64.0.3"
