"""How stages compute, in whole runs: the same numbers, computed again or after a stop."""

import pytest
import torch
from safetensors.torch import load_file

from support.recipe_runs import SHORT, export, simulate
from support.run_files import numbers, summary, weights_of
from support.tiny_run import prepared, write_recipe
from thinwire.launch.recipe import recipe
from thinwire.models.errors import ModelError
from thinwire.pipeline.errors import OptionsError

pytestmark = pytest.mark.slow

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
    assert numbers(plain) == numbers(again)


@pytest.mark.parametrize("schedule", ["interleaved-zero-bubble", "zbv-zero-bubble", "dualpipev"])
def test_a_schedule_that_splits_the_backward_computes_nothing_again(schedule):
    options = ["--pipeline.schedule", schedule, "--pipeline.num_stages", "4", "--pipeline.num_microbatches", "4"]
    recipe.parse(["tiny.yaml", *options])
    [mistake] = mistakes_of(*options, "--training.recompute", "block")
    assert f"training.recompute must be none for {schedule}, which splits the backward" in mistake


def test_uncompressed_frames_are_those_of_16_bits(here):
    wide, narrow = (
        summary(simulate("tiny.yaml", here / precision, "--codec", "none", "--training.precision", precision))[
            "channels"
        ]
        for precision in ("fp32", "bf16")
    )
    for row, half in zip(wide, narrow, strict=True):
        headers = 64 * row["frames"]
        assert half["uncompressed"] == row["uncompressed"] // 2 == half["bytes"] - headers
        assert row["bytes"] - headers == row["uncompressed"]
        assert half["bits_per_element"] == pytest.approx(16 + 8 * headers / half["elements"])


def test_weights_in_bfloat16_go_on_from_a_checkpoint_and_are_exported(here):
    options = [DROPOUT, *STOCHASTIC, "--model.dtype", "bf16", "--optimizer.schedule", "constant"]
    options += ["--optimizer.max_grad_norm", "1.0", "--checkpoint.every", "2 steps"]
    whole = simulate("tiny.yaml", here / "whole", *options, "--training.steps", "4")
    simulate("tiny.yaml", here / "parts", *options, "--training.steps", "2")
    again = simulate("tiny.yaml", here / "parts", *options, "--training.steps", "4", "--training.recompute", "block")
    assert numbers(again) == numbers(whole)
    weights = weights_of(again, 1)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    exported = load_file(export(again, here / "exported") / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.float32}, "the dtype before training"
    assert all(torch.equal(exported[name], tensor.float()) for name, tensor in weights.items())
    assert "rounded" not in (here / "exported/README.md").read_text()


def test_a_vision_model_and_shared_weights_train_in_bfloat16(here):
    # few samples and channels: some processors take a hundred times as long for a convolution in bf16
    few = ["--model.dtype", "bf16", "--data.limit", "60", "--pipeline.microbatch_size", "2", *SHORT]
    for name, narrow in (("resnet-tiny", ["--model.config", "{stem: cifar, width: 4}"]), ("deberta-tiny", [])):
        run = simulate(name, here / name, *few, *narrow)
        assert summary(run)["train_loss"] > 0


def test_what_weights_in_bfloat16_do_not_go_with_is_one_sentence_each():
    assert mistakes_of("--model.dtype", "bf16", "--replicas.count", "2") == [
        "model.dtype must be fp32 for replicas.count 2, got bf16"
    ]


def test_a_missing_compiler_is_one_sentence(here, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ModelError, match="needs a C\\+\\+ compiler, and there is no no-such-compiler; install g"):
        prepared("--training.compile", "true")
