"""Stages that die at any moment: the run comes back from its newest checkpoint, and ends as if nothing had happened."""

import os
import random
import re
import signal
import statistics
import time

import pytest

from support.commands import THINWIRE, TIMEOUT, completed, started
from support.run_files import metrics, numbers
from support.tiny_run import write_recipe

KILLS = int(os.environ.get("THINWIRE_KILLS", "5"))
"""How many stages are killed in one run; `make drill` asks for more."""
SIGNALS = [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGSTOP]
WEIGHTS = [3, 3, 3, 1]
"""A stopped stage is noticed only after `wire.heartbeat`: more of them would take most of the time."""
AGAIN = "starting again from the newest checkpoint; restarts left"

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture
def tiny(tmp_path):
    write_recipe(tmp_path)
    return [
        *THINWIRE,
        "train",
        "tiny.yaml",
        *("--training.steps", 100_000, "--training.evaluate_every", "7 steps", "--optimizer.schedule", "constant"),
        *("--compression.activations", 'aqsgd(q(3), store="disk")', "--compression.gradients", "ef(topk(0.2))"),
    ]


def lines(path):
    """The file of metrics, which a restart replaces, and the number of its lines."""
    return (path.stat().st_ino, path.read_bytes().count(b"\n")) if path.exists() else (0, 0)


def wait_until_it_trains(command, path):
    """Wait until there are two more lines of metrics in one file: all stages have done a step then."""
    first = lines(path)

    def trains():
        nonlocal first
        now = lines(path)
        if now[0] != first[0]:
            first = now
        return now[1] >= first[1] + 2

    command.wait_until(trains)


def signals(draw):
    """A random signal for each kill; among the first four is one of each kind, so few kills show them all."""
    return [*draw.sample(SIGNALS, len(SIGNALS)), *draw.choices(SIGNALS, WEIGHTS, k=KILLS)][:KILLS]


def kill_at_random(command, path, draw, number):
    """Send a signal to a random stage at a random moment: while it starts, trains, evaluates or saves.

    The signal, the seconds until the run is started again, and those until it trains again. Every fourth kill comes
    after another one before the run trains again, whose seconds nobody knows then.
    """
    command.wait_until(lambda: len(command.stage_processes()) == 2)
    victim = draw.choice(list(command.stage_processes().values()))
    time.sleep(draw.uniform(0, 0.8))
    restarts = command.stderr.count(AGAIN)
    killed = time.monotonic()
    os.kill(victim, number)
    command.wait_until(lambda: command.stderr.count(AGAIN) > restarts)
    noticed = time.monotonic() - killed
    if draw.random() < 0.25:
        return number, noticed, None
    wait_until_it_trains(command, path)
    return number, noticed, time.monotonic() - killed


def show(times):
    """The median and the worst time of each kind, for `make drill`."""
    for number in SIGNALS:
        mine = [(noticed, back) for found, noticed, back in times if found == number]
        if mine:
            columns = [[known for known in column if known is not None] for column in zip(*mine, strict=True)]
            said = [f"{statistics.median(c):.1f} / {max(c):.1f} s" if c else "unknown" for c in columns]
            print(f"{number.name}: {len(mine)} times, started again after {said[0]}, trained after {said[1]}")


def test_stages_killed_at_random_change_nothing(tiny, tmp_path):
    seed = random.SystemRandom().randrange(10**6)  # other moments each time
    draw = random.Random(seed)
    disturbed = [*tiny, "--output", "run", "--checkpoint.every", "3 steps", "--max-restarts", str(KILLS)]
    disturbed += ["--wire.heartbeat", "3"]  # what a stopped stage costs
    with started(disturbed, tmp_path) as command:
        wait_until_it_trains(command, tmp_path / "run/metrics.jsonl")
        began = time.monotonic()
        times = [kill_at_random(command, tmp_path / "run/metrics.jsonl", draw, each) for each in signals(draw)]
        print(f"{KILLS} signals took {time.monotonic() - began:.0f} s")
        assert command.stderr.count(AGAIN) == KILLS
        wait_until_it_trains(command, tmp_path / "run/metrics.jsonl")  # a stop needs a step
        command.process.send_signal(signal.SIGINT)
        assert command.wait() == 130, (seed, command.stderr)
    show(times)
    steps = int(re.search(r"stopped by SIGINT after step (\d+)", command.stderr)[1]) + 3
    resumed = completed([*THINWIRE, "train", "--resume", "run", "--training.steps", steps], tmp_path)
    assert resumed.status == 0, (seed, resumed.stderr)
    undisturbed = completed([*tiny, "--training.steps", steps, "--output", "whole"], tmp_path, TIMEOUT + steps)
    assert undisturbed.status == 0, undisturbed.stderr
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole"), seed
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(steps)), seed


def test_what_a_restart_does_not_mend_ends_the_run(tiny, tmp_path):
    ended = completed([*tiny, "--output", "run", "--max-restarts", "3", "--optimizer.lr", "1e30"], tmp_path)
    assert ended.status == 1
    assert "NaN or infinity" in ended.stderr and "starting again" not in ended.stderr
