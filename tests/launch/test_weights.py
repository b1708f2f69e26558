"""Saved weights: whole or not there, whenever their writers are killed."""

import pytest
import torch

from support.run_files import weights_of
from thinwire.compress.stores.durable import part_of
from thinwire.compress.stores.marks import claim
from thinwire.errors.files import MARK
from thinwire.launch.folder.weights import find_checkpoint, newest, remove_leftovers, with_run_weights
from thinwire.models.options import ModelOptions
from thinwire.pipeline.saving.checkpoint import WeightsCheckpoint


def begun(run, step, stages=(0, 1)):
    """What the processes of a run do, one stage each; their checkpoint, and the digests of its files."""
    saving = [WeightsCheckpoint(run / "weights", step, "") for _ in range(2)]
    files = {
        str(stage): saving[stage].write(stage, {f"layer{stage}": torch.full((3,), float(step))}, {"run": {}})
        for stage in stages
    }
    return saving, files


def save(run, step):
    saving, files = begun(run, step)
    for each in saving:
        each.complete(files)


def steps(run):
    """The step of each stage's newest weights, by what is in them."""
    return [int(weights_of(run, int(stage))[f"layer{stage}"][0]) for stage in newest(run).files]


def names(run):
    return sorted(path.name for path in (run / "weights").iterdir())


def test_weights_replace_those_before(tmp_path):
    assert newest(tmp_path) is None
    for step in (2, 4, 4, 3):  # the last one is of a run that goes on from an older checkpoint, to fewer steps
        save(tmp_path, step)
        assert newest(tmp_path).step == step and steps(tmp_path) == [step, step]
    assert names(tmp_path) == ["step-00000003", MARK]


def test_a_run_called_fresh_does_not_take_the_place_of_fresh_weights(tmp_path, monkeypatch):
    """Every recipe in this folder silently began with the weights of that run."""
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "fresh", 2)
    (tmp_path / "fresh/recipe.yaml").write_text("data: {name: shakespeare}\n")
    assert with_run_weights(ModelOptions()) == ModelOptions()
    assert with_run_weights(ModelOptions(weights="./fresh")).weights == "fresh/weights/step-00000002"


def test_a_module_with_two_names_is_saved_under_both(tmp_path):
    """Two names of one memory ended a run with a traceback, after all of its training."""
    whole = torch.arange(6.0)
    saving = WeightsCheckpoint(tmp_path / "weights", 2, "")
    saving.complete({"0": saving.write(0, {"first": whole, "again": whole, "half": whole[:3]}, {})})
    found = weights_of(tmp_path, 0)
    assert torch.equal(found["first"], whole) and torch.equal(found["again"], whole)
    assert torch.equal(found["half"], whole[:3])


@pytest.mark.parametrize("stages", [(), (0,), (0, 1)])
def test_a_run_killed_while_it_saves_leaves_the_weights_before(tmp_path, stages):
    """After kills the files of four stages were of three different steps, and the older ones gone."""
    save(tmp_path, 2)
    begun(tmp_path, 4, stages)
    assert steps(tmp_path) == [2, 2]


def test_a_run_killed_between_the_manifests_of_two_processes_leaves_whole_weights(tmp_path):
    save(tmp_path, 2)
    saving, files = begun(tmp_path, 4)
    saving[1].complete(files)
    assert steps(tmp_path) == [4, 4]


def test_another_run_of_the_same_length_is_not_mixed_with_the_one_before(tmp_path):
    save(tmp_path, 2)
    saving, files = begun(tmp_path, 2, ())
    for stage in range(2):
        assert steps(tmp_path) == [2, 2], "weights of the same step went before others were whole"
        files[str(stage)] = saving[stage].write(stage, {f"layer{stage}": torch.full((3,), 5.0)}, {"run": {}})
    for each in saving:
        each.complete(files)
    assert steps(tmp_path) == [5, 5] and names(tmp_path) == ["step-00000002", MARK]


def test_a_run_killed_between_two_names_leaves_whole_weights_until_the_next_save(tmp_path):
    save(tmp_path, 2)
    saving, files = begun(tmp_path, 2)
    saving[0].complete(files)
    folder = tmp_path / "weights"
    (folder / "step-00000002").rename(folder / "new-00000002")
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["new-00000002", MARK]
    save(tmp_path, 3)
    assert names(tmp_path) == ["step-00000003", MARK] and steps(tmp_path) == [3, 3]


@pytest.mark.parametrize("find", [newest, lambda run: find_checkpoint(run / "weights")])
def test_whole_weights_are_found_where_a_run_was_killed_before_it_gave_them_their_name(tmp_path, find):
    """They were there, and export said that the run had saved none."""
    (tmp_path / "recipe.yaml").touch()
    folder = tmp_path / "weights"
    saving, files = begun(tmp_path, 2)
    assert find(tmp_path) is None
    saving[0].complete(files)
    (folder / "step-00000002").rename(folder / "new-00000002")
    claim(folder / "step-00000002", "")  # half of those before
    assert find(tmp_path) is not None and steps(tmp_path) == [2, 2]


def test_stages_of_a_killed_run_are_not_in_weights_with_fewer(tmp_path):
    begun(tmp_path, 2)
    saving, files = begun(tmp_path, 2, (0,))
    saving[0].complete(files)
    assert not (tmp_path / "weights/step-00000002/stage-1").exists() and steps(tmp_path) == [2]


def test_what_killed_runs_left_goes_with_the_next_save_or_start(tmp_path):
    save(tmp_path, 2)
    for again in (lambda: save(tmp_path, 8), lambda: remove_leftovers(tmp_path)):
        begun(tmp_path, 6, (0,))
        part = part_of(tmp_path / "weights" / MARK)
        part.touch()
        again()
        assert names(tmp_path) == sorted(["step-00000008", MARK, *([part.name] if part.exists() else [])])
    assert not part.exists()
    assert steps(tmp_path) == [8, 8]


def test_parts_of_a_longer_pipeline_go_with_the_next_save(tmp_path):
    save(tmp_path, 2)
    saving = WeightsCheckpoint(tmp_path / "weights", 2, "")
    saving.complete({"0": saving.write(0, {"layer0": torch.zeros(3)}, {})})
    assert not (tmp_path / "weights" / "step-00000002/stage-1").exists() and steps(tmp_path) == [0]


def test_weights_that_cannot_be_completed_are_discarded(tmp_path):
    save(tmp_path, 2)
    [saving, _], _ = begun(tmp_path, 4, (0,))
    saving.discard()
    assert names(tmp_path) == ["step-00000002", MARK]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"step": 1}', "[" * 100_000])
def test_a_damaged_manifest_is_passed_over_in_a_sentence(tmp_path, text, capsys):
    claim(tmp_path / "weights" / "step-00000001", "")
    (tmp_path / "weights" / "step-00000001/manifest.json").write_text(text)
    assert newest(tmp_path) is None and find_checkpoint(tmp_path / "weights") is None
    assert capsys.readouterr().err.startswith("the checkpoint of step 1 is passed over: ")
