"""The private network of docs/how-to/several-homes.md, made with the commands of the page: a run trains through it."""

import json
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.commands import THINWIRE, TORCHRUN, started
from support.hosts import hosts
from support.pages import DOCS, blocks
from support.run_files import digest, summary
from support.tiny_run import write_recipe
from thinwire.launch import cli

TOOLS = ("wg", "wireguard-go", "nft")
pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.usefixtures("can_make_hosts"),
    pytest.mark.skipif(
        not all(map(shutil.which, TOOLS)) or not Path("/dev/net/tun").exists(),
        reason="a private network takes wireguard-go, wireguard-tools, nftables and /dev/net/tun",
    ),
]

ASK, INSTALL, OF_A, OF_B, FIREWALL, RUN = blocks(DOCS / "how-to/several-homes.md", "sh")
PRIVATE = ["10.77.0.1", "10.77.0.2"]
CALL = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2).close(); print('answers')"


class Machine:
    """A host with a /run and an /etc of WireGuard of its own, as another machine has."""

    def __init__(self, host):
        self.host = host
        own = "mount -t tmpfs tmpfs /etc/wireguard && mkdir -p /run/wireguard && mount -t tmpfs tmpfs /run/wireguard"
        command = host.command(
            ["unshare", "--mount", "sh", "-c", f"mkdir -p /etc/wireguard && {own} && echo ready && cat"]
        )
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout.readline() == "ready\n"

    def command(self, arguments):
        return ["nsenter", "--target", str(self._holder.pid), "--mount", "--net", *map(str, arguments)]

    def shell(self, script):
        done = subprocess.run(self.command(["sh", "-ec", script]), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{script}\n{done.stderr}"
        return done.stdout

    def close(self):
        self._holder.stdin.close()
        self._holder.wait()


def answers(command, address):
    """Whether the port of the rendezvous answers to a host, which is named by its way to run a command."""
    call = command([sys.executable, "-c", CALL, address, "29500"])
    return subprocess.run(call, capture_output=True, text=True, check=False).stdout == "answers\n"


def test_a_run_trains_through_the_private_network_and_a_stranger_reaches_nothing(tmp_path, monkeypatch):
    write_recipe(tmp_path)
    install = INSTALL.partition("\n")[2].replace("ip link add wg0 type wireguard", "wireguard-go wg0")
    with hosts(3, "100mbit") as (*made, stranger), ExitStack() as open_ones:
        machines = [Machine(host) for host in made]
        for machine in machines:
            open_ones.callback(machine.close)
        keys = [re.search(r"^\S{43}=$", machine.shell(install), re.MULTILINE)[0] for machine in machines]
        for machine, commands in zip(machines, (OF_A, OF_B), strict=True):
            for name, host, key in zip("AB", made, keys, strict=True):
                commands = commands.replace(f"PUBLIC_KEY_OF_{name}", key).replace(".".join(4 * name), host.address)
            machine.shell(commands + FIREWALL)

        # the doctor finds what the page says: one another over wg0, and nothing at the addresses outside
        ask = ASK.split()[2:]
        words = ["doctor", "--wait", "60", "--json", *ask[1:]]
        asked = [open_ones.enter_context(started(each.command([*THINWIRE, *words]), tmp_path)) for each in made]
        assert [each.wait() for each in asked] == [0, 0], asked[0].stdout + asked[1].stderr
        rows = json.loads(asked[1].stdout)["tables"][0]["rows"]
        assert [(row[2], row[5]) for row in rows] == [("wg0", "reached")] * 2, rows
        outside = [f"{host.address}:29500" for host in made]
        words = ["doctor", "--wait", "3", "--json", "--peers", *outside]
        asked = [open_ones.enter_context(started(each.command([*THINWIRE, *words]), tmp_path)) for each in made]
        assert [each.wait() for each in asked] == [1, 1]
        assert "no answer within 5 s: a firewall drops what comes to port 29500" in asked[1].stderr

        def node(rank):
            words = RUN.replace("\\\n", "").replace("--node-rank 0", f"--node-rank {rank}")
            ours = {"--nproc-per-node 2": "--nproc-per-node 1", "quickstart": "tiny.yaml", "runs/private": "run"}
            for of_page, here in ours.items():
                words = words.replace(of_page, here)
            setting, program, *words = words.split()
            assert program == "torchrun"
            environment = dict([setting.split("=")])
            return open_ones.enter_context(started(made[rank].command([*TORCHRUN, *words]), tmp_path, **environment))

        first = node(0)
        first.wait_until(lambda: answers(machines[1].command, PRIVATE[0]))
        assert answers(machines[0].command, made[0].address)
        assert not answers(machines[1].command, made[0].address)
        assert not answers(stranger.command, made[0].address)
        second = node(1)
        assert (first.wait(), second.wait()) == (0, 0), first.stderr + second.stderr
        received = sum(int(machine.shell("wg show wg0 transfer").split()[1]) for machine in machines)
    told = summary(tmp_path / "run")
    assert received > told["bytes_sent"] > 0
    monkeypatch.chdir(tmp_path)
    assert cli.main(["simulate", "tiny.yaml", "--output", "simulated"]) == 0
    assert told["weights_digest"] == digest(tmp_path / "simulated")
