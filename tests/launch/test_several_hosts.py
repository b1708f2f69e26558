"""Replicas on several hosts, as a user runs them: a membership server and two launchers, here on loopback."""

import json
import re
import signal
import socket
from contextlib import ExitStack, contextmanager

import pytest

pytest.importorskip("zmq", reason="needs pyzmq")

from support.commands import THINWIRE, free_port, started
from support.listening import listening, needs_ss
from support.recipe_runs import simulate
from support.run_files import digest, metrics
from thinwire.launch import cli
from thinwire.launch.run import recipe
from thinwire.launch.run.wire import agreed_by_hosts
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.replicas.membership.server import difference

OPTIONS = [
    *("--replicas.count", "2", "--replicas.sync.every", "3"),
    *("--replicas.gradients", "ef(q(4))", "--optimizer.schedule", "constant", "--replicas.membership", "elastic"),
    *("--pipeline.num_stages", "1", "--wire.keys", "run.keys"),
]


@pytest.fixture
def folder(folder):
    """A folder with the recipe `tiny.yaml` and keys, where the test is."""
    assert cli.main(["keys", "run.keys"]) == 0
    return folder


@contextmanager
def hosts(folder, *options):
    """A membership server, and what starts the launcher of a replica."""
    address = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        server = stack.enter_context(
            started([*THINWIRE, "server", "tiny.yaml", "--listen", address, *OPTIONS, *options], folder)
        )
        server.wait_until(lambda: "--replicas.number 1" in server.stdout)

        def launcher(replica):
            own = ["--output", f"host-{replica}", "--replicas.server", address, "--replicas.number", replica]
            return stack.enter_context(started([*THINWIRE, "train", "tiny.yaml", *OPTIONS, *options, *own], folder))

        yield server, launcher


def steps(run):
    """The steps in the log of a run."""
    return [line["step"] for line in metrics(run)]


@pytest.mark.processes
@needs_ss
def test_replicas_on_two_hosts_have_the_numbers_of_one_machine(folder):
    """`test_lost_replicas.py` compares replicas on one machine with their simulation."""
    options = ["--training.steps", "8"]
    with hosts(folder, *options) as (server, launcher):
        assert {address for address, _ in listening(server.processes())} == {"127.0.0.1"}
        both = [launcher(0), launcher(1)]
        assert [each.wait() for each in both] == [0, 0], server.stderr + both[0].stderr + both[1].stderr
        assert server.wait() == 0, server.stderr
    assert "all replicas have ended" in server.stderr and "lost" not in server.stderr
    simulated = simulate("tiny.yaml", folder / "simulated", *OPTIONS, *options)
    assert [digest(folder / f"host-{replica}") for replica in range(2)] == [digest(simulated)] * 2


@pytest.mark.processes
@pytest.mark.slow
def test_a_launcher_that_was_killed_is_taken_in_again(folder):
    long = ["--training.steps", "100000", "--training.evaluate_every", "0 steps", "--checkpoint.every", "4 steps"]
    long += ["--wire.heartbeat", "4"]  # how long the other one trains alone, as fast as it can
    with hosts(folder, *long) as (server, launcher):
        stays, dies = launcher(0), launcher(1)
        dies.wait_until(lambda: len(steps(folder / "host-1")) > 8)
        dies.process.send_signal(signal.SIGKILL)
        server.wait_until(lambda: "replica 1 is lost: it sent nothing" in server.stderr)
        comes = launcher(1)
        server.wait_until(lambda: re.search(r"replica 1 is back: it took the weights of replica 0", server.stderr))
        server.wait_until(lambda: re.search(r"goes on with 2 of 2 replicas again", server.stderr))
        for command in (comes, stays):  # one leaves alone, and the other one goes on
            command.process.send_signal(signal.SIGINT)
            assert command.wait() == 130, command.stderr
        assert server.wait() == 1, server.stderr
    assert "replica 0 has left before the end of the run" in server.stderr
    assert server.stderr.endswith("no replica has reached the end of the run; their hosts say why\n")
    assert "goes on from the checkpoint of step" in comes.stdout + comes.stderr
    ended = steps(folder / "host-0")
    assert ended == list(range(len(ended))) and len(ended) % 3 == 0, "it has lost no step, and stops after an exchange"


