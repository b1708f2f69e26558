"""The auxiliary loss of routers: three stages compute from sums what the library does from all logits at once."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from transformers import AutoConfig

from support.family_cases import BATCH, LENGTH, VOCABULARY, apart, inputs, split, whole
from support.models import blueprint
from support.pipelined import as_tuple, drawn
from thinwire.models.architectures.library import Routers
from thinwire.models.architectures.parity import check_parity, remembers
from thinwire.models.errors import ModelError
from thinwire.models.layers import build_stage, stage_output_examples
from thinwire.models.options import LoraOptions, ModelOptions

WEIGHED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
DENSE = {"mlp_only_layers": [1]}
LENGTHS = torch.tensor([LENGTH, LENGTH - 3, LENGTH - 5])
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def loss_and_gradients(stages, ids, labels, side):
    """The library's loss of a micro-batch and the gradients of what trains, by stages that send each other leaves."""
    given, found = (ids,), []
    for stage in stages:
        found.append((given, stage(*given, **side)))
        given = tuple(each.detach().requires_grad_(each.requires_grad) for each in as_tuple(found[-1][1]))
    logits, aux_loss = found[-1][1]
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten()) + aux_loss
    loss.backward()
    for (_, outputs), (arrived, _) in reversed(list(pairwise(found))):
        pairs = [(out, leaf.grad) for out, leaf in zip(as_tuple(outputs), arrived, strict=True) if leaf.requires_grad]
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
    parameters = {name: each for stage in stages for name, each in stage.full_parameters().items()}
    return loss.detach(), {name: each.grad for name, each in parameters.items() if each.requires_grad}


def with_noise(model):
    """The same model; routers that choose by more than rounding, and a loss that shows in all gradients before them."""
    for index, parameter in enumerate(model.parameters()):
        parameter.data.add_(drawn(*parameter.shape, seed=index), alpha=0.3)
    return model


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "olmoe", "gpt_oss", "qwen3_moe", "qwen3_moe, one block without experts"])
def test_loss_and_gradients_of_three_stages_are_those_of_the_library(name, padded):
    name, _, dense = name.partition(", ")
    changes = WEIGHED | (DENSE if dense else {})
    stages, unsplit = [stage.eval() for stage in split(apart(name, **changes), 3)], whole(name, **changes).eval()
    state = with_noise(unsplit).state_dict()
    for stage in stages:
        for full_name, tensor in stage.full_state().items():
            tensor.copy_(state[full_name])
    ids, _ = inputs(name)
    mask = torch.arange(LENGTH) < LENGTHS[:, None] if padded else torch.ones_like(ids, dtype=torch.bool)
    labels = ids.masked_fill(~mask, -100)
    expected = unsplit(input_ids=ids, labels=labels, attention_mask=mask.long() if padded else None)
    (without,) = torch.autograd.grad(expected.loss - 0.5 * expected.aux_loss, unsplit.lm_head.weight, retain_graph=True)
    expected.loss.backward()
    loss, gradients = loss_and_gradients(stages, ids, labels, {"lengths": LENGTHS} if padded else {})
    torch.testing.assert_close(loss, expected.loss.detach(), rtol=1e-6, atol=0)
    wanted = {full_name: each.grad for full_name, each in unsplit.named_parameters()}
    torch.testing.assert_close(gradients, wanted, **CLOSE)
    assert torch.equal(without, wanted["lm_head.weight"]), "the head is behind all routers"


@pytest.mark.slow
def test_with_lora_they_are_those_of_peft(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    unsplit, targets = with_noise(whole("mixtral", **WEIGHED)), ["q_proj", "k_proj", "v_proj", "o_proj"]
    unsplit.save_pretrained(tmp_path / "base")
    options = ModelOptions(name=str(tmp_path / "base"), weights="pretrained", lora=LoraOptions(rank=3, targets=targets))
    made = blueprint(options, task="causal-lm", block_size=LENGTH)
    stages = split(made, 3)
    theirs = peft.get_peft_model(unsplit, peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets)).train()
    state = {name.removeprefix("base_model.model."): each for name, each in theirs.named_parameters()}
    for index, (name, parameter) in enumerate((n, p) for stage in stages for n, p in stage.full_parameters().items()):
        if parameter.requires_grad:
            parameter.data.copy_(drawn(*parameter.shape, seed=index))
            state[name].data.copy_(parameter.data)
    ids, _ = inputs("mixtral")
    expected = theirs(input_ids=ids, labels=ids).loss
    expected.backward()
    loss, gradients = loss_and_gradients(stages, ids, ids, {})
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    assert gradients.keys() == {name for name, each in state.items() if each.requires_grad}
    torch.testing.assert_close(gradients, {name: state[name].grad for name in gradients}, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_sums_cross_in_float64_beside_hidden_states_in_any_precision():
    examples = stage_output_examples(
        apart("mixtral", **WEIGHED), [range(1), range(1, 3), range(3, 5)], torch.ones(BATCH, LENGTH).long(), "bf16"
    )
    hidden = ((BATCH, LENGTH, 16), torch.bfloat16, True)
    told = [[(tuple(each.shape), each.dtype, each.requires_grad) for each in output] for output in examples]
    assert told[:2] == [[hidden], [hidden, ((8,), torch.float64, True)]]
    assert [each[0] for each in told[2]] == [(BATCH, LENGTH, VOCABULARY), ()]


@pytest.mark.slow
def test_a_layer_that_computes_again_in_its_backward_counts_once():
    ids, _ = inputs("mixtral")
    cuts = [range(0, 2), range(2, 5)]
    kept, again = (
        loss_and_gradients(
            [build_stage(apart("mixtral", **WEIGHED), cut, seed=1, recompute=recompute) for cut in cuts], ids, ids, {}
        )
        for recompute in ("none", "block")
    )
    torch.testing.assert_close(again, kept, rtol=0, atol=0)


@pytest.mark.slow
def test_a_tiny_copy_is_compared_with_this_loss_too(monkeypatch):
    config = AutoConfig.for_model("mixtral", output_router_logits=True)
    found = check_parity(config, "causal-lm")
    assert found.startswith("a tiny copy of mixtral computes the same, cut after every block and uncut: its logits and")
    assert " auxiliary loss and 30 gradients differ by " in found
    assert remembers(config, "causal-lm")
    monkeypatch.setattr(Routers, "loss", lambda self, sums: sums[4:].sum().float() / sums.sum().detach().float())
    with pytest.raises(ModelError, match=r"a tiny copy of mixtral, cut after .*, and auxiliary loss differs by \S+ of"):
        check_parity(AutoConfig.for_model("mixtral", output_router_logits=True, vocab_size=1234), "causal-lm")


@pytest.mark.parametrize("name", ["doge", "llama4_text"])
def test_another_auxiliary_loss_is_refused_by_name(name):
    options = ModelOptions(
        name=name,
        config={"hidden_size": 16, "num_hidden_layers": 2, "output_router_logits": True, "router_aux_loss_coef": 0.02},
    )
    rule = f"only the auxiliary loss of Mixtral's routers, and {name} has another one, with weight 0.02; set "
    with pytest.raises(ModelError, match=rule):
        blueprint(options, task="causal-lm")
    off = replace(options, config={**options.config, "output_router_logits": False})
    assert blueprint(off, task="causal-lm").layers
