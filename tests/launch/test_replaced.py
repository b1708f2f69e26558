"""A run that --overwrite replaces: whole in replaced/ until the new one has saved."""

import errno
import json
import os
import signal
from pathlib import Path

import pytest

from support.processes import begin
from support.tiny_run import write_recipe
from thinwire.compress.stores.marks import claim
from thinwire.errors.files import MARK
from thinwire.launch import cli, train
from thinwire.launch.plan.prepared import Prepared
from thinwire.launch.run import recipe, stage_processes
from thinwire.launch.run.failures import FOLDER_VARIABLE
from thinwire.launch.run.folders import set_aside, what_is_left
from thinwire.launch.run.resume import BEGUN
from thinwire.launch.run.stage_processes import End
from thinwire.launch.run.weights import find_checkpoint
from thinwire.launch.shared.exit_codes import FailedError, ended
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.saving import checkpoint

pytestmark = pytest.mark.slow

EVERY = ["--checkpoint.every", "1 steps"]


def contents(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != MARK]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def replacing(options):
    return cli.main(["simulate", "tiny.yaml", "--output", "run", "--training.seed", "1", "--overwrite", *options])


def killed_while_it_saves(folder, options):
    os.chdir(folder)
    checkpoint._complete_part = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    replacing(options)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "kills"),
    [([], 2), (EVERY, 1), ([*EVERY, "--checkpoint.folder", "kept"], 1)],
    ids=["weights", "", "kept"],
)
def test_a_run_is_whole_until_the_one_that_replaces_it_has_saved(tmp_path, monkeypatch, capsys, options, kills):
    """The weights of a step that both have were gone when the new run was killed, and checkpoints before its first."""
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    assert cli.main(["simulate", "tiny.yaml", "--output", "run", *options]) == 0
    whole, elsewhere = contents(tmp_path / "run"), contents(tmp_path / "kept")
    assert bool(elsewhere) == ("kept" in options)
    # the next run has its checkpoints there
    whole["recipe.yaml"] = whole["recipe.yaml"].replace(b"folder: kept\n", b"folder: kept/replaced\n")
    for _ in range(kills):  # the second one finds what the first one left
        process = begin(killed_while_it_saves, tmp_path, options)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert contents(tmp_path / "run/replaced") == whole
        assert contents(tmp_path / "kept/replaced") == elsewhere
    assert cli.main(["export", "run/replaced", "--to", "exported"]) == 0
    capsys.readouterr()
    assert replacing(options) == 0
    assert "run/replaced keeps the run before until this one has saved" in capsys.readouterr().out
    assert not list(tmp_path.rglob("replac*"))
    of_both = whole, contents(tmp_path / "run")
    assert len({json.loads(files["summary.json"])["weights_digest"] for files in of_both}) == 2


def test_moving_a_run_away_goes_on_where_it_was_killed(tmp_path, monkeypatch):
    run, kept = tmp_path / "run", tmp_path / "kept"
    claim(run, "1")
    for path in (run / "weights/step-00000001", run / "model", kept / "step-00000001", kept / "base"):
        claim(path, "1")
        (path / "manifest.json").write_text(str(path))
    (run / "recipe.yaml").write_text("")
    whole, elsewhere = contents(run), contents(kept)
    wanted = recipe.parse(["quickstart", "--output", str(run), "--checkpoint.folder", str(kept)])
    rename, turns = Path.rename, []

    def killed_behind(path, target):
        rename(path, target)
        turns.append(path)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", killed_behind)
    while not (run / "replaced").is_dir():
        with pytest.raises(KeyboardInterrupt):
            set_aside(wanted, ["1"])
    assert len(turns) == 6
    set_aside(wanted, ["1"])
    assert contents(run / "replaced") == whole and contents(kept / "replaced") == elsewhere


def test_a_disk_mounted_within_the_run_is_named_and_nothing_is_moved(tmp_path, monkeypatch):
    """A folder mounted as `checkpoints` left half of the run in `replacing`, behind a traceback."""
    run = tmp_path / "run"
    claim(run, "1")
    for path in (run / "weights/step-00000001", run / "checkpoints/step-00000001"):
        claim(path, "1")
        (path / "manifest.json").write_text(str(path))
    rename, whole = Path.rename, contents(run)

    def mounted(path, target):
        if path.parent.name == "checkpoints":
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(path))
        rename(path, target)

    wanted = recipe.parse(["quickstart", "--output", str(run)])
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", mounted)
        with pytest.raises(OptionsError, match="a disk is mounted in between; mount it elsewhere"):
            set_aside(wanted, ["1"])
    assert contents(run) == whole
    set_aside(wanted, ["1"])
    assert contents(run / "replaced") == whole


