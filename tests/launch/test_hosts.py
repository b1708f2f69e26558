"""Hosts on this kernel: they reach each other only, through the links asked for, and leave nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from support.wire_bytes import bytes_received, bytes_sent
from thinwire.launch.hosts import namespaces
from thinwire.launch.hosts.namespaces import Cluster, ClusterError, missing, processes_in, remove_orphans
from thinwire.launch.shared import probes
from thinwire.launch.shared.links import Links

PAIR = Links(num_hosts=2, bandwidth=100)


def real(test):
    """Mark a test that makes hosts."""
    return pytest.mark.namespaces(pytest.mark.usefixtures("can_make_hosts")(test))


RECEIVE = """
import socket
with socket.create_server(("0.0.0.0", 5000)) as server:
    print("ready", flush=True)
    stream, _ = server.accept()
    received = 0
    while some := stream.recv(2**20): received += len(some)
print(received)
"""
SEND = "import socket, sys; socket.create_connection((sys.argv[1], 5000)).sendall(bytes(int(sys.argv[2])))"


def listed_namespaces():
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


def qdiscs(name):
    """What shapes in a namespace: (device, kind, bits a second or 0, bytes that passed), sorted."""
    command = ["tc", "-n", name, "-s", "-j", "qdisc", "show"]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return sorted(
        (qdisc["dev"], qdisc["kind"], 8 * qdisc["options"].get("rate", 0), qdisc["bytes"])
        for qdisc in told
        if qdisc["kind"] != "noqueue"
    )


def shapes(name):
    """The same without the bytes."""
    return [shape[:3] for shape in qdiscs(name)]


def send(here, there, count):
    """Send bytes over TCP from one host to another."""
    with subprocess.Popen(
        there.command([sys.executable, "-c", RECEIVE]), stdout=subprocess.PIPE, text=True
    ) as receiver:
        assert receiver.stdout.readline() == "ready\n"
        subprocess.run(here.command([sys.executable, "-c", SEND, there.address, str(count)]), check=True, timeout=60)
        assert receiver.stdout.read() == f"{count}\n"


@real
def test_bytes_cross_the_wire_in_packets_and_are_counted_at_both_ends():
    with Cluster(PAIR) as (here, there):
        before = bytes_sent(here), bytes_received(there)
        send(here, there, 1_000_000)
        counts = bytes_sent(here) - before[0], bytes_received(there) - before[1]
    # TCP hands over pieces of up to 64 kB with one header of 66 bytes. The bucket holds 4000 bytes, so a piece of more
    # than two packets is cut into them, and each has a header
    for count in counts:
        assert 1e6 * (1 + 66 / (2 * 1448)) <= count <= 1e6 * 1.1


@real
def test_links_are_shaped_at_both_ends_and_can_be_changed():
    cluster = Cluster(PAIR)
    with cluster as made:
        switch = made[0].name.removesuffix("-0") + "-switch"
        assert shapes(made[0].name) == shapes(made[1].name) == [("wire", "tbf", 100_000_000)]
        assert shapes(switch) == [("port0", "tbf", 100_000_000), ("port1", "tbf", 100_000_000)]
        cluster.reshape(Links(bandwidth=1000, overrides={(0, 1): 20}))
        assert shapes(made[0].name) == [("wire", "htb", 0), ("wire", "tbf", 20_000_000), ("wire", "tbf", 1_000_000_000)]
        assert shapes(made[1].name) == [("wire", "tbf", 1_000_000_000)]
        cluster.reshape(Links())
        assert shapes(made[0].name) == shapes(switch) == []
        with pytest.raises(ClusterError, match="a cluster cannot change its number of hosts, got 3 in place of 2"):
            cluster.reshape(Links(num_hosts=3))


@real
def test_only_what_goes_over_a_link_of_its_own_takes_its_bucket():
    with Cluster(Links(num_hosts=3, bandwidth=200, overrides={(0, 1): 100})) as made:
        send(made[0], made[1], 500_000)
        send(made[0], made[2], 300_000)
        passed = {rate: count for _, kind, rate, count in qdiscs(made[0].name) if kind == "tbf"}
        switch = made[0].name.removesuffix("-0") + "-switch"
        at_port = {rate: count for device, kind, rate, count in qdiscs(switch) if (device, kind) == ("port1", "tbf")}
    assert 500_000 <= passed[100_000_000] <= 550_000
    assert 300_000 <= passed[200_000_000] <= 350_000
    assert 500_000 <= at_port[100_000_000] <= 550_000


@real
def test_hosts_and_what_runs_in_them_are_removed_whatever_happens():
    with pytest.raises(ZeroDivisionError), Cluster(PAIR) as made:
        names = {host.name for host in made}
        assert names <= listed_namespaces()
        sleeper = subprocess.Popen(made[0].command(["sleep", "60"]))
        while sleeper.pid not in processes_in(made[0].name):
            assert sleeper.poll() is None
            time.sleep(0.05)
        raise ZeroDivisionError
    assert sleeper.wait() == -signal.SIGKILL
    assert not names & listed_namespaces()


@real
def test_hosts_of_a_killed_process_are_removed_by_the_next():
    code = (
        "import os\nfrom thinwire.launch.hosts.namespaces import *\n"
        "with Cluster(Links()) as hosts: print(hosts[0].name, flush=True); os._exit(0)"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    name = killed.stdout.strip()
    assert name in listed_namespaces()
    with Cluster(PAIR) as made:
        assert name not in listed_namespaces()
        assert remove_orphans() == []
        assert {host.name for host in made} <= listed_namespaces()


@real
def test_a_network_made_half_way_is_removed(monkeypatch):
    monkeypatch.setattr(namespaces.shaping, "shaping", lambda prefix, links: [["tc", "-n", f"{prefix}-0", "nonsense"]])
    with pytest.raises(ClusterError, match=r"`tc -n .* nonsense`: "), Cluster(PAIR):
        pass
    ours = f"{namespaces.NETWORK_PREFIX}-{os.getpid()}-"  # other processes of this machine may make hosts meanwhile
    assert not [name for name in listed_namespaces() if name.startswith(ours)]


def test_who_is_not_root_is_told_before_anything_is_made(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(namespaces, "_run", lambda command: pytest.fail(f"ran {command}"))
    said = "a cluster needs root, for network namespaces and traffic control; start the command with sudo"
    with pytest.raises(ClusterError) as caught, Cluster(PAIR):
        pass
    assert str(caught.value) == said


def test_absent_tools_are_named(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None)
    assert missing(PAIR) == "a cluster needs ip and tc; install iproute2"


@pytest.mark.parametrize(
    ("links", "kind", "said"),
    [
        (PAIR, "tbf", "a bandwidth needs the kernel's tbf (unknown); load it with `modprobe sch_tbf`, or remove --b"),
        (
            Links(overrides={(0, 1): 1}),
            "htb",
            "a link with its own bandwidth needs the kernel's htb (unknown); load it",
        ),
        (Links(latency=1), "netem", "latency and loss need the kernel's netem (unknown); load it with `modprobe sch_n"),
    ],
)
def test_what_the_kernel_lacks_is_told_with_what_to_do(monkeypatch, links, kind, said):
    def probe(*qdiscs):
        lacking = any(qdisc.startswith(kind) for qdisc in qdiscs)
        return probes.Finding("unknown", "missing") if lacking else probes.Finding("works")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(namespaces, "probe_namespace", probe)
    assert missing(links).startswith(said)
    assert missing(Links()) == ""
