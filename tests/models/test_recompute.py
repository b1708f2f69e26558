"""Recomputation changes what a stage keeps, and nothing else."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from support.family_cases import BATCH, CASES, LABELS, LENGTH, VOCABULARY, inputs
from support.models import blueprint
from support.pipelined import drawn, gradients_of, reset, run, state_of
from thinwire.models.costs import measure
from thinwire.models.layers import Blueprint, Chain, LayerSpec, build_stage
from thinwire.models.options import ModelOptions
from thinwire.models.partition import partition

IDENTICAL = {"rtol": 0, "atol": 0}
DROPOUT = {
    "gpt2": {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2},
    "gemma2": {"attention_dropout": 0.2},
    "bert": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2},
    "deberta-v2": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2},
}


def family(name):
    case = CASES[name]
    options = ModelOptions(name=case.family, config={**case.config, **DROPOUT[name]})
    return blueprint(options, task=case.task, num_labels=LABELS, block_size=LENGTH)


def images():
    parts = {
        "conv": lambda: nn.Conv2d(3, 4, 3),
        "block": lambda: nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.5), nn.Conv2d(4, 4, 3, stride=2)),
        "head": lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 2 * 2, 2)),
    }
    layers = tuple(LayerSpec(name, lambda name=name: Chain({name: parts[name]()})) for name in parts)
    return Blueprint(layers, reset)


def trained(model, microbatches, gradients, **options):
    """The outputs, gradients and weights of two stages after GPipe's order of some micro-batches."""
    cuts = partition([layer.cost for layer in model.layers], 2)
    stages = [build_stage(model, cut, seed=11, **options) for cut in cuts]
    torch.manual_seed(4)
    return run(stages, microbatches, gradients), gradients_of(stages), state_of(stages), torch.get_rng_state()


def assert_same(plain, again):
    for before, after in zip(plain, again, strict=True):
        torch.testing.assert_close(after, before, **IDENTICAL)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_gradients_of_language_models_with_dropout_are_the_same_to_the_last_bit(name, precision):
    model = family(name)
    microbatches = [torch.randint(VOCABULARY, (BATCH, LENGTH)) for _ in range(3)]
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    gradients = [drawn(BATCH, LENGTH, VOCABULARY, seed=seed).to(dtype) for seed in range(3)]
    runs = [
        trained(model, microbatches, gradients, precision=precision, recompute=recompute)
        for recompute in ("none", "block")
    ]
    assert_same(*runs)
    different = trained(model, microbatches[::-1], gradients, precision=precision, recompute="block")
    assert not torch.equal(next(iter(different[1].values())), next(iter(runs[0][1].values())))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "deberta-v2"])
def test_gradients_of_classifiers_with_side_inputs_are_the_same(name):
    model = family(name)
    ids, side = inputs(name)
    found = []
    for recompute in ("none", "block"):
        stage = build_stage(model, range(len(model.layers)), seed=11, recompute=recompute)
        torch.manual_seed(4)
        output = stage(ids, **side)
        output.backward(drawn(*output.shape, seed=1))
        found.append((output.detach(), gradients_of([stage])))
    assert_same(*found)


def test_a_batch_norm_counts_each_micro_batch_once():
    microbatches = [drawn(2, 3, 8, 8, seed=seed) + seed for seed in range(4)]
    gradients = [drawn(2, 2, seed=10 + seed) for seed in range(4)]
    plain, again = (trained(images(), microbatches, gradients, recompute=kind) for kind in ("none", "block"))
    assert_same(plain, again)
    assert plain[2]["head.0.num_batches_tracked"] == 4


def test_layers_run_twice_where_gradients_flow_and_once_elsewhere():
    model = images()
    for recompute, times in (("none", 1), ("block", 2)):
        stage = build_stage(model, range(3), seed=0, recompute=recompute)
        calls = []
        stage.layers[1].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        # the hook of a layer, whose last product torch does not compute again
        stage.layers[1].sequence[0].register_forward_pre_hook(lambda *_, calls=calls: calls.append(0))
        stage(drawn(2, 3, 8, 8, seed=0)).sum().backward()
        assert calls.count(0) == times
        calls.clear()
        with torch.no_grad():
            stage.eval()(drawn(2, 3, 8, 8, seed=0))
        assert calls.count(0) == 1


def kept(model, ids, recompute):
    """Bytes that a stage keeps for its backward, apart from its weights."""
    stage, held = build_stage(model, range(len(model.layers)), seed=0, recompute=recompute), {}

    def keep(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = stage(ids)
    weights = {parameter.untyped_storage().data_ptr() for parameter in stage.parameters()}
    assert output.requires_grad
    return sum(nbytes for storage, nbytes in held.items() if storage not in weights)


def test_a_stage_keeps_the_inputs_of_its_blocks_only():
    model, ids = family("gpt2"), torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    between = BATCH * LENGTH * 16 * 4
    inputs_of_all = ids.numel() * 8 + (len(model.layers) - 1) * between
    assert kept(model, ids, "block") == inputs_of_all
    assert kept(model, ids, "none") > 8 * inputs_of_all


@pytest.mark.slow
def test_costs_know_what_is_computed_again():
    model, ids = family("gpt2"), torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    plain, again = (measure(model, ids, recompute=kind)[1] for kind in ("none", "block"))
    assert again.activation_bytes == BATCH * LENGTH * 16 * 4 < plain.activation_bytes


class Moving(nn.Module):
    """Scales by a buffer that its forward reads and then moves."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        result = (x * self.weight * self.scale).tanh()
        self.scale = self.scale + 0.5
        return result


def test_what_a_forward_reads_and_then_moves_is_the_same_again_in_the_backward():
    """The second run began where the first had ended, and the gradients were others."""
    layers = tuple(LayerSpec(name, lambda name=name: Chain({name: Moving()})) for name in ("first", "second"))
    model = Blueprint(layers, lambda name, module: nn.init.ones_(module.weight))
    microbatches = [drawn(3, 4, seed=seed) for seed in range(3)]
    gradients = [drawn(3, 4, seed=3 + seed) for seed in range(3)]
    plain, again = (trained(model, microbatches, gradients, recompute=how) for how in ("none", "block"))
    assert_same(plain, again)
