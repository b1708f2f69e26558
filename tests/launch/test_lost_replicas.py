"""Replicas that may be lost, as a user runs them: the others go on, and the lost one is taken in again."""

import os
import re
import signal
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest

pytest.importorskip("zmq", reason="needs pyzmq")

from support.commands import THINWIRE, completed, started
from support.recipe_runs import simulate
from support.run_files import digest, losses, metrics, summary
from thinwire.launch import cli
from thinwire.launch.run import recipe
from thinwire.launch.run.elastic import launcher, own
from thinwire.launch.run.elastic.agent import Agent
from thinwire.launch.run.recipe import Recipe
from thinwire.launch.shared.exit_codes import StoppedError
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.options import ReplicaOptions, SyncOptions

ALONE = ["--replicas.count", "2", "--replicas.sync.every", "3"]
OPTIONS = [*ALONE, "--replicas.gradients", "ef(q(4))", "--optimizer.schedule", "constant"]
ELASTIC = ["--replicas.membership", "elastic"]
TRAIN = [*THINWIRE, "train", "tiny.yaml"]


@pytest.mark.processes
def test_an_undisturbed_run_has_the_numbers_of_a_fixed_one(folder):
    """`test_replica_runs.py` compares fixed membership in a simulation and in processes."""
    options = [*OPTIONS, "--codec", "aqsgd(q(4))/q(8)", "--training.steps", "14", "--compression.warmup", "4 steps"]
    fixed = simulate("tiny.yaml", folder / "fixed", *options)
    ran = completed([*TRAIN, "--output", "elastic", *options, *ELASTIC], folder)
    assert ran.status == 0, ran.stderr
    assert "replica" not in ran.stderr
    runs = [folder / "elastic", folder / "elastic/replica-1"]
    assert [digest(run) for run in runs] == [digest(fixed)] * 2
    assert losses(runs[0]) == losses(fixed)
    assert losses(runs[1]) != losses(fixed), "it has samples of its own"
    samples = [[step["samples"] for step in metrics(run)] for run in (*runs, folder / "fixed")]
    assert [sum(of_both) for of_both in zip(*samples[:2], strict=True)] == samples[2], "and counts its own"
    assert [summary(run)["held_out"] for run in runs] == [summary(fixed)["held_out"]] * 2
    assert "step 14/14" in (runs[1] / "output.txt").read_text()
    simulated = simulate("tiny.yaml", folder / "simulated", *options, *ELASTIC)
    assert digest(simulated) == digest(fixed)


@pytest.mark.processes
def test_replicas_that_may_be_lost_have_codecs_and_passes_of_their_own(folder):
    """A simulation weights what each sends as they do: where it arrives."""
    own = [
        "--replicas.overrides.1.compression.activations",
        "none",
        "--replicas.overrides.1.pipeline.accumulation",
        "2",
    ]
    options = [*OPTIONS, *ELASTIC, *own, "--codec", "aqsgd(q(4))/q(8)", "--training.steps", "14"]
    simulated = simulate("tiny.yaml", folder / "simulated", *options)
    ran = completed([*TRAIN, "--output", "elastic", *options], folder)
    assert ran.status == 0, ran.stderr
    runs = [folder / "elastic", folder / "elastic/replica-1"]
    assert [digest(run) for run in runs] == [digest(simulated)] * 2
    assert losses(runs[0]) == losses(simulated)
    bits = [summary(run)["channels"][0]["bits_per_element"] for run in runs]
    assert bits[0] < 30 < 32 < bits[1], "only AQ-SGD's first visits are uncompressed"


@pytest.mark.processes
@pytest.mark.slow
def test_a_lost_replica_is_taken_in_again(folder):
    saves = ["--checkpoint.every", "4 steps", "--max-restarts", "1", "--overwrite"]  # it goes on from what it has saved
    with started(endless(*saves), folder) as command:
        command.wait_until(lambda: len(steps(folder / "run/replica-1")) > 8, 120)
        os.kill(pids(command)["1/0"], signal.SIGKILL)
        told(command, "stage 0 of replica 1 was killed by SIGKILL")
        told(command, "replica 1 is lost, and the others go on\nstarting again from the newest checkpoint")
        told(command, r"the exchange after step \d+ goes on with 1 of 2 replicas, without replica 1")
        told(command, r"replica 1 is back: it took the weights of replica 0 after step \d+")
        told(command, r"the exchange after step \d+ goes on with 2 of 2 replicas again")
        command.process.send_signal(signal.SIGINT)
        assert command.wait() == 130, command.stderr
    stopped = int(re.search(r"stopped by SIGINT after step (\d+), and a checkpoint holds it", command.stderr)[1])
    assert stopped % 3 == 0, "they stop after an exchange"
    assert "thinwire train --resume run goes on" in command.stderr, "whichever replica says it"
    part = completed([*THINWIRE, "train", "--resume", "run/replica-1"], folder)
    assert part.status == 2 and "--resume must name the folder of the whole run" in part.stderr
    assert "goes on from the checkpoint of step" in (folder / "run/replica-1/output.txt").read_text()
    resumed = completed([*THINWIRE, "train", "--resume", "run", "--training.steps", stopped + 4], folder)
    assert resumed.status == 0, resumed.stderr
    assert "replica" not in resumed.stderr, "both go on with the same weights"
    assert digest(folder / "run") == digest(folder / "run/replica-1")
    assert steps(folder / "run") == list(range(stopped + 4)), "the first replica has lost no step"
    assert len(steps(folder / "run/replica-1")) < stopped + 4


