from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from support.data_files import write_tokenizer
from support.own_code import add_module
from support.tiny_run import STEPS_PER_EPOCH, alone, prepared, ran
from thinwire.launch.plan.agreement import agreed
from thinwire.launch.plan.places import real_placement, simulated_placement
from thinwire.launch.recipe import recipe
from thinwire.launch.run.assembly import assemble
from thinwire.models.errors import ModelError
from thinwire.pipeline.wire.handshake import differences

pytestmark = pytest.mark.usefixtures("folder")


@pytest.mark.parametrize(
    ("options", "length"),
    [
        (["--training.epochs", "2", "--training.steps", "5"], (5, None)),
        (["--training.epochs=2", "--training.epochs", "3", "--training.steps=5"], (5, None)),
        (["--training.steps", "5", "--training.epochs", "2"], (5, 2)),
        (["--training.steps", "5", "--training.epochs", "null"], (5, None)),
    ],
)
def test_of_steps_and_epochs_the_later_option_counts(options, length):
    """Steps beside the epochs of a study, or of another option, were ignored without a word."""
    training = recipe.parse(["tiny.yaml", *options]).training
    assert (training.steps, training.epochs) == length


def test_epochs_become_steps():
    ready = prepared("--training.epochs", "3")
    assert ready.sampler.steps_per_epoch == STEPS_PER_EPOCH
    assert (ready.recipe.training.steps, ready.recipe.training.epochs) == (3 * STEPS_PER_EPOCH, None)


def test_mistakes_of_data_and_model_are_told_at_once():
    with pytest.raises(ModelError) as caught:
        prepared("--data.name", "/no/data", "--model.name", "/no/model")
    assert ["/no/data" in mistake for mistake in caught.value.mistakes] == [True, False]
    assert ["/no/model" in mistake for mistake in caught.value.mistakes] == [False, True]


@pytest.mark.parametrize(
    ("layers", "cuts"),
    [("[1, 3]", (range(0, 1), range(1, 4))), ("[3, 1]", (range(0, 3), range(3, 4)))],
)
def test_the_recipe_says_where_to_cut(layers, cuts):
    assert prepared("--pipeline.layers", layers).cuts == cuts


def test_outputs_are_known_before_anything_is_built():
    (hidden,), (logits,) = prepared().outputs
    assert hidden.is_meta and logits.is_meta
    assert (tuple(hidden.shape), hidden.requires_grad) == ((2, 16, 16), True)
    assert tuple(logits.shape) == (2, 16, 256)


@pytest.mark.slow
def test_what_becomes_of_tied_weights_is_said_before_training():
    """It was said only with the export."""
    (untied,) = [note for note in prepared().notes if "one weight for" in note]
    assert untied.endswith(
        "here the two train apart, so the exported model has two; set model.tied: sum to keep one, which sends 33 kB "
        "each step"
    )
    (summed,) = [note for note in prepared("--model.tied", "sum").notes if "2 stages hold" in note]
    assert summed.endswith("each step sends 33 kB to sum its gradients over them")
    (coded,) = [
        note for note in prepared("--model.tied", "sum", "--compression.shared", "ef(q(4))").notes if "2 stages" in note
    ]
    assert coded.endswith("each step sends 4 kB to sum its gradients over them through ef(q(4))")
    (near,) = [
        note
        for note in prepared(
            *("--model.tied", "sum", "--pipeline.stages_per_process", "2", "--pipeline.schedule", "interleaved-1f1b")
        ).notes
        if "2 stages hold" in note
    ]
    assert near.endswith("each step sends 0 bytes to sum its gradients over them"), "both stages are in one process"
    (narrow,) = [note for note in prepared("--model.tied", "sum", "--model.dtype", "bf16").notes if "2 stages" in note]
    assert narrow.endswith("each step sends 17 kB to sum its gradients over them through bf16")


@pytest.mark.slow
def test_a_codec_for_weights_that_no_two_stages_hold_is_refused():
    with pytest.raises(
        ModelError, match=r"compression.shared must be none where .*, got q\(8\); drop it, or set model.tied"
    ):
        prepared("--model.tied", "untie", "--compression.shared", "q(8)")


@pytest.mark.slow
@pytest.mark.parametrize(("vocabulary", "tied"), [(256, "sum"), (257, "untie")])
def test_a_head_stays_tied_where_a_step_has_ten_times_more_tokens_than_the_vocabulary(vocabulary, tied):
    Path("text").write_bytes(bytes(range(32, 132)) * 60)
    options = ("--data.held_out", "0.5", "--data.block_size", "64", "--pipeline.microbatch_size", "20")
    ready = prepared(*options, "--model.config.n_positions", "64", "--model.config.vocab_size", str(vocabulary))
    assert (ready.recipe.model.tied, bool(ready.blueprint.tied)) == (tied, tied == "untie")


@pytest.mark.slow
def test_a_head_that_a_run_has_untied_is_not_tied_again_by_a_larger_batch():
    """The run that began with its weights took the embedding in place of the head that was trained."""
    ran("--training.steps", "1")
    Path("text").write_bytes(bytes(range(32, 132)) * 60)
    larger = ("--data.held_out", "0.5", "--pipeline.num_microbatches", "80")
    assert prepared(*larger).recipe.model.tied == "sum"
    assert prepared(*larger, "--model.weights", "runs/tiny").recipe.model.tied == "untie"


