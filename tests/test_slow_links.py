"""The hosts of examples/slow_links.py: they reach each other at the speed asked for, and nothing of them stays."""

import signal
import subprocess
import sys

import pytest

from support.commands import completed, started
from support.hosts import hosts, made_by, slow_links
from support.pages import ROOT
from support.wire_bytes import bytes_received, bytes_sent

pytestmark = [pytest.mark.namespaces, pytest.mark.usefixtures("can_make_hosts")]

RUN = [sys.executable, ROOT / "examples/slow_links.py"]
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


def test_bytes_cross_the_wire_in_packets_and_are_counted_at_both_ends():
    with hosts(2, "20mbit") as (here, there):
        before = bytes_sent(here), bytes_received(there)
        with subprocess.Popen(
            there.command([sys.executable, "-c", RECEIVE]), stdout=subprocess.PIPE, text=True
        ) as receiver:
            assert receiver.stdout.readline() == "ready\n"
            subprocess.run(here.command([sys.executable, "-c", SEND, there.address, "1000000"]), check=True, timeout=60)
            assert receiver.stdout.read() == "1000000\n"
        counts = bytes_sent(here) - before[0], bytes_received(there) - before[1]
        shaped = slow_links.run(f"tc -n {here.name} qdisc show dev wire")
    # a piece of up to 64 kB has one header of 66 bytes; the bucket is smaller, so the kernel cuts it first
    assert all(1_040_000 < count < 1_060_000 for count in counts), counts
    assert "tbf" in shaped and "rate 20Mbit" in shaped, shaped


def test_each_host_may_have_a_rate_of_its_own():
    with hosts(3, "1gbit,20mbit,none") as made:
        shaped = [slow_links.run(f"tc -n {host.name} qdisc show dev wire") for host in made]
    assert "rate 1Gbit" in shaped[0] and "rate 20Mbit" in shaped[1] and "tbf" not in shaped[2], shaped
    with pytest.raises(ValueError, match="one for each of 3 hosts, got 1gbit,20mbit"), hosts(3, "1gbit,20mbit"):
        pass


LEARN = """
echo "$RANK of $WORLD_SIZE: $PET_NODE_RANK of $PET_NNODES, $MASTER_ADDR:$MASTER_PORT, $GLOO_SOCKET_IFNAME"
test $RANK = 0 || exit 3
"""


def test_a_command_learns_where_it_runs_and_the_first_failure_is_the_status(tmp_path):
    command = completed([*RUN, "--", "sh", "-c", LEARN], tmp_path)
    assert command.status == 3, command.stderr
    assert sorted(command.stdout.splitlines()) == [
        f"host {host} | {host} of 2: {host} of 2, 10.0.0.1:29500, wire" for host in range(2)
    ]


SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item()}")
dist.destroy_process_group()
"""


def test_each_host_is_a_process_of_one_group(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = completed([*RUN, "--", sys.executable, "script.py"], tmp_path, TORCH_CPP_LOG_LEVEL="ERROR")
    assert command.status == 0, command.stdout + command.stderr
    assert set(command.stdout.splitlines()) == {f"host {host} | rank {host} of 2: 3.0" for host in range(2)}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_of_hosts_that_a_signal_ended(tmp_path, number):
    """After SIGKILL, the next call removes them."""
    with started([*RUN, "--", "sh", "-c", "echo ready; exec sleep 60"], tmp_path) as command:
        command.wait_until(lambda: command.stdout.count("ready") == 2)
        assert len(made_by(command.process.pid)) == 3
        command.process.send_signal(number)
        command.process.wait()
        if number == signal.SIGKILL:
            with hosts(1):
                pass
        assert made_by(command.process.pid) == set()
        command.wait_until(lambda: command.processes() == {})


def test_what_cannot_be_made_is_a_sentence(tmp_path):
    command = completed([*RUN, "--rate", "fast", "--", "true"], tmp_path)
    assert (command.status, command.stderr) == (2, "a rate must be like 500kbit, 100mbit or 1gbit, got fast\n")
