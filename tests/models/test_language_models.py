"""Models of transformers of many types: what three stages compute is what the library's unsplit model computes."""

import inspect
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.family_cases import (
    LABELS,
    LENGTH,
    MORE,
    apart,
    gradients_of,
    inputs,
    options,
    run_pipeline,
    split,
    state_of,
    whole,
)
from support.models import blueprint
from thinwire.models.architectures.library import for_the_library
from thinwire.models.errors import ModelError
from thinwire.models.options import ModelOptions

EVERYDAY = (
    *("codegen", "cohere2", "deepseek_v3", "gpt_neo", "gpt_oss", "granite", "lfm2", "mamba", "mixtral"),
    *("electra", "modernbert", "mpnet", "llama, classifier"),
)
"""Of each kind of attention, position and layer one; the others take twice as long."""
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
IDENTICAL = {"rtol": 0, "atol": 0}


def library_side(model, side):
    taken = inspect.signature(model.forward).parameters
    return {name: value for name, value in side.items() if name in taken}


@pytest.mark.parametrize(
    "name", [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.slow) for name in MORE]
)
def test_three_stages_equal_the_unsplit_model(name):
    ids, side = inputs(name)
    stages, unsplit = [stage.eval() for stage in split(apart(name), 3)], whole(name).eval()
    unsplit.load_state_dict(state_of(stages), strict=False)
    expected = unsplit(input_ids=ids, **library_side(unsplit, side)).logits
    output_gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    expected.backward(output_gradient)
    assert torch.equal(run_pipeline(stages, ids, side, output_gradient), expected.detach())
    wanted = {key: p.grad for key, p in unsplit.named_parameters() if p.grad is not None}
    torch.testing.assert_close(gradients_of(stages), wanted, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_pretrained_weights_are_read_and_what_is_exported_loads_in_the_library(name, tmp_path):
    unsplit, task = whole(name), MORE[name].task
    unsplit.save_pretrained(tmp_path / "saved")
    given = ModelOptions(name=str(tmp_path / "saved"), weights="pretrained")
    model = blueprint(given, task=task, num_labels=None if task == "causal-lm" else LABELS, block_size=LENGTH)
    state = state_of(split(model, 3))
    torch.testing.assert_close(state, dict(unsplit.state_dict()), **IDENTICAL)
    exported = tmp_path / "exported"
    model.save_config(exported)
    stored = for_the_library(exported, task, state)
    assert stored.keys() == load_file(tmp_path / "saved" / "model.safetensors").keys()
    save_file(stored, exported / "model.safetensors", metadata={"format": "pt"})
    loaded, report = type(unsplit).from_pretrained(exported, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    torch.testing.assert_close(dict(loaded.state_dict()), state, **IDENTICAL)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_tied_head_stays_one_weight_with_the_embedding(num_stages):
    """Both ends hold it under the embedding's name, and the sum of their gradients is the library's gradient."""
    given = replace(options("llama", tie_word_embeddings=True), tied="sum")
    model = blueprint(given, task="causal-lm", block_size=LENGTH)
    stages, unsplit = split(model, num_stages), whole("llama", tie_word_embeddings=True)
    state = state_of(stages)
    assert model.shared == ("model.embed_tokens",)
    assert state.keys() == unsplit.state_dict().keys() - {"lm_head.weight"}
    unsplit.load_state_dict(state, strict=False)
    ids, side = inputs("llama")
    expected = unsplit(input_ids=ids).logits
    output_gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    expected.backward(output_gradient)
    assert torch.equal(run_pipeline(stages, ids, side, output_gradient), expected.detach())
    torch.testing.assert_close(gradients_of(stages), {k: p.grad for k, p in unsplit.named_parameters()}, **CLOSE)


def test_a_head_of_its_own_cannot_be_tied():
    given = replace(options("llama", tie_word_embeddings=False), tied="sum")
    with pytest.raises(ModelError, match=r"needs a model whose head and embedding are one weight, and .* two"):
        blueprint(given, task="causal-lm")


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_routers_whose_loss_weighs_nothing_train_as_in_the_unsplit_model(name):
    """What routers give was refused even where it is in no loss."""
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.0}
    model, unsplit = apart(name, **changes), whole(name, **changes)
    stages = split(model, 3)
    unsplit.load_state_dict(state_of(stages))
    ids, side = inputs(name)
    found = unsplit(input_ids=ids, labels=ids)
    found.loss.backward()
    loss = unsplit.loss_function(found.logits, ids, unsplit.config.vocab_size)
    (output_gradient,) = torch.autograd.grad(loss, found.logits)
    run_pipeline(stages, ids, side, output_gradient)
    torch.testing.assert_close(gradients_of(stages), {k: p.grad for k, p in unsplit.named_parameters()}, **CLOSE)