@pytest.mark.slow
def test_a_pretrained_model_with_another_tokenizer_than_its_own_is_told(folder):
    """The default, bytes, trained a pretrained model on numbers that are other tokens, without a word."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 300, "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 16}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes)).save_pretrained("trained")
    (folder / "text").write_text("the cat sat on a mat " * 200)
    own, other = write_tokenizer(folder / "trained", pairs=False), write_tokenizer(folder / "same", pairs=False)
    for tokenizer, said in (("bytes", 1), (own, 0), (other, 0), ("./trained", 0)):
        given = ["--model.name", own, "--model.weights", "pretrained", "--model.config", "{}"]
        notes = prepared(*given, "--data.tokenizer", tokenizer).notes
        assert sum("gives tokens other numbers than the tokenizer of" in note for note in notes) == said, tokenizer


OWN = """
from torch import nn

def classifier():
    return [nn.Embedding(259, 4), nn.Flatten(), nn.Linear(64, 1)]
"""


def test_a_model_of_ones_own_has_an_output_for_each_class(monkeypatch):
    """It was torch's "Target 1 is out of bounds", in the first step."""
    add_module(monkeypatch, "own_classifier", OWN)
    given = ["--data.name", "pydoc", "--data.kind", "pairs", "--model.name", "own_classifier:classifier"]
    with pytest.raises(ModelError, match="must have an output for each of the 2 classes of the data, got 1"):
        prepared(*given, "--model.config", "{}")


def test_a_batch_needs_as_many_samples():
    with pytest.raises(ModelError) as caught:
        prepared("--pipeline.microbatch_size", "60")
    train, held_out = caught.value.mistakes
    assert "a step needs 120 samples, and there are 99 to train on" in train
    assert "it needs 120 samples, and there are 8 held out" in held_out


def test_a_process_builds_the_stages_of_its_rank_only():
    ready = prepared()
    real, simulated = real_placement(ready.recipe), simulated_placement(ready.recipe)
    assert [sorted(ready.build_all(real, rank)) for rank in (0, 1)] == [[0], [1]]
    assert sorted(ready.build_all(simulated, 0)) == [0, 1]


@pytest.mark.parametrize(
    ("options", "stores"),
    [(["--output", "runs/a"], "runs/a/stores"), (["--compression.store_folder", "disk", "--name", "b"], "disk/b")],
)
def test_stores_lie_in_a_folder_of_the_run(options, stores):
    method = ["--compression.activations", 'aqsgd(q(4), store="disk")']
    with alone():
        ready = prepared(*options, *method)
        trainer = assemble(ready, simulated_placement(ready.recipe), rank=0).trainer
        wire = trainer.stages[0].wire
        assert {str(path.parent) for _, path in wire.maker.stores if path is not None} == {stores}
        for stage in trainer.stages:
            stage.close()
        wire.maker.files.discard()


@pytest.mark.slow
def test_an_assembled_trainer_takes_the_threads_of_the_recipe_and_trains():
    before = torch.get_num_threads()
    try:
        with alone():
            ready = prepared("--training.threads", "2")
            trainer = assemble(ready, simulated_placement(ready.recipe), rank=0).trainer
            assert torch.get_num_threads() == 2
            record = trainer.train_step(0)
            for stage in trainer.stages:
                stage.close()
    finally:
        torch.set_num_threads(before)
    assert (record.step, record.samples) == (0, 4)
    assert 5 < record.loss < 6, "log 256 is 5.5"


def test_processes_agree_on_the_samples_for_evaluation(folder):
    """With other files on two hosts, the first stage read inputs of one, and the last one scored targets of another."""
    told = []
    for first in (32, 40):
        (folder / "held").write_bytes(bytes(range(first, first + 80)) * 5)
        ready = prepared("--data.evaluation", "./held")
        told.append(agreed(ready.recipe, ready.data, ready.blueprint))
    assert [name.partition(";")[0] for name in differences(*told)] == ["digest of the held-out samples"]


@pytest.mark.slow
def test_processes_agree_on_the_folder_of_a_pretrained_model(folder, tmp_path):
    """With other weights or another configuration on two hosts, stages of two models trained as one."""
    told = []
    for seed, epsilon in ((0, 1e-5), (1, 1e-5), (1, 1e-6), (1, 1e-6)):
        torch.manual_seed(seed)
        sizes = {"vocab_size": 256, "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16}
        GPT2LMHeadModel(GPT2Config(**sizes, layer_norm_epsilon=epsilon)).save_pretrained(tmp_path / "model")
        options = ["--model.name", str(tmp_path / "model"), "--model.weights", "pretrained", "--model.config", "{}"]
        ready = prepared(*options)
        told.append(agreed(ready.recipe, ready.data, ready.blueprint))
    for mine, theirs in pairwise(told[:3]):
        assert [found.partition(";")[0] for found in differences(mine, theirs)] == ["digest of the pretrained model"]
    assert told[2] == told[3]
