"""The folder of a run that somebody moves or removes while the run writes to it."""

import shutil
from dataclasses import replace

import pytest

from support.run_files import digest, metrics
from support.tiny_run import prepared, ran
from thinwire.launch.run import run as run_module
from thinwire.launch.run.folders import departed, held
from thinwire.launch.run.logs.files import read_lines
from thinwire.launch.run.outputs import OutputError

OPTIONS = ["--training.steps", "7", "--training.evaluate_every", "2 steps", "--output", "run"]


def disturbed(monkeypatch, disturb, *options):
    """A run that somebody disturbs between two checkpoints: one that is being written would fail, and end the run."""
    real = run_module.Run._after_step

    def after_step(run, record):
        if record.step == 3:
            run._resumption.checkpoints.wait()
            disturb()
        real(run, record)

    with monkeypatch.context() as patched:
        patched.setattr(run_module.Run, "_after_step", after_step)
        return ran(*OPTIONS, *options)


@pytest.mark.slow
@pytest.mark.parametrize("disturb", [shutil.rmtree, lambda path: path.rename(path.with_name("moved"))])
@pytest.mark.parametrize("options", [[], ["--checkpoint.every", "2 steps"]])
def test_a_folder_that_is_moved_or_removed_is_made_anew_with_all_it_needs(
    folder, monkeypatch, capsys, disturb, options
):
    """It had neither recipe nor metrics then: no resume and no export could use its checkpoints and weights."""
    disturbed(monkeypatch, lambda: disturb(folder / "run"), *options)
    assert "run was moved or removed, and the run has made it anew, with its metrics" in capsys.readouterr().out
    assert [line["step"] for line in metrics(folder / "run")] == list(range(7))
    assert [line["step"] for line in read_lines(folder / "run/evaluations.jsonl")] == [2, 4, 6, 7]
    assert {"recipe.yaml", "model", "summary.json", "tensorboard", "loss.png"} <= {
        path.name for path in (folder / "run").iterdir()
    }
    ran(*OPTIONS, "--output", "whole")
    assert digest(folder / "run") == digest(folder / "whole")
    if options:
        ran("--training.steps", "9", "--output", "run")
        assert [line["step"] for line in metrics(folder / "run")] == list(range(9))


@pytest.mark.slow
def test_another_run_in_the_place_of_a_moved_one_keeps_its_files(folder, monkeypatch):
    ran(*OPTIONS, "--output", "other")

    def take_its_place():
        (folder / "run").rename(folder / "moved")
        (folder / "other").rename(folder / "run")

    before = digest(folder / "other")
    with pytest.raises(OutputError, match="run must stay in its place while a run writes to it, but another run is"):
        disturbed(monkeypatch, take_its_place)
    assert digest(folder / "run") == before


def test_a_run_whose_folder_has_gone_does_not_start_again_from_step_0(folder):
    recipe = replace(prepared(*OPTIONS).recipe, output=str(folder / "run"))
    recipe.folder.mkdir()
    with held(recipe.folder) as descriptor:
        assert departed(recipe, descriptor) is None
        recipe.folder.rename(folder / "moved")
        assert "run must stay in its place" in departed(recipe, descriptor)
        recipe.folder.mkdir()
        assert "run must stay in its place" in departed(recipe, descriptor), "it is another folder"
        checkpoint = recipe.folder / "checkpoints/step-00000002"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").touch()
        assert departed(recipe, descriptor) is None, "the run has made it anew"