@pytest.mark.processes
@pytest.mark.slow
def test_all_start_again_if_their_membership_server_was_started_again(folder):
    """The end of the server took two restarts: the stage processes ended before the launcher knew of it."""
    long = ["--training.steps", "100000", "--training.evaluate_every", "0 steps", "--max-restarts", "1"]
    with hosts(folder, *long, "--checkpoint.every", "3 steps") as (server, launcher):
        both = [launcher(0), launcher(1)]
        both[1].wait_until(lambda: len(steps(folder / "host-1")) > 8)
        server.kill()
        again = server.process.args[1:]
        with started([*THINWIRE, *again], folder) as another:
            another.wait_until(lambda: all(f"replica {replica} has come" in another.stderr for replica in range(2)))
            last = max(steps(folder / "host-0"))
            both[0].wait_until(lambda: max(steps(folder / "host-0"), default=0) > last + 3)
            assert "lost" not in both[0].stderr + both[1].stderr + another.stderr
            assert all(
                "which starts again: it was started again, or received nothing from this process" in each.stderr
                for each in both
            )


def test_what_cannot_be_is_refused(folder):
    rest = ["--replicas.server", "10.0.0.1:29600", "--replicas.number", "0"]
    for options, said in [
        (["--replicas.number", "2"], "replicas.number must be from 0 to 1 beside replicas.server"),
        (["--replicas.membership", "fixed"], "replicas.membership must be elastic, and replicas.count above 1, beside"),
        (["--replicas.server", "null"], "replicas.server must be ADDRESS:PORT, where thinwire server listens"),
        (["--replicas.server", "host:99999"], "replicas.server must be ADDRESS:PORT, where thinwire server listens"),
        (["--wire.keys", "null"], "wire.keys must name a file of keys for replicas.server"),
    ]:
        with pytest.raises(OptionsError) as caught:
            recipe.parse(["tiny.yaml", *OPTIONS, *rest, *options])
        assert said in str(caught.value)


def test_what_all_must_agree_on(folder):
    known = agreed_by_hosts(recipe.parse(["tiny.yaml", *OPTIONS]))
    own = ["--replicas.server", "h:1", "--replicas.number", "1", "--output", "here", "--wire.timeout", "9"]
    assert difference(known, agreed_by_hosts(recipe.parse(["tiny.yaml", *OPTIONS, *own]))) is None
    for option, value, there in [
        ("training.seed", "7", "0"),
        # these two decide what a frame holds: one host ended the others at the first exchange, or gave them NaN
        ("wire.checksum", "false", "true"),
        ("wire.nonfinite", '"send"', '"raise"'),
    ]:
        other = agreed_by_hosts(recipe.parse(["tiny.yaml", *OPTIONS, f"--{option}", value.strip('"')]))
        assert f"these differ: {option} ({there} at the server, {value} here)" in difference(known, other)
    later = {**known, "the release of thinwire": "99"}
    assert re.search(r"these differ: the release of thinwire \(.* at the server, 99 here\)", difference(known, later))
    assert len(json.dumps(known)) < 30_000, "it fits into one packet"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--wire.keys", "none"], "wire.keys must be a file that thinwire keys made, got none: No such file"),
        (["--replicas.server", "x..y:29600"], "replicas.server must name a host that this one finds, got x..y: "),
    ],
)
def test_what_keeps_a_replica_from_its_server_is_told_before_the_data_are_read(folder, options, said, capsys):
    rest = ["--replicas.server", "127.0.0.1:29600", "--replicas.number", "0"]
    assert cli.main(["train", "tiny.yaml", *OPTIONS, *rest, *options]) == 2
    told = capsys.readouterr().err
    assert said in told and "reading the data" not in told and not (folder / "runs").exists()


def test_keys_of_the_transport_are_read_before_the_data(folder, capsys):
    keys = folder / "run.keys"
    keys.chmod(0o644)
    assert cli.main(["train", "tiny.yaml", "--wire.transport", "zmq", "--wire.keys", "run.keys"]) == 2
    told = capsys.readouterr().err
    assert "run chmod 600 run.keys" in told and "reading the data" not in told


@pytest.mark.processes
def test_a_membership_server_that_is_stopped_says_so_and_frees_its_port(folder):
    with hosts(folder) as (server, _):
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 143
    assert (
        "the membership server was stopped by SIGTERM; replicas that are in the run wait for it up to " in server.stderr
    )
    assert "Traceback" not in server.stderr
    address = re.search(r"server listens at (\S+):(\d+);", server.stdout)
    with socket.create_server((address[1], int(address[2]))):
        pass
