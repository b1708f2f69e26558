"""The arithmetic of a stage: what crosses a boundary is as narrow as the products, and the weights stay as they are."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from support.family_cases import LENGTH, apart, inputs, whole
from support.models import blueprint
from support.pipelined import drawn, reset
from thinwire.models.architectures.parity import tiny
from thinwire.models.costs import measure
from thinwire.models.layers import Blueprint, Chain, LayerSpec, build_stage, stage_output_examples
from thinwire.models.options import ModelOptions
from thinwire.models.precision import arithmetic_note

CUTS = [range(0, 2), range(2, 5)]


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_hidden_state_crosses_in_the_type_of_the_products(precision, dtype):
    model, (ids, _) = apart("gpt2"), inputs("gpt2")
    [hidden], _ = stage_output_examples(model, CUTS, ids.to("meta"), precision)
    first, last = (build_stage(model, cut, seed=0, precision=precision) for cut in CUTS)
    sent = first(ids)
    assert (sent.dtype, hidden.dtype) == (dtype, dtype)
    assert {parameter.dtype for parameter in first.parameters()} == {torch.float32}
    received = sent.detach().requires_grad_()
    last(received).float().square().mean().backward()
    sent.backward(received.grad)
    assert received.grad.dtype == dtype
    gradients = [parameter.grad for stage in (first, last) for parameter in stage.parameters()]
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_a_whole_model_keeps_what_autocast_leaves_wide():
    """Nothing crosses a boundary there: the sum of an embedding and a product stays float32."""
    model, (ids, _) = apart("gpt2"), inputs("gpt2")
    stage = build_stage(model, range(5), seed=0, precision="bf16")
    kept = []
    stage.layers[1].register_forward_hook(lambda *arguments: kept.append(arguments[2].dtype))
    assert stage(ids).shape[:2] == ids.shape == (len(ids), LENGTH)
    assert kept == [torch.float32]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "bert"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_in_bfloat16_are_the_rounded_ones_and_compute_in_bfloat16(name, precision):
    wide, (ids, side) = apart(name), inputs(name)
    narrow = replace(wide, weights_dtype=torch.bfloat16)
    [hidden], [output] = stage_output_examples(narrow, CUTS, ids.to("meta"), precision, side)
    assert (hidden.dtype, output.dtype) == (torch.bfloat16, torch.bfloat16)
    first, last = (build_stage(narrow, cut, seed=0, precision=precision) for cut in CUTS)
    exact = build_stage(wide, CUTS[0], seed=0)
    for full_name, tensor in first.full_state().items():
        assert torch.equal(tensor, exact.full_state()[full_name].bfloat16()), full_name
    result = last(first(ids, **side), **side)
    assert result.dtype == torch.bfloat16
    result.float().square().mean().backward()
    assert {parameter.grad.dtype for parameter in first.parameters()} == {torch.bfloat16}
    exact = build_stage(wide, range(5), seed=0)(ids, **side)
    assert 0 < (result.float() - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["afmoe", "deepseek_v3", "llama"])
def test_weights_that_the_library_keeps_wide_stay_wide(name, tmp_path):
    """Routers were rounded, so that other experts were chosen; a bias that does not train made all angles float32."""
    whole(name).save_pretrained(tmp_path)
    theirs, (ids, _) = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).train(), inputs(name)
    options = ModelOptions(name=str(tmp_path), weights="pretrained", dtype="bf16", tied="untie")
    narrow = blueprint(options, task="causal-lm", block_size=LENGTH)
    [hidden], _ = stage_output_examples(narrow, CUTS, ids.to("meta"), "fp32")
    first, last = (build_stage(narrow, cut, seed=0) for cut in CUTS)
    expected, sent = theirs.state_dict(), first(ids)
    for full_name, tensor in {**first.full_state(), **last.full_state()}.items():
        assert tensor.dtype == expected[full_name].dtype, full_name
        assert torch.equal(tensor, expected[full_name]), full_name
    assert (torch.float32 in {tensor.dtype for tensor in expected.values()}) == (name != "llama")
    assert hidden.dtype == sent.dtype
    assert torch.equal(last(sent), theirs(input_ids=ids).logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ("falcon_h1", "gemma2", "mamba", "xglm") if name in CONFIG_MAPPING])
def test_what_the_library_makes_narrow_is_as_narrow_and_what_it_keeps_wide_crosses_wide(name, tmp_path):
    """Logits differed by 0.01 of the largest.

    Positions of XGLM and multipliers of Falcon H1 stayed float32, and the sum of Mamba's blocks did not.
    """
    _, uncut, _, ids, _ = tiny(AutoConfig.for_model(name), "causal-lm")
    uncut.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    options = ModelOptions(name=str(tmp_path), weights="pretrained", dtype="bf16", tied="untie")
    narrow = blueprint(options, task="causal-lm", block_size=ids.shape[1])
    stages, found = [build_stage(narrow, range(at, at + 1), seed=0).eval() for at in range(len(narrow.layers))], ids

    def dtypes(*models):
        return {(path.rpartition(".")[2], each.dtype) for model in models for path, each in model.named_buffers()}

    assert dtypes(*stages) == dtypes(theirs)
    with torch.no_grad():
        for stage in stages:
            found = stage(found)
        assert torch.equal(found, theirs(input_ids=ids).logits)


def test_rotary_frequencies_and_batch_norms_stay_wide_and_pixels_become_narrow():
    llama = build_stage(replace(apart("llama"), weights_dtype=torch.bfloat16), range(1, 2), seed=0)
    frequencies = [buffer for name, buffer in llama.named_buffers() if "inv_freq" in name]
    assert {buffer.dtype for buffer in frequencies} == {torch.float32}
    parts = {"conv": lambda: nn.Conv2d(3, 4, 3), "norm": lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3))}
    layers = tuple(LayerSpec(name, lambda name=name: Chain({name: parts[name]()})) for name in parts)
    stage = build_stage(Blueprint(layers, reset, weights_dtype=torch.bfloat16), range(2), seed=0)
    assert stage(drawn(2, 3, 8, 8, seed=0)).dtype == torch.bfloat16
    dtypes = {name: tensor.dtype for name, tensor in stage.full_state().items()}
    assert dtypes["conv.weight"] == dtypes["norm.1.weight"] == torch.bfloat16
    assert dtypes["norm.0.weight"] == dtypes["norm.0.running_mean"] == torch.float32


@pytest.mark.slow
def test_measured_costs_know_the_size_of_narrow_weights():
    model, (ids, _) = apart("gpt2"), inputs("gpt2")
    wide, narrow = (measure(each, ids) for each in (model, replace(model, weights_dtype=torch.bfloat16)))
    assert [cost.parameter_bytes for cost in wide] == [2 * cost.parameter_bytes for cost in narrow]
    assert wide[1].output_bytes == 2 * narrow[1].output_bytes


def test_where_fp32_on_a_gpu_means_tf32_is_said(monkeypatch):
    assert arithmetic_note("fp32", False, "cpu") is arithmetic_note("bf16", False, "cuda") is None
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    said = arithmetic_note("fp32", False, "cuda")
    assert said == "fp32 on a GPU: matrix products keep all digits, convolutions round to TF32"
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert "matrix products round to TF32" in arithmetic_note("fp32", False, "cuda")


@pytest.mark.parametrize(("precision", "narrow"), [("bf16", False), ("fp32", True)])
def test_a_cpu_that_emulates_products_of_16_bits_is_named(monkeypatch, precision, narrow):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert "no instructions for bf16" in arithmetic_note(precision, narrow, "cpu")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert arithmetic_note(precision, narrow, "cpu") is None