@pytest.mark.processes
@pytest.mark.slow
def test_a_late_replica_is_taken_in_again(folder):
    """A replica of one process: the stages of several would end each other's waits after the same time-out."""
    waits = ["--wire.timeout", "8", "--wire.heartbeat", "100", "--pipeline.num_stages", "1"]
    with started(endless(*waits), folder) as command:
        command.wait_until(lambda: len(steps(folder / "run/replica-1")) > 8, 120)
        before = len(command.stderr)  # on a busy machine it may have come late to the first exchange
        os.kill(pids(command)["1/0"], signal.SIGSTOP)
        told(command, r"the exchange after step \d+ goes on with 1 of 2 replicas, without replica 1", before)
        os.kill(pids(command)["1/0"], signal.SIGCONT)
        told(command, r"replica 1 is back: it took the weights of replica 0 after step \d+", before)
        told(command, r"the exchange after step \d+ goes on with 2 of 2 replicas again", before)
        command.process.send_signal(signal.SIGINT)
        assert command.wait() == 130, command.stderr
    assert "lost" not in re.sub("what was trained is lost.*", "", command.stderr)
    late = steps(folder / "run/replica-1")
    assert late != list(range(len(late))), "it has skipped steps"


@pytest.mark.processes
@pytest.mark.slow
def test_all_start_again_if_their_membership_server_is_lost(folder):
    saves = ["--checkpoint.every", "3 steps", "--max-restarts", "1", "--pipeline.num_stages", "1"]
    with started(endless(*saves), folder) as command:
        command.wait_until(lambda: len(steps(folder / "run")) > 8, 120)
        [server] = [pid for pid in command.processes() if Path(f"/proc/{pid}/comm").read_text() == "elastic.agent\n"]
        os.kill(server, signal.SIGKILL)
        told(
            command,
            "the membership server of the replicas was killed or stopped\nstarting again from the newest checkpoint",
        )
        last = max(steps(folder / "run"))
        command.wait_until(lambda: max(steps(folder / "run"), default=0) > last + 3, 120)
        command.process.send_signal(signal.SIGINT)
        assert command.wait() == 130, command.stderr
    assert "lost" not in command.stderr


@pytest.mark.slow
def test_a_membership_server_that_is_stopped_is_lost(folder):
    """All replicas waited for it for ever."""
    with closing(Agent(recipe.parse(["tiny.yaml", *ALONE, *ELASTIC]), {})) as agent:
        assert not agent.is_gone
        os.kill(agent._process.pid, signal.SIGSTOP)
        os.waitpid(agent._process.pid, os.WUNTRACED)
        assert agent.is_gone


@pytest.mark.slow
def test_a_folder_of_a_replica_that_cannot_be_written_is_a_sentence(folder, capsys):
    """It was a traceback of a stage process."""
    (folder / "run").mkdir()
    (folder / "run/replica-1").touch()
    assert cli.main(["train", "tiny.yaml", "--output", "run", *OPTIONS, *ELASTIC]) == 2
    said = "output must name a folder that can be written, got run/replica-1: a file or a link to nothing is there"
    assert said in capsys.readouterr().err


def endless(*options):
    """The command of a run that ends only when it is stopped."""
    long = ["--training.steps", "100000", "--training.evaluate_every", "0 steps"]
    return [*TRAIN, "--output", "run", *OPTIONS, *ELASTIC, *long, *options]


def told(command, text, before=0):
    """Wait until the command has said this, behind so many characters."""
    command.wait_until(lambda: re.search(text, command.stderr[before:]), 120)


@pytest.mark.processes
def test_a_replica_without_a_restart_is_lost_for_good(folder):
    options = [*OPTIONS, *ELASTIC, "--training.steps", "90", "--training.evaluate_every", "0 steps"]
    options += ["--replicas.sync.every", "30"]
    with started([*TRAIN, "--output", "run", *options], folder) as command:
        command.wait_until(lambda: len(steps(folder / "run")) > 3)
        os.kill(pids(command)["1/1"], signal.SIGKILL)
        assert command.wait() == 0, command.stderr
    assert "replica 1 is lost for good: no restarts are left; the others go on" in command.stderr
    assert "the run has ended without replica 1" in command.stderr
    assert re.search(r"the exchange after step \d+0 goes on with 1 of 2 replicas, without replica 1", command.stderr)
    assert steps(folder / "run") == list(range(90))
    went_on = losses(folder / "run")
    assert fmean(went_on[-10:]) < fmean(went_on[:10]), "its loss goes on"


