"""Runs that are asked to stop, or fall silent: what was done is in a checkpoint, and the sentence says how to go on."""

import os
import re
import shutil
import signal
import time

import pytest

from support.commands import THINWIRE, TORCHRUN, TRAIN, completed, free_port, node_of_two, started
from support.run_files import digest
from support.tiny_run import write_recipe
from thinwire.launch import cli
from thinwire.launch.folder.policy import mark
from thinwire.launch.processes.heartbeat import EVERY
from thinwire.launch.shared.exit_codes import ended
from thinwire.pipeline.saving.checkpoint_folder import SavedStage

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SEVERAL = 60
"""Steps that last for longer than a busy machine takes to send a signal after the first of them."""
TRAINING = ["tiny.yaml", "--compression.activations", "aqsgd(q(3))", "--training.steps"]
WITHOUT_CHECKPOINTS = [*TRAINING, 100_000, "--optimizer.schedule", "constant"]
ENDLESS = [*WITHOUT_CHECKPOINTS, "--checkpoint.every", "50000 steps"]
SAVED = re.compile(r"after step (\d+), and a checkpoint holds it; thinwire train --resume run goes on")


@pytest.fixture
def folder(tmp_path):
    write_recipe(tmp_path)
    return tmp_path


def steps_done(folder):
    path = folder / "run/metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def trains(command, folder):
    command.wait_until(lambda: steps_done(folder) >= 3)


def simulated(folder, steps, monkeypatch):
    """The digest of the same training, undisturbed and in this process."""
    monkeypatch.chdir(folder)
    assert cli.main(["simulate", *map(str, ENDLESS), "--training.steps", str(steps), "--output", "whole"]) == 0
    return digest(folder / "whole")


def whole_checkpoints(folder):
    return [int(path.parent.name[5:]) for path in (folder / "run/checkpoints").glob("step-*/manifest.json")]


def test_a_run_that_is_stopped_writes_a_checkpoint_and_says_how_to_go_on(folder, monkeypatch):
    with started([*THINWIRE, "train", *ENDLESS, "--output", "run"], folder) as command:
        trains(command, folder)
        command.process.send_signal(signal.SIGINT)
        assert command.wait() == 130
        assert command.processes() == {}
    first, last = command.stderr.splitlines()
    assert first == "the run stops after this step and a checkpoint; a second signal stops it at once"
    assert last.startswith("stopped by SIGINT after step ")
    done = int(SAVED.search(last)[1])
    assert whole_checkpoints(folder) == [done]
    assert steps_done(folder) == done
    resumed = completed([*THINWIRE, "train", "--resume", "run", "--training.steps", done + 3], folder)
    assert resumed.status == 0, resumed.stderr
    assert digest(folder / "run") == simulated(folder, done + 3, monkeypatch)


def test_a_second_ctrl_c_stops_a_run_at_once_that_cannot_write_its_checkpoint(folder):
    """A stage is stopped, and so silent for as long as `wire.heartbeat` allows: ten minutes here."""
    options = [*WITHOUT_CHECKPOINTS, "--checkpoint.every", "2 steps", "--wire.heartbeat", 600, "--output", "run"]
    with started([*THINWIRE, "train", *options], folder) as command:
        trains(command, folder)
        command.wait_until(lambda: whole_checkpoints(folder))
        os.kill(command.stage_process(1), signal.SIGSTOP)
        command.process.send_signal(signal.SIGINT)
        command.wait_until(lambda: "a second signal stops it at once" in command.stderr)
        command.process.send_signal(signal.SIGINT)
        assert command.wait() == 130
        assert command.processes() == {}
    assert command.stderr.splitlines()[1:] == [
        f"stopped by SIGINT; the newest checkpoint is of step {max(whole_checkpoints(folder))}; thinwire train "
        f"--resume run goes on from there"
    ]
    resumed = completed([*THINWIRE, "train", "--resume", "run", "--training.steps", steps_done(folder) + 3], folder)
    assert resumed.status == 0, resumed.stderr


