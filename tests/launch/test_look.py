"""The look of a run at one held-out batch before a pretrained model trains, as a user meets it."""

import pytest
import torch

from support.recipe_runs import simulate
from support.run_files import losses, summary
from thinwire.launch import cli
from thinwire.launch.run.parts import evaluation

pytestmark = pytest.mark.slow

RECIPE = """
model: {name: pretrained, weights: pretrained}
data: {name: pydoc, limit: 1000, block_size: 16, held_out: 0.3}
pipeline: {num_stages: 3, num_microbatches: 3, microbatch_size: 2}
compression: {activations: "q(4, round='stochastic')", gradients: q(8)}
training: {steps: 2, evaluate_every: 1 steps}
checkpoint: {every: 1 steps}
"""
SAID = "one held-out batch before training, compression on loss "


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A folder with a recipe and the model that it names."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=256, n_positions=16, n_embd=16, n_layer=3, n_head=2, **ends)
    GPT2LMHeadModel(config).save_pretrained(folder / "pretrained")
    (folder / "tiny.yaml").write_text(RECIPE)
    return folder


@pytest.fixture
def here(pretrained, monkeypatch):
    monkeypatch.chdir(pretrained)


@pytest.fixture
def run(here, tmp_path, capsys):
    """The run of the recipe, what it said, and its summary."""
    made = simulate("tiny.yaml", tmp_path / "run")
    return made, capsys.readouterr().out, summary(made)


def of_training(told):
    return {name: told[name] for name in ("weights_digest", "held_out", "train_loss", "channels")}


def test_a_pretrained_model_is_scored_before_its_first_step(run):
    _, said, told = run
    look = told["look"]
    assert look["alone"] == {} and look["on"]["num_targets"] == look["off"]["num_targets"] == 6 * 16
    assert f"{SAID}{look['on']['loss']:.4f}, " in said and f"; off loss {look['off']['loss']:.4f}, " in said
    assert look["on"]["loss"] != look["off"]["loss"]


def test_the_run_is_as_without_the_look(run, tmp_path, monkeypatch):
    _, _, told = run
    monkeypatch.setattr(evaluation, "look", lambda *_: None)
    without = summary(simulate("tiny.yaml", tmp_path / "without"))
    assert without["look"] is None
    assert of_training(without) == of_training(told)


@pytest.mark.parametrize(
    "options",
    [["--model.weights", "fresh"], ["--codec", "none"], ["--data.held_out", "0"]],
    ids=lambda options: options[0],
)
def test_there_is_no_look_without_pretrained_weights_or_codecs_or_held_out_samples(here, tmp_path, capsys, options):
    made = simulate("tiny.yaml", tmp_path / "run", *options)
    assert summary(made)["look"] is None and "before training" not in capsys.readouterr().out


@pytest.mark.processes
def test_a_run_of_processes_keeps_its_look_where_one_process_goes_on(here, tmp_path):
    """Only the process with the last stage knows it; one process for all took the state of the first one."""
    made = tmp_path / "run"
    assert cli.main(["train", "tiny.yaml", "--output", str(made)]) == 0
    look = summary(made)["look"]
    assert cli.main(["simulate", "--resume", str(made), "--training.steps", "3"]) == 0
    assert look is not None and summary(made)["look"] == look


def test_a_run_that_goes_on_does_not_look_again(run, capsys):
    made, _, told = run
    assert cli.main(["simulate", "--resume", str(made), "--training.steps", "3"]) == 0
    assert len(losses(made)) == 3
    assert summary(made)["look"] == told["look"]
    assert "before training" not in capsys.readouterr().out