@pytest.mark.processes
@pytest.mark.slow
def test_a_replica_that_cannot_write_its_checkpoints_is_lost_alone(folder):
    """A full disk of one replica, or NaN in it, ended all of them."""
    saves = ["--checkpoint.every", "4 steps", "--max-restarts", "1", "--pipeline.num_stages", "1"]
    with started(endless(*saves), folder) as command:
        command.wait_until(lambda: len(steps(folder / "run/replica-1")) > 8, 120)
        checkpoints = folder / "run/replica-1/checkpoints"
        checkpoints.rename(folder / "moved")
        checkpoints.touch()
        told(command, "replica 1 is lost, and the others go on\nstarting again from the newest checkpoint")
        told(command, "replica 1 is lost for good: no restarts are left; the others go on")
        last = max(steps(folder / "run"))
        command.wait_until(lambda: max(steps(folder / "run")) > last + 6, 120)
        command.process.send_signal(signal.SIGINT)
        assert command.wait() == 130, command.stderr


def pids(command):
    """The stage processes by REPLICA/RANK."""
    names = {pid: Path(f"/proc/{pid}/comm").read_text().split() for pid in command.processes()}
    return {name[1]: pid for pid, name in names.items() if name[0] == "thinwire" and len(name) == 2}


def steps(run):
    """The steps in the log of a run."""
    return [line["step"] for line in metrics(run)]


def test_replicas_that_exchange_in_each_step_cannot_be_lost(folder):
    with pytest.raises(OptionsError) as caught:
        recipe.parse(["tiny.yaml", *ALONE, *ELASTIC, "--replicas.sync.every", "1"])
    assert "replicas.sync.every must be above 1 for membership elastic" in str(caught.value)


def test_torchrun_is_refused(folder, capsys, monkeypatch):
    monkeypatch.setattr("thinwire.launch.train.parent.end_with_parent", lambda: None)
    monkeypatch.setattr("thinwire.launch.train.heartbeat.begin_watcher", lambda heartbeat, timeout: None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert cli.main(["train", "tiny.yaml", *ALONE, *ELASTIC]) == 2
    assert "replicas.membership elastic needs thinwire train" in capsys.readouterr().err


class Lost:
    """An agent that is lost, and the processes of a replica that run."""

    is_gone = True

    def __init__(self, *_):
        pass

    def ending(self):
        return "the membership server is lost", False

    def loses(self, replica, *, for_good):
        pass

    def end(self, *, expected):
        pass

    def close(self):
        pass


def test_a_run_that_was_told_to_stop_does_not_start_again(folder, monkeypatch, capsys):
    """It went on with another server, and had forgotten the signal."""

    def start(self, agent, replica, *, again):
        assert not again
        self._running[replica] = launcher._Running(Lost(), folder, ExitStack())

    monkeypatch.setattr(launcher, "Agent", Lost)
    monkeypatch.setattr(launcher.Launcher, "_start", start)
    wanted = recipe.parse(["tiny.yaml", *OPTIONS, *ELASTIC, "--max-restarts", "3"])
    data = SimpleNamespace(training=SimpleNamespace(digest=""), held_out=None)
    prepared = SimpleNamespace(recipe=wanted, data=data, blueprint=SimpleNamespace(checkpoint=None))
    monkeypatch.setattr(launcher, "of_replica", lambda prepared, replica: prepared)
    with pytest.raises(StoppedError, match="stopped by SIGINT"):
        launcher.Launcher(prepared, None, [signal.SIGINT]).run()
    assert capsys.readouterr().err == "the membership server is lost\n"


def test_replicas_that_begin_together_need_room_together(monkeypatch):
    """Each asked for its own room alone, and both died at a checkpoint for which the disk had none."""
    options = ReplicaOptions(count=3, membership="elastic", sync=SyncOptions(every=2))
    wanted = Recipe(replicas=options)
    assert own.beginning(wanted) == 1, "a simulation is one run"
    monkeypatch.setenv(own.REPLICA_VARIABLE, "1")
    assert own.beginning(wanted) == 3
    assert own.beginning(replace(wanted, replicas=ReplicaOptions(count=3))) == 1
    monkeypatch.setenv(own.AGAIN_VARIABLE, "1")  # the others have taken their room
    assert own.beginning(wanted) == 1


@pytest.mark.parametrize(("replica", "folder"), [(None, "run"), ("0", "run"), ("2", "run/replica-2")])
def test_every_replica_knows_the_folder_of_the_run(monkeypatch, replica, folder):
    """The one that spoke first named its own folder, from which nobody can go on."""
    if replica is not None:
        monkeypatch.setenv(own.REPLICA_VARIABLE, replica)
    options = ReplicaOptions(count=3, membership="elastic", sync=SyncOptions(every=2))
    assert own.run_folder(Recipe(output=folder, replicas=options)) == Path("run")
