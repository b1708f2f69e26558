"""A long run takes no more memory, threads, descriptors and disk at its end than at its beginning."""

import os
import statistics
import time
from contextlib import suppress
from pathlib import Path

import pytest

from support.commands import THINWIRE, started
from support.tiny_run import write_recipe

STEPS = int(os.environ.get("THINWIRE_STEPS", "180"))
"""How long the run is; `make soak` asks for more."""
LOGS = ("metrics.jsonl", "evaluations.jsonl")
"""What has a line for every step or evaluation, and so must grow."""
PAGES = 6 << 20
"""Bytes of memory that allocators may take later than at first."""


def taken(pid):
    """Resident bytes, threads and open descriptors of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    memory = int(status["RssAnon"].split()[0]) * 1024
    return memory, int(status["Threads"]), len(list(Path(f"/proc/{pid}/fd").iterdir()))


def on_disk(run, logs=False):
    """Bytes of a run's folder, of its logs or of all else."""
    total = 0
    for folder, _, names in os.walk(run):  # which passes over folders that are removed meanwhile
        for path in (Path(folder, name) for name in names):
            if (path.relative_to(run).parts[0] in LOGS) == logs:
                with suppress(FileNotFoundError):
                    total += path.stat().st_size
    return total


def step(run):
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="what a process takes is read from /proc")
def test_a_long_run_stays_as_it_is(tmp_path):
    write_recipe(tmp_path)
    options = {
        "--training.steps": STEPS,
        "--training.evaluate_every": "30 steps",
        "--checkpoint.every": "10 steps",
        "--save_every": 40,
        "--compression.activations": 'aqsgd(q(3), store="disk")',
        "--compression.gradients": "ef(topk(0.2))",
        "--output": "run",
    }
    run, samples = tmp_path / "run", []
    words = [str(word) for pair in options.items() for word in pair]
    with started([*THINWIRE, "train", "tiny.yaml", *words], tmp_path) as command:
        command.wait_until(lambda: step(run) > 0)
        pids = sorted(command.processes())
        while command.process.poll() is None and step(run) < STEPS:
            with suppress(FileNotFoundError, KeyError, ProcessLookupError):  # where it has just ended
                samples.append((step(run), [taken(pid) for pid in pids], on_disk(run)))
            time.sleep(0.05)
        assert command.wait() == 0, command.stderr
    early = [sample for sample in samples if 0.3 * STEPS < sample[0] <= 0.5 * STEPS]
    late = [sample for sample in samples if sample[0] > 0.7 * STEPS]
    assert len(early) > 3 and len(late) > 3, "too fast to be looked at"
    for process in range(len(pids)):
        # a checkpoint opens files for a moment, which a look may meet or miss: what stays open is the least number seen
        for name, index, room, seen in (("memory", 0, PAGES, max), ("threads", 1, 0, min), ("descriptors", 2, 0, min)):
            before, after = (seen(sample[1][process][index] for sample in part) for part in (early, late))
            print(f"process {process}: {name} {before} early, {after} late")
            assert after <= before + room, (name, process)
    # a checkpoint that is being written takes room for a moment, and where another replaces it there is less for one
    before, after = (statistics.median(sample[2] for sample in part) for part in (early, late))
    logs = on_disk(run, logs=True) / STEPS
    print(f"disk without logs: {before:.0f} early, {after:.0f} late; logs: {logs:.0f} bytes a step")
    assert after <= 1.1 * before
