"""Sets of weights: whole or not there, whenever their writers are killed."""

import pytest
import torch
from safetensors.torch import load_file

from thinwire.compress.stores.durable import part_of
from thinwire.compress.stores.marks import MARK
from thinwire.launch.run.weights import Saving, WeightSet, newest, remove_leftovers, weight_file, with_run_weights
from thinwire.models.options import ModelOptions
from thinwire.pipeline.errors import OptionsError


def save(run, step, stages=(0, 1), complete=True):
    """What the processes of a run do, one stage each."""
    savings = [Saving(run, step, 2) for _ in range(2)]
    for stage in stages:
        savings[stage].write(stage, {f"layer{stage}": torch.full((3,), float(step))})
    for saving in savings if complete else ():
        saving.complete()


def steps(run):
    """The step of each stage's weights in the newest set."""
    saved = newest(run)
    return [int(load_file(weight_file(run, saved, stage))[f"layer{stage}"][0]) for stage in range(saved.stages)]


def test_a_set_replaces_the_one_before(tmp_path):
    assert newest(tmp_path) is None
    for step in (2, 4):
        save(tmp_path, step)
        assert newest(tmp_path) == WeightSet(step, 2, f"step-{step}")
        assert steps(tmp_path) == [step, step]
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["newest.json", "step-4", MARK]


def test_a_run_called_fresh_does_not_take_the_place_of_fresh_weights(tmp_path, monkeypatch):
    """Every recipe in this folder silently began with the weights of that run."""
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "fresh", 2)
    assert with_run_weights(ModelOptions()) == ModelOptions()
    assert with_run_weights(ModelOptions(weights="./fresh")).weights == "fresh/weights/step-2"


def test_a_module_with_two_names_is_saved_under_both(tmp_path):
    """Two names of one memory ended a run with a traceback, after all of its training."""
    whole = torch.arange(6.0)
    saving = Saving(tmp_path, 2, 1)
    saving.write(0, {"first": whole, "again": whole, "half": whole[:3]})
    saving.complete()
    found = load_file(weight_file(tmp_path, newest(tmp_path), 0))
    assert torch.equal(found["first"], whole) and torch.equal(found["again"], whole)
    assert torch.equal(found["half"], whole[:3])


@pytest.mark.parametrize("stages", [(), (0,), (0, 1)])
def test_a_run_killed_while_it_saves_leaves_the_set_before(tmp_path, stages):
    """After kills the files of four stages were of three different steps, and the older ones gone."""
    save(tmp_path, 2)
    save(tmp_path, 4, stages, complete=False)
    assert steps(tmp_path) == [2, 2]


def test_a_run_killed_between_two_renames_of_the_manifest_leaves_a_whole_set(tmp_path):
    save(tmp_path, 2)
    savings = [Saving(tmp_path, 4, 2) for _ in range(2)]
    for stage, saving in enumerate(savings):
        saving.write(stage, {f"layer{stage}": torch.full((3,), 4.0)})
    savings[1].complete()
    assert steps(tmp_path) == [4, 4]


def test_another_run_of_the_same_length_does_not_write_into_the_set_of_the_one_before(tmp_path):
    save(tmp_path, 2)
    before = weight_file(tmp_path, newest(tmp_path), 0)
    content = before.read_bytes()
    save(tmp_path, 2, (0,), complete=False)
    assert before.read_bytes() == content and steps(tmp_path) == [2, 2]
    save(tmp_path, 2)
    assert steps(tmp_path) == [2, 2] and newest(tmp_path).folder == "step-2-again"
    save(tmp_path, 2)
    assert newest(tmp_path).folder == "step-2"


def test_what_killed_runs_left_goes_with_the_next_save_or_start(tmp_path):
    save(tmp_path, 2)
    for again in (lambda: save(tmp_path, 8), lambda: remove_leftovers(tmp_path)):
        save(tmp_path, 6, (0,), complete=False)
        part = part_of(tmp_path / "weights/newest.json")
        part.touch()
        again()
        assert not (tmp_path / "weights/step-6").exists()
    assert not part.exists()
    assert steps(tmp_path) == [8, 8]


def test_a_set_that_cannot_be_completed_is_discarded(tmp_path):
    save(tmp_path, 2)
    saving = Saving(tmp_path, 4, 2)
    saving.write(0, {"layer0": torch.zeros(3)})
    saving.discard()
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["newest.json", "step-2", MARK]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"step": 1}', '{"step": 1, "stages": 2, "folder": "../../x"}', "[" * 100_000]
)
def test_a_damaged_manifest_is_one_sentence(tmp_path, text):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/newest.json").write_text(text)
    with pytest.raises(OptionsError, match=r"newest.json must name a set of weights, but it is damaged"):
        newest(tmp_path)
