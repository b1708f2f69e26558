"""How stages compute, in whole runs: the same numbers simulated, in processes and after a stop."""

import pytest

from support.commands import THINWIRE, completed
from support.recipe_runs import simulate
from support.run_files import losses, summary
from support.tiny_run import write_recipe
from thinwire.launch.run import recipe
from thinwire.pipeline.errors import OptionsError

pytestmark = pytest.mark.slow

SAME = ("train_loss", "held_out", "channels", "weights_digest", "bytes_sent", "steps")
DROPOUT = (
    "--model.config={vocab_size: 256, n_layer: 2, n_embd: 16, n_head: 2, n_positions: 16, resid_pdrop: 0.2, "
    "embd_pdrop: 0.2, attn_pdrop: 0.2}"
)
STOCHASTIC = ["--codec", "q(4, round='stochastic')/ef(q(8, round='stochastic'))"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    return tmp_path


def numbers_of(run):
    """What two runs with the same numbers have in common."""
    return [{name: summary(run)[name] for name in SAME}, losses(run)]


def mistakes_of(*options):
    with pytest.raises(OptionsError) as caught:
        recipe.parse(["tiny.yaml", *options])
    return list(caught.value.mistakes)


@pytest.mark.parametrize(
    "options",
    [
        ["--pipeline.schedule", "gpipe", "--pipeline.accumulation", "2"],
        ["--pipeline.schedule", "1f1b-wan", "--training.precision", "bf16"],
        ["--pipeline.schedule", "interleaved-1f1b", "--pipeline.num_stages", "4"],
    ],
    ids=["gpipe", "1f1b-wan", "interleaved-1f1b"],
)
def test_blocks_that_are_computed_again_change_no_bit_of_a_run(here, options):
    given = [DROPOUT, *STOCHASTIC, *options]
    plain = simulate("tiny.yaml", here / "plain", *given)
    again = simulate("tiny.yaml", here / "again", *given, "--training.recompute", "block")
    assert numbers_of(plain) == numbers_of(again)


@pytest.mark.parametrize("schedule", ["interleaved-zero-bubble", "zbv-zero-bubble", "dualpipev"])
def test_a_schedule_that_splits_the_backward_computes_nothing_again(schedule):
    options = ["--pipeline.schedule", schedule, "--pipeline.num_stages", "4", "--pipeline.num_microbatches", "4"]
    recipe.parse(["tiny.yaml", *options])
    [mistake] = mistakes_of(*options, "--training.recompute", "block")
    assert f"training.recompute must be none for {schedule}, which splits the backward" in mistake


@pytest.mark.processes
def test_processes_that_compute_again_have_the_numbers_of_a_simulation(here):
    options = [DROPOUT, *STOCHASTIC, "--training.precision", "bf16", "--training.recompute", "block"]
    simulated = simulate("tiny.yaml", here / "simulated", *options)
    assert completed([*THINWIRE, "train", "tiny.yaml", "--output", "real", *options], here).status == 0
    assert numbers_of(here / "real") == numbers_of(simulated)
