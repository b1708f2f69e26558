"""The logs of a run, and what a full disk does to them."""

import errno
import json
import os
from pathlib import Path

import pytest

from support.recipe_runs import SHORT, TINY
from support.small_disk import mounted
from support.tiny_run import ran, write_recipe
from thinwire.launch import cli
from thinwire.launch.comparison.runs import read
from thinwire.launch.recipe import recipe
from thinwire.launch.results.log_file import LogFile, keep_lines, read_lines
from thinwire.launch.results.metrics import MetricsLog
from thinwire.launch.results.outputs import OutputError
from thinwire.launch.run.parts.room import Room
from thinwire.pipeline.training.trainer import StepRecord


def entry(step):
    return (json.dumps({"step": step}) + "\n").encode()


def filled(path, steps):
    log = LogFile(path)
    for step in steps:
        log.add(entry(step))
    log.close()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("first", [0, 3, 7])
def test_lines_that_stay_are_kept_and_half_a_line_is_not(tmp_path, first):
    path = tmp_path / "metrics.jsonl"
    filled(path, range(7))
    with path.open("a") as file:
        file.write('{"step": 7')
    kept = keep_lines(path, lambda line: line["step"] < first)
    assert [line["step"] for line in kept] == [line["step"] for line in read_lines(path)] == list(range(first))
    filled(path, range(first, 9))
    assert [line["step"] for line in read_lines(path)] == list(range(9))


class Full:
    """A disk that takes some bytes more, a part of an entry too."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, content):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self.file.write(content[: self.room])
        self.room -= taken
        return taken

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_an_entry_without_room_is_an_error_and_its_part_is_no_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = LogFile(path)
    log._file = Full(log._file, 20)
    log.add(entry(0))
    with pytest.raises(OSError, match="No space left"):
        log.add(entry(1))
    assert read_lines(path) == [json.loads(entry(0))] and path.stat().st_size == 20


def record(step, grad_norm=None):
    return StepRecord(
        step=step,
        epoch=0,
        loss=1.0 + step,
        lr=0.1,
        grad_norm=grad_norm,
        seconds=0.5,
        samples=8,
        sections={"compute": 0.1},
        bytes=100,
        uncompressed=400,
    )


def test_gradients_that_grow_a_thousand_times_are_told_once_after_a_resume_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    wanted = recipe.parse(["tiny.yaml"])
    wanted.folder.mkdir(parents=True)
    log = MetricsLog(wanted, "id", 0, 0, 0)
    for step, norm in enumerate([None, 0.5, 400.0, float("inf")]):
        log.step(record(step, norm))
        assert log.news() is None
    log.close()
    log = MetricsLog(wanted, "id", 3, 0, 0)
    news = []
    for step, norm in enumerate([501.0, 5e7], 3):
        log.step(record(step, norm))
        news.append(log.news())
    log.close()
    assert news[0].startswith("step 4: the norm of all gradients is 5e+02, 1,002 times the norm of the first step;")
    assert 'per="row"' in news[0] and news[1] is None


@pytest.mark.slow
def test_a_run_that_goes_on_is_reported_as_any_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    same = ["--training.evaluate_every", "1 steps", "--optimizer.schedule", "constant"]
    options = ["--checkpoint.every", "2 steps", *same]
    ran("--output", "run", "--training.steps", "5", *options)
    folder = ran("--output", "run", "--training.steps", "9", *options).recipe.folder
    assert [line["step"] for line in read_lines(folder / "metrics.jsonl")] == list(range(9))
    whole = ran("--output", "whole", "--training.steps", "9", *same).recipe.folder
    one, other = read([folder, whole])
    assert [line["loss"] for line in one.steps] == [line["loss"] for line in other.steps]
    assert one.evaluations == other.evaluations
    assert one.summary["train_loss"] == other.summary["train_loss"] == one.steps[-1]["loss"]


def fill(disk):
    """Take all room of a small disk; the file that takes it."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC
    return ballast


@pytest.mark.slow
def test_a_checkpoint_that_needs_metrics_on_a_full_disk_ends_in_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Room, "check", lambda room: None)
    step = MetricsLog.step

    def filling(log, record):
        if record.step == 0:
            fill(disk)
        step(log, record)

    monkeypatch.setattr(MetricsLog, "step", filling)
    with mounted(tmp_path / "disk", "size=32m") as disk:
        options = [*TINY["gpt2-tiny"], *SHORT, "--training.steps", "6", "--checkpoint.every", "4 steps"]
        assert cli.main(["simulate", "gpt2-tiny", *options, "--output", str(disk)]) == 1
        said = capsys.readouterr().err
        assert "must have room for the files of the run" in said and "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("log", ["metrics.jsonl", "evaluations.jsonl"])
def test_a_disk_that_is_full_where_a_log_is_opened_is_told_in_a_sentence(log, tmp_path, monkeypatch):
    """It was a traceback."""
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    real = os.fsync

    def fsync(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").readlink().name.startswith(log):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OutputError, match="must have room for the files of the run"):
        ran("--output", "run")