@pytest.mark.parametrize(("times", "prompts"), [(20_000, 0), (20, 3000)], ids=["batches", "answers"])
def test_a_stop_in_an_evaluation_ends_it_and_has_the_status_of_its_signal(folder, times, prompts):
    """Where prompts were answered, it was not heard until the last of them."""
    (folder / "text").write_bytes(bytes(range(32, 132)) * times)  # 30,000 batches in each of two passes, or a few
    evaluates = ["--training.evaluate_every", "3 steps", "--compression.activations", "q(3)"]
    evaluates += ["--training.prompts", str(["a"] * prompts)]  # 30 tokens each
    options = [*ENDLESS, *evaluates, "--wire.heartbeat", 60, "--output", "run"]
    with started([*THINWIRE, "train", *options], folder) as command:
        trains(command, folder)
        command.process.send_signal(signal.SIGTERM)
        assert command.wait() == 143
    assert "stopped by SIGTERM after step 3, and a checkpoint holds it" in command.stderr
    assert whole_checkpoints(folder) == [3]
    passes = SavedStage(folder / "run/checkpoints", 3, 0).values["passes"]
    assert passes["eval-on"] == passes["eval-off"] == -1, "what is done again does not count"
    assert (folder / "run/evaluations.jsonl").read_text() == ""


def test_what_is_lost_without_checkpoints_is_said(folder):
    with started([*THINWIRE, "train", *TRAINING, 100_000, "--output", "run"], folder) as command:
        trains(command, folder)
        command.process.send_signal(signal.SIGTERM)
        assert command.wait() == 143
    assert command.stderr.splitlines() == [
        "stopped by SIGTERM; what was trained is lost: the recipe asks for no checkpoints; --checkpoint.every "
        "'100 steps' keeps more of the next run"
    ]


def test_a_crash_names_the_newest_checkpoint_and_the_command_that_goes_on(folder):
    options = [*WITHOUT_CHECKPOINTS, "--checkpoint.every", "2 steps", "--output", "run"]
    with started([*THINWIRE, "train", *options], folder) as command:
        trains(command, folder)
        command.wait_until(lambda: whole_checkpoints(folder))
        os.kill(command.stage_process(1), signal.SIGKILL)
        assert command.wait() == 1
    first, *_, last = command.stderr.splitlines()
    assert first == f"stage 1 {ended(-signal.SIGKILL)}"
    assert last == (
        f"the newest checkpoint is of step {max(whole_checkpoints(folder))}; thinwire train --resume run goes on "
        f"from there"
    )


DYING = """
import os, signal
import torch.distributed as dist
from torch import nn

def layers():
    if dist.is_initialized() and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return [nn.Embedding(256, 16), nn.Linear(16, 256)]
"""
"""A model whose second stage dies when it is built, behind the rendezvous and before the handshake."""
PATIENT = ["tiny.yaml", "--model.name", "dying:layers", "--model.config", "{}", "--wire.timeout", 100_000]


def test_a_stage_that_dies_before_the_handshake_ends_the_run(folder):
    (folder / "dying.py").write_text(DYING)
    command = completed([*THINWIRE, "train", *PATIENT, "--output", "run"], folder)
    assert command.status == 1
    assert command.stderr.splitlines()[0] == f"stage 1 {ended(-signal.SIGKILL)}"


def test_a_stage_that_exits_with_0_before_its_run_has_ended_fails(folder):
    """The launcher took it for one that was done, and the other stage waited for it until its time-out."""
    (folder / "dying.py").write_text(DYING.replace("os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)"))
    command = completed([*THINWIRE, "train", *PATIENT, "--output", "run"], folder)
    assert command.status == 1
    told = "stage 1 exited with status 0 before its run had ended; nothing that it runs may call os._exit"
    assert command.stderr.splitlines()[0] == told


def test_a_stage_of_another_host_that_dies_before_the_handshake_ends_its_neighbour(folder):
    """torchrun of a host knows nothing of another, and a stage waited in the rendezvous store until its time-out."""
    (folder / "dying.py").write_text(DYING)
    port = free_port()
    words = [node_of_two(rank, *PATIENT, "--output", f"host-{rank}", port=port) for rank in range(2)]
    with started(words[0], folder) as lives, started(words[1], folder) as dies:
        assert lives.wait() != 0 and dies.wait() != 0
    assert "stage 0 lost a peer: stage 1 closed its connection before the first step" in lives.stderr


