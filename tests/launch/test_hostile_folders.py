"""Folders of runs that came from elsewhere: nothing is read or written outside them, and nobody waits for a pipe."""

import json
import random
import shutil
import signal
from contextlib import contextmanager

import pytest

from support.hostile import lead_out, misspell, sign, snapshot
from support.tiny_run import write_recipe
from thinwire.launch import cli

pytestmark = pytest.mark.slow

COMMANDS = {
    "resume": lambda run: ["simulate", "--resume", run, "--training.steps", "3"],
    "overwrite": lambda run: ["simulate", f"{run}/recipe.yaml", "--output", run, "--overwrite"],
    "eval": lambda run: ["eval", run],
    "export": lambda run: ["export", run, "--to", "exported"],
    "report": lambda run: ["report", run, "--out", "page.html"],
    "trace": lambda run: ["trace", run],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with all that a run can have."""
    folder = tmp_path_factory.mktemp("hostile")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_recipe(folder)
        options = ["--trace", "--checkpoint.every", "1 steps", "--training.evaluate_every", "1 steps"]
        codec = ["--codec", "ef(topk(0.25))/q(8)"]
        assert cli.main(["simulate", "tiny.yaml", "--output", "run", *options, *codec]) == 0
        (folder / "text").rename(folder / "run/text")
    return folder / "run"


@pytest.fixture
def place(whole, tmp_path, monkeypatch):
    """A copy of the run, and a folder beside it that nobody may change."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole, tmp_path / "run")
    shutil.copy(whole / "text", tmp_path / "text")
    outside = tmp_path / "outside"
    shutil.copytree(whole, outside / "folder")
    for suffix in ("", ".json", ".jsonl", ".png", ".yaml", ".safetensors", ".txt"):
        (outside / f"file{suffix}").write_text("{}")
    return tmp_path


@contextmanager
def in_time():
    """An error where somebody waits, as for a pipe."""

    def late(*_):
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(place, command):
    """Run a command over the run: it works or is refused in words, and what is outside stays."""
    before = snapshot(place / "outside")
    with in_time():
        assert cli.main(COMMANDS[command]("run")) in (0, 1, 2)
    assert snapshot(place / "outside") == before
    assert not (place / "outside/made").exists()


@pytest.mark.parametrize("seed", range(24))
def test_what_leads_out_of_a_run_is_refused(place, seed):
    """A linked loss.png was overwritten at its target, a pipe in place of a manifest was waited for for ever."""
    draw = random.Random(seed)
    paths = sorted(path for path in (place / "run").rglob("*") if path.name != "text")
    lead_out(draw.choice(paths), place / "outside", draw)
    check(place, [*COMMANDS][seed % len(COMMANDS)])


@pytest.mark.parametrize("seed", range(24))
def test_odd_values_are_told_in_words(place, seed):
    """Values of another kind ended in a traceback; those of a checkpoint had the digests that its manifest names."""
    draw = random.Random(seed)
    paths = sorted(path for path in (place / "run").rglob("*.json*") if path.stat().st_size)
    path = draw.choice(paths)
    misspell(path, draw)
    if path.name == "values.json":
        sign(path.parents[1])
    check(place, [*COMMANDS][seed % len(COMMANDS)])


def test_a_model_without_end_is_not_copied_nor_is_one_written_through_a_link(place, capsys):
    """An export copied a file of a terabyte; a run replaced the model of another one that its folder linked to."""
    with (place / "run/model/config.json").open("wb") as file:
        file.truncate(1 << 40)
    check(place, "export")
    assert "model/config.json has more than 64000000 bytes; remove it" in capsys.readouterr().err
    shutil.rmtree(place / "run/model")
    (place / "run/model").symlink_to(place / "outside/folder")
    check(place, "overwrite")
    assert "model is a link, a pipe or a device, and no run makes one; remove it" in capsys.readouterr().err


def test_a_count_of_passes_that_no_header_holds_is_told_in_words(place, capsys):
    """The run ended in a traceback at its first frame."""
    for path in (place / "run/checkpoints").glob("step-*/stage-*/values.json"):
        values = json.loads(path.read_text())
        values["passes"]["train"] = 10**30
        path.write_text(json.dumps(values))
        sign(path.parents[1])
    check(place, "resume")
    assert "values.json cannot be read: passes must be counts" in capsys.readouterr().err
