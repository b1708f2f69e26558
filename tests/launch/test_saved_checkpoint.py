"""Runs that left nothing but checkpoints are exported and evaluated, without their data."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from support.tiny_run import write_recipe
from thinwire.launch import cli
from thinwire.models.digest import tensor_lines, weights_digest

pytestmark = pytest.mark.slow

TINY = ["simulate", "tiny.yaml", "--training.steps", "6", "--training.evaluate_every", "2 steps", "--checkpoint.every"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """What a run leaves that was killed after its sixth step, with checkpoints of steps 4 and 6."""
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    assert cli.main([*TINY, "2 steps", "--output", "run"]) == 0
    (tmp_path / "run/summary.json").rename(tmp_path / "summary.json")
    shutil.rmtree(tmp_path / "run/weights")
    return tmp_path / "run"


def told(summary="summary.json"):
    return json.loads(Path(summary).read_text())


def exported(place, capsys):
    assert cli.main(["export", str(place), "--to", "out"]) == 0, capsys.readouterr().err
    return load_file("out/model.safetensors"), Path("out/README.md").read_text()


@pytest.mark.parametrize("place", ["run", "run/checkpoints", "run/checkpoints/step-00000006"])
def test_a_checkpoint_is_exported_without_the_data(run, tmp_path, place, capsys):
    (tmp_path / "text").unlink()
    weights, readme = exported(place, capsys)
    assert weights_digest(tensor_lines(weights)) == told()["weights_digest"]
    assert "after 6 steps in 2 stages" in readme
    assert "| 0 | activations | `q(4)` |" in readme
    assert f"| compression on | {told()['held_out']['on']['loss']:.4f} |" in readme


def test_a_checkpoint_by_its_name_is_that_one(run, capsys):
    _, readme = exported("run/checkpoints/step-00000004", capsys)
    assert "after 4 steps" in readme


def test_a_checkpoint_is_scored_as_the_run_was(run, capsys):
    capsys.readouterr()
    assert cli.main(["eval", "run", "--json"]) == 0
    [table] = json.loads(capsys.readouterr().out)["tables"]
    assert [row[:2] for row in table["rows"]] == [[mode, score["loss"]] for mode, score in told()["held_out"].items()]


def test_a_damaged_checkpoint_gives_way_to_the_one_before(run, capsys):
    for part in (run / "checkpoints/step-00000006").glob("stage-1/*.safetensors"):
        part.write_bytes(part.read_bytes()[:-1])
    assert "after 4 steps" in exported("run", capsys)[1]
    assert "the checkpoint of step 6 is passed over" in capsys.readouterr().err
    shutil.rmtree(run / "checkpoints/step-00000004/stage-0")
    assert cli.main(["export", "run", "--to", "other"]) == 2
    told = capsys.readouterr().err
    assert "must hold the parts of all 2 stages as they were written, but" in told and "not as it was written" in told


def test_later_weights_are_taken_before_an_earlier_checkpoint(run, tmp_path, capsys):
    assert cli.main([*TINY, "4 steps", "--training.steps", "7", "--output", "run"]) == 0
    shutil.rmtree(run / "checkpoints/step-00000007")
    assert "after 7 steps" in exported("run", capsys)[1]


def test_checkpoints_apart_from_their_run_are_told_so(run, tmp_path, capsys):
    (tmp_path / "elsewhere").mkdir()
    (run / "checkpoints").rename(tmp_path / "elsewhere/checkpoints")
    assert cli.main(["export", "elsewhere/checkpoints", "--to", "out"]) == 2
    assert "must lie in the folder of its run" in capsys.readouterr().err
