"""The folder that `checkpoint.folder` names: it may hold what is somebody else's."""

import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.hostile import sign, snapshot
from thinwire.launch import cli
from thinwire.launch.folder import policy
from thinwire.launch.folder.weights import find_checkpoint
from thinwire.launch.recipe import recipe
from thinwire.launch.shared import scratch
from thinwire.pipeline.saving.checkpoint_folder import TENSORS, manifests

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("folder")]

SAVING = ["--checkpoint.folder", "kept", "--checkpoint.every", "1 steps"]


def simulate(output, *options):
    return cli.main(["simulate", "tiny.yaml", "--output", output, *options])


def test_a_run_without_checkpoints_leaves_their_folder_alone(folder):
    """It removed base/ and every step-N/."""
    for name in ("base", "step-12", "step-00000012"):
        (folder / "kept" / name).mkdir(parents=True)
        (folder / "kept" / name / "img").touch()
    before = snapshot(folder / "kept")
    assert simulate("run", "--checkpoint.folder", "kept") == 0
    assert snapshot(folder / "kept") == before


def test_checkpoints_stand_beside_what_is_somebody_elses(folder):
    for name in ("step-12", "film"):
        (folder / "kept" / name).mkdir(parents=True)
        (folder / "kept" / name / "img").touch()
    assert simulate("run", *SAVING) == 0
    assert [manifest.step for manifest in manifests(folder / "kept")] == [1, 2]
    assert (folder / "kept/film/img").exists() and (folder / "kept/step-12/img").exists()


@pytest.mark.parametrize("command", ["simulate", "train"])
def test_two_runs_at_once_do_not_share_checkpoints(folder, capsys, monkeypatch, command):
    """The second went on from those of the first and removed them, and both were exported as the same model."""
    monkeypatch.setattr(policy, "_PATIENCE", 0.0)
    assert simulate("one", *SAVING) == 0
    before = snapshot(folder / "kept")
    lock = scratch.lock(folder / "kept")
    capsys.readouterr()
    assert cli.main([command, "tiny.yaml", "--output", "two", "--checkpoint.folder", "kept"]) == 2
    assert capsys.readouterr().err == (
        "checkpoint.folder must name a folder that no other run uses, but a run writes to kept now; wait until it has "
        "ended, or name another --checkpoint.folder\n"
    )
    os.close(lock)
    assert snapshot(folder / "kept") == before
    assert simulate("kept", *SAVING) == 0, "checkpoints may lie in the folder of their run"
    with policy.all_held(recipe.parse(["tiny.yaml", "--output", "two", *SAVING])), pytest.raises(BlockingIOError):
        scratch.lock(folder / "kept")


def test_a_run_whose_output_is_gone_goes_on_from_its_checkpoints(folder):
    """A host that came back has an empty disk, and the checkpoints lie on another."""
    assert simulate("run", *SAVING) == 0
    shutil.rmtree("run")
    assert simulate("run", *SAVING, "--training.steps", "4") == 0
    assert [manifest.step for manifest in manifests(folder / "kept")] == [3, 4]


def test_a_part_without_what_the_optimizer_keeps_is_refused(folder, capsys):
    """The run went on with empty moments, and without a word."""
    assert simulate("run", *SAVING) == 0
    part = folder / "kept/step-00000002/stage-1"
    tensors = load_file(part / TENSORS)
    moments = [name for name in tensors if name.startswith("optimizer/")]
    save_file({name: tensor for name, tensor in tensors.items() if name not in moments}, part / TENSORS)
    sign(part.parent)
    capsys.readouterr()
    assert simulate("run", *SAVING, "--training.steps", "4") == 1
    said = capsys.readouterr().err
    assert "stage-1 must hold what the optimizer keeps for" in said and "exp_avg, exp_avg_sq, step is missing" in said


def test_moments_of_another_shape_are_refused(folder, capsys):
    assert simulate("run", *SAVING) == 0
    part = folder / "kept/step-00000002/stage-1"
    tensors = load_file(part / TENSORS)
    name = next(name for name in tensors if name.endswith("/exp_avg"))
    save_file({**tensors, name: torch.zeros(3)}, part / TENSORS)
    sign(part.parent)
    capsys.readouterr()
    assert simulate("run", *SAVING, "--training.steps", "4") == 1
    assert "numbers of exp_avg of" in capsys.readouterr().err


def test_checkpoints_that_are_not_found_from_here_are_missed_in_a_sentence(folder, capsys, monkeypatch):
    """An export from another folder took the weights of the run's last save, which may be older, without a word."""
    assert simulate("run", *SAVING) == 0
    capsys.readouterr()
    assert find_checkpoint(folder / "run").folder == folder / "run" / "weights"
    assert capsys.readouterr().err == ""
    monkeypatch.chdir(folder / "run")
    assert find_checkpoint(folder / "run").manifest.step == 2
    assert capsys.readouterr().err == (
        f"the checkpoints of {folder}/run are in kept, and from here no such folder is found, so only "
        f"{folder}/run/weights is looked into\n"
    )


def test_the_checkpoints_of_the_next_run_there_are_not_taken_for_those_of_the_one_before(folder, capsys):
    """An export of the first run gave the model of the second without a word."""
    assert simulate("one", *SAVING) == 0
    shutil.rmtree("kept")
    assert simulate("two", *SAVING, "--training.steps", "3", "--training.seed", "1") == 0
    capsys.readouterr()
    found = find_checkpoint(folder / "one")
    assert (found.folder, found.manifest.step) == (folder / "one/weights", 2)
    assert capsys.readouterr().err == (
        f"the checkpoints in kept are of another run than {folder}/one, so only {folder}/one/weights is looked into\n"
    )
    assert find_checkpoint(folder / "two").manifest.step == 3


@pytest.mark.parametrize(("first", "place"), [(SAVING[2:], "run/checkpoints"), (SAVING, "kept")])
def test_a_run_whose_checkpoints_are_elsewhere_can_be_resumed_and_that_is_said(folder, capsys, first, place):
    """It was said to have no checkpoint, and --overwrite to be a way out."""
    assert simulate("run", *first) == 0
    capsys.readouterr()
    assert simulate("run", "--checkpoint.folder", "other", "--training.steps", "4") == 2
    assert capsys.readouterr().err.endswith(
        f"both; --resume run goes on from its checkpoints, which are in {place}, not in other\n"
    )
    assert cli.main(["simulate", "--resume", "run", "--training.steps", "4"]) == 0
