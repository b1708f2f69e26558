"""The weights with the best held-out score, and training that ends when nothing gets better."""

import json
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

import pytest
import torch

from support.tiny_run import prepared, ran
from thinwire.launch.folder.saved_run import read_run
from thinwire.models.errors import ModelError
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.options import TrainingOptions

pytestmark = pytest.mark.usefixtures("folder")

STANDS = ("--optimizer.lr", "0", "--training.evaluate_every", "2 steps", "--training.steps", "20")


def summary():
    return json.loads(Path("runs/tiny/summary.json").read_text())


def weights(place):
    return read_run(Path(place), "test").weights


@pytest.mark.slow
def test_training_ends_when_no_evaluation_is_better():
    run = ran(*STANDS, "--training.best", "min loss", "--training.patience", "2")
    assert run.trainer.done == 6, "the first of three evaluations was the best"
    assert (summary()["steps"], summary()["planned_steps"], summary()["running"]) == (6, 6, False)
    assert (summary()["best"]["step"], summary()["best"]["since"]) == (2, 2)


@pytest.mark.slow
def test_patience_goes_on_from_a_checkpoint():
    options = (*STANDS, "--training.best", "min loss", "--checkpoint.every", "2 steps")
    ran(*options, "--training.steps", "4")
    assert ran(*options, "--training.patience", "2").trainer.done == 6
    assert ran(*options, "--training.patience", "2").trainer.done == 6, "it has ended"


@pytest.mark.slow
def test_the_best_weights_stay():
    options = ("--optimizer.lr", "0.01", "--training.evaluate_every", "2 steps", "--training.best", "max loss")
    ran(*options, "--training.steps", "4")
    best, newest = weights("runs/tiny/best"), weights("runs/tiny")
    assert summary()["best"]["step"] == 2, "the loss falls"
    ran("--optimizer.lr", "0.01", "--training.steps", "2", "--optimizer.schedule", "constant", "--overwrite")
    assert not Path("runs/tiny/best").exists()
    assert any(not torch.equal(best[name], newest[name]) for name in best)


@pytest.mark.slow
def test_a_run_that_goes_on_with_another_score_compares_it_with_none_of_the_one_before():
    options = (*STANDS, "--checkpoint.every", "2 steps", "--training.best", "min loss")
    ran(*options, "--training.steps", "4")
    ran(*options, "--training.steps", "8", "--training.best", "min perplexity")
    best, off = summary()["best"], summary()["held_out"]["off"]
    assert best == {"of": "min perplexity", "step": 6, "score": off["perplexity"], "since": 1}


@pytest.mark.slow
def test_the_best_weights_are_never_those_of_steps_that_the_run_took_back(capsys):
    options = ("--training.evaluate_every", "2 steps", "--checkpoint.every", "2 steps", "--training.best", "min loss")
    ran(*options, "--optimizer.lr", "0.01", "--training.steps", "6")
    assert summary()["best"]["step"] == 6, "the loss falls"
    rmtree("runs/tiny/checkpoints/step-00000006")
    ran(*options, "--optimizer.lr", "0", "--training.steps", "8")
    assert "best has no weights of step 4, the best so far, so min loss begins anew" in capsys.readouterr().out
    best, newest = weights("runs/tiny/best"), weights("runs/tiny")
    assert all(torch.equal(best[name], newest[name]) for name in newest), "nothing has changed since step 4"
    assert (summary()["best"]["step"], summary()["best"]["since"]) == (6, 1)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"best": "loss"}, 'training.best must be like "min loss" or "max accuracy", got \'loss\''),
        ({"patience": 2, "best": "min loss"}, "evaluate_every must be at least 1 step beside training.patience"),
        ({"patience": 2}, "training.patience must be at least 1, and needs training.best, got 2"),
    ],
)
def test_what_the_best_cannot_be(fields, said):
    with pytest.raises(OptionsError) as caught:
        replace(TrainingOptions(), **fields)
    assert said in str(caught.value)


def test_a_score_that_no_evaluation_has_is_refused():
    with pytest.raises(
        ModelError, match=r"min or max of loss, perplexity, and needs held-out data, got 'max accuracy'"
    ):
        prepared("--training.best", "max accuracy")
    with pytest.raises(ModelError, match="needs held-out data, got 'min loss'"):
        prepared("--training.best", "min loss", "--data.held_out", "0")
