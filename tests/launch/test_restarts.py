"""Stages that die at any moment: the run comes back from its newest checkpoint, and ends as if nothing had happened."""

import json
import os
import random
import signal
import time
from contextlib import suppress

import pytest

from support.commands import THINWIRE, completed, started
from support.tiny_run import write_recipe

KILLS = int(os.environ.get("THINWIRE_KILLS", "2"))
"""How many stages are killed in one run; `make drill` asks for more."""
STEPS = 80

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture
def tiny(tmp_path):
    write_recipe(tmp_path)
    return [
        *THINWIRE,
        "train",
        "tiny.yaml",
        *("--training.steps", STEPS, "--training.evaluate_every", "7 steps", "--wire.timeout", "60"),
        *("--compression.activations", 'aqsgd(q(3), store="disk")', "--compression.gradients", "ef(topk(0.2))"),
    ]


def summary(folder):
    found = json.loads((folder / "summary.json").read_text())
    return {name: found[name] for name in ("weights_digest", "held_out", "train_loss", "channels", "bytes_sent")}


def kill_at_random(command, draw):
    """Kill a random stage, at a random moment of its life: while it starts, trains, evaluates or saves."""
    command.wait_until(lambda: len(command.stage_processes()) == 2)
    victim = draw.choice(list(command.stage_processes().values()))
    time.sleep(draw.uniform(0, 4))
    with suppress(ProcessLookupError):
        os.kill(victim, draw.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM]))
    deadline = time.monotonic() + 60
    while victim in command.processes() and time.monotonic() < deadline:
        time.sleep(0.05)


def test_stages_killed_at_random_change_nothing(tiny, tmp_path):
    undisturbed = completed([*tiny, "--output", "whole"], tmp_path)
    assert undisturbed.status == 0, undisturbed.stderr
    seed = random.randrange(10**6)
    draw = random.Random(seed)
    disturbed = [*tiny, "--output", "run", "--checkpoint.every", "3 steps", "--max-restarts", str(KILLS)]
    with started(disturbed, tmp_path) as command:
        for _ in range(KILLS):
            if command.process.poll() is None:
                kill_at_random(command, draw)
        assert command.wait(60 + 60 * KILLS) == 0, (seed, command.stderr)
        assert "starting again from the newest checkpoint; restarts left" in command.stderr
    assert summary(tmp_path / "run") == summary(tmp_path / "whole"), seed
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(STEPS)), seed


def test_what_a_restart_does_not_mend_ends_the_run(tiny, tmp_path):
    ended = completed([*tiny, "--output", "run", "--max-restarts", "3", "--optimizer.lr", "1e30"], tmp_path)
    assert ended.status == 1
    assert "NaN or infinity" in ended.stderr and "starting again" not in ended.stderr