def test_a_folder_of_the_run_that_vanishes_is_told_at_once_and_a_restart_makes_another(folder):
    """Something cleaned up TMPDIR: the stages waited for words of each other, and then for the time-out."""
    temporary = folder / "temporary"
    temporary.mkdir()
    options = [*WITHOUT_CHECKPOINTS, "--checkpoint.every", "5 steps", "--max-restarts", 1, "--output", "run"]
    with started([*THINWIRE, "train", *options], folder, TMPDIR=temporary) as command:
        trains(command, folder)
        [private] = temporary.glob("thinwire-*")
        shutil.rmtree(private)
        command.wait_until(lambda: "restarts left: 0" in command.stderr)
        command.wait_until(lambda: len(command.stage_processes()) == 2)
        before = (folder / "run/metrics.jsonl").stat().st_ino
        command.wait_until(lambda: (folder / "run/metrics.jsonl").stat().st_ino != before)
        command.process.send_signal(signal.SIGINT)
        assert command.wait() == 130
    assert f"{private}, where the stages of this run report what they have written, must stay" in command.stderr
    assert "Traceback" not in command.stderr


def test_a_stage_that_is_told_to_stop_loses_no_step_and_the_run_comes_back(folder, monkeypatch):
    """With --overwrite, each restart threw away what the run had done."""
    mark(folder / "run", "1")
    (folder / "run/summary.json").write_text("{}")
    steps = [*ENDLESS, "--training.steps", SEVERAL, "--overwrite"]
    with started([*THINWIRE, "train", *steps, "--max-restarts", 1, "--output", "run"], folder) as command:
        trains(command, folder)
        os.kill(command.stage_process(1), signal.SIGTERM)
        assert command.wait() == 0, command.stderr
    done = int(SAVED.search(command.stderr)[1])
    assert f"goes on from the checkpoint of step {done} " in command.stdout
    assert digest(folder / "run") == simulated(folder, SEVERAL, monkeypatch)
    assert sorted(path.name for path in folder.glob("run*")) == ["run", "run.1"]


def test_a_stopped_process_is_noticed_long_before_the_time_out_and_the_run_comes_back(folder):
    steps = [*TRAINING, SEVERAL, "--checkpoint.every", "5 steps", "--wire.heartbeat", 4]
    with started([*THINWIRE, "train", *steps, "--max-restarts", 1, "--output", "run"], folder) as command:
        trains(command, folder)
        os.kill(command.stage_process(0), signal.SIGSTOP)
        assert command.wait() == 0, command.stderr
    assert re.search(
        r"stage 0 failed: it (is stopped, as by SIGSTOP or a debugger, and )?sent no heartbeat for \d.\d s(, and|;) "
        r"wire.heartbeat (of 4 s allows 2 s|allows 4 s)",
        command.stderr,
    )


def test_torchrun_starts_a_silent_stage_again_and_passes_a_stop_on(folder):
    """gloo took the addresses of the processes that were gone from torchrun's store, and no restart succeeded."""
    launch = [*TORCHRUN, "--nproc-per-node", 2, "--max-restarts", 1, "--master-port", free_port(), *TRAIN]
    often = ["--checkpoint.every", "2 steps", "--wire.heartbeat", "4", "--output", "run", "--overwrite"]
    with started([*launch, *WITHOUT_CHECKPOINTS, *often], folder) as command:
        trains(command, folder)
        time.sleep(4 * EVERY)  # until its neighbour has heard that it trains
        before = (folder / "run/metrics.jsonl").stat().st_ino
        os.kill(command.stage_process(1), signal.SIGSTOP)
        command.wait_until(lambda: "stage 0 lost a peer: stage 1 sent no heartbeat for" in command.stderr)
        command.wait_until(lambda: (folder / "run/metrics.jsonl").stat().st_ino != before)
        assert re.search(r"process 1 .*sent no heartbeat for", command.stderr), "its own watcher"
        again = steps_done(folder)
        command.wait_until(lambda: steps_done(folder) >= again + 3)
        command.process.send_signal(signal.SIGTERM)
        assert command.wait() != 0
    said = "with --overwrite, each restart threw away what the run had done"
    assert "goes on from the checkpoint of step" in command.stdout, said
    [told] = {int(SAVED.search(line)[1]) for line in command.stderr.splitlines() if SAVED.search(line)}
    assert max(whole_checkpoints(folder)) == told == steps_done(folder), command.stderr
