"""Clients that train in turn, as a user runs them."""

import re
from itertools import chain

import pytest

from support.tiny_run import prepared, ran, write_recipe
from thinwire.launch import cli
from thinwire.launch.recipe import recipe
from thinwire.models.errors import ModelError
from thinwire.pipeline.errors import OptionsError

OUTLINES = ["--clients.outlines", "[a.json, b.json]", "--clients.count", "2", "--clients.division", "order"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with the recipe `tiny.yaml`, where the test is."""
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_clients_in_turn_are_another_training():
    def order(*options):
        ready = prepared(*options)
        sampler = ready.sampler
        return [sampler.batch(step).ids.tolist() for step in range(ready.sampler.steps_per_epoch)]

    assert order("--clients.count", "1") == order()
    random, in_order = (order("--clients.count", "3", "--clients.division", name) for name in ("random", "order"))
    assert order() != random != in_order
    assert max(chain(*in_order[:8])) < min(chain(*in_order[8:16]))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--clients.count", "0"], "clients.count must be from 1 to 10000, got 0"),
        (
            ["--clients.turn", "1 step"],
            "clients.count must be above 1 for clients.turn: a single client has all samples, and every turn; raise "
            "it, or drop the field",
        ),
        (
            ["--clients.division", "label", "--clients.turn", "1 step"],
            "clients.count must be above 1 for clients.division and clients.turn: a single client has all samples, and "
            "every turn; raise it, or drop them",
        ),
        (["--clients.turn", "0 steps"], "clients.turn must be at least a step, got '0 steps'"),
        (
            ["--clients.outlines", "[a.json, b.json]", "--clients.count", "3"],
            "clients.count must be the number of clients.outlines, 2, and clients.division order, because each client "
            "has the samples of its outline; got 3 and random",
        ),
        (["--clients.turn", "soon"], """clients.turn must be like "20 epochs" or "500 steps", got 'soon'"""),
        (
            ["--clients.turn", f"{'9' * 5000} steps"],
            f"""clients.turn must be like "20 epochs" or "500 steps", got '{"9" * 60}'""",
        ),
        (
            ["--clients.count", "2", "--replicas.count", "2"],
            "clients that train in turn need one pipeline, and replicas.count is 2; lower it to 1, or clients.count "
            "to 1",
        ),
    ],
)
def test_a_mistake_is_a_sentence(options, sentence):
    with pytest.raises(OptionsError) as caught:
        recipe.parse(["tiny.yaml", *options])
    assert list(caught.value.mistakes) == [sentence]


@pytest.mark.slow
def test_each_client_needs_the_samples_of_a_step():
    with pytest.raises(ModelError, match=r"the 4 samples of a step, and one of 30 has 3; lower clients\.count"):
        prepared("--clients.count", "30")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--data.outline", "a.json"], "data.outline must be left out beside clients.outlines"),
        (["--data.name", "digits"], "clients with data of their own need data.mean and data.std"),
        ([], "each of clients.outlines must be a file that thinwire outline wrote, got a.json"),
    ],
)
def test_outlines_of_clients_that_cannot_be_used_are_refused(options, sentence):
    with pytest.raises(ModelError, match=re.escape(sentence)):
        prepared(*OUTLINES, *options)


def write_outlines(folder):
    """Write the texts of two clients, a and b, and their outlines."""
    for name in "ab":
        (folder / name).write_text(name * 500)
        options = ["--data.name", name, "--data.held_out", "0"]
        assert cli.main(["outline", "tiny.yaml", *options, "--to", f"{name}.json"]) == 0


@pytest.mark.slow
def test_a_client_out_of_turn_costs_no_checkpoint(here):
    """It was refused after all later checkpoints were removed, at the server too."""
    write_outlines(here)
    turns = [*OUTLINES, "--clients.turn", "2 steps", "--data.held_out", "0", "--checkpoint.every", "1 step"]
    ran(*turns, "--output", "run", "--data.name", "a", "--training.steps", "2")
    kept = sorted(path.parent.name for path in here.glob("run/checkpoints/step-*/manifest.json"))
    assert len(kept) == 2
    again = ["--output", "run", "--overwrite", "--data.name", "b", "--training.steps", "4"]
    with pytest.raises(ModelError, match=r"in the turn of client 1, and data\.name are the data of client 2"):
        ran(*turns, *again)
    assert sorted(path.parent.name for path in here.glob("run.1/checkpoints/step-*/manifest.json")) == kept


@pytest.mark.slow
def test_each_client_can_time_its_layers(here):
    """Only on the first client did `thinwire predict` and training.compile find samples."""
    write_outlines(here)
    second = [*OUTLINES, "--data.name", "b", "--data.held_out", "0"]
    assert cli.main(["predict", "tiny.yaml", *second]) == 0


@pytest.mark.slow
def test_a_smoke_run_lets_clients_take_turns():
    short = recipe.parse(["tiny.yaml", "--smoke", "--data.name", "pydoc", "--clients.count", "5"])
    assert (short.clients.count, short.clients.turn) == (5, "1 step")
    assert prepared("--smoke", "--data.name", "pydoc", "--clients.count", "5").sampler.steps_per_epoch >= 5


@pytest.mark.slow
def test_a_smoke_run_needs_no_outline_of_the_little_data_that_it_takes():
    """The digest of a part of the data is in no outline, so the client was told to write its outline again."""
    ready = prepared("--smoke", "--data.name", "pydoc", *OUTLINES)
    assert (ready.recipe.clients.count, ready.recipe.clients.outlines) == (2, [])