def test_a_run_that_ends_before_it_saves_says_where_the_run_before_it_is(tmp_path):
    run = tmp_path / "run"
    claim(run / "replaced", "1")
    (run / "metrics.jsonl").write_text("{}\n")
    said = what_is_left(recipe.parse(["quickstart", "--output", str(run)]))
    assert said.endswith(f"; the run before this one is in {run}/replaced; move it away to keep it")
    kept = tmp_path / "kept"
    claim(kept / "replaced", "1")
    said = what_is_left(recipe.parse(["quickstart", "--output", str(run), "--checkpoint.folder", str(kept)]))
    assert said.endswith(f"{run}/replaced, and its checkpoints are in {kept}/replaced; move it away to keep it")


def test_a_start_that_ends_before_the_run_has_begun_anew_does_not_go_on_from_the_run_before(tmp_path, monkeypatch):
    """The run that --overwrite was to replace went on."""
    wanted = recipe.parse(["quickstart", "--output", str(tmp_path), "--overwrite", "--max-restarts", "3"])
    tried, found = [], iter([False, True, False])

    def run(start, given, *_, **__):
        tried.append(start)
        if next(found, None):
            Path(given[0][FOLDER_VARIABLE], BEGUN).touch()
        return End({0: -9}) if len(tried) < 4 else End(finished=True)

    monkeypatch.setattr(stage_processes, "run", run)
    monkeypatch.setattr(train, "_starting", lambda prepared, *_: prepared.recipe.checkpoint.resume)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    train.launch(Prepared(wanted, None, (), None, ()), [], [descriptor])
    os.close(descriptor)
    assert tried == ["never", "never", "auto", "auto"]


def test_a_run_that_ends_before_it_has_begun_anew_has_lost_nothing(tmp_path, monkeypatch):
    """It said that what the run before it had trained was lost."""
    wanted = recipe.parse(["quickstart", "--output", str(tmp_path), "--overwrite"])
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    monkeypatch.setattr(stage_processes, "run", lambda *_, **__: End({0: -9}))
    with pytest.raises(FailedError) as caught:
        train.launch(Prepared(wanted, None, (), None, ()), [], [])
    assert str(caught.value) == f"stage 0 {ended(-signal.SIGKILL)}"


@pytest.mark.parametrize("kept", ["best/step-00000003", "checkpoints/step-00000003"])
def test_all_that_the_run_before_has_saved_is_moved_away(tmp_path, kept):
    """Its best weights were removed if it had saved no others, and checkpoints stayed if the new one named a folder."""
    run = tmp_path / "run"
    for path in (run, (run / kept).parent, run / kept):
        claim(path, "1")
    (run / kept / "manifest.json").touch()
    (run / "metrics.jsonl").touch()
    whole = contents(run)
    set_aside(recipe.parse(["quickstart", "--output", str(run), "--checkpoint.folder", str(tmp_path / "kept")]), ["1"])
    assert contents(run / "replaced") == whole


@pytest.mark.processes
def test_weights_behind_a_link_are_not_those_of_the_run_that_replaces_theirs(tmp_path, monkeypatch):
    """An export of the new run gave them, until that had saved its own."""
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    assert cli.main(["simulate", "tiny.yaml", "--output", "run"]) == 0
    Path("run/weights").rename("weights")
    Path("run/weights").symlink_to(tmp_path / "weights")
    assert find_checkpoint(Path("run")).manifest.step == 2
    process = begin(killed_while_it_saves, tmp_path, EVERY)
    process.join()
    assert find_checkpoint(Path("run")) is None
    assert (tmp_path / "weights/passed-over-00000002/manifest.json").exists(), "it is kept until the next save"
    assert replacing(EVERY) == 0
    assert [path.name for path in (tmp_path / "weights").glob("*-*[0-9]")] == ["step-00000002"]
