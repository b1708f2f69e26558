"""LoRA in stages is LoRA of PEFT on the unsplit model: names, values, losses, gradients, and what is refused."""

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from support.family_cases import ALL, BATCH, LABELS, LENGTH, VOCABULARY, inputs, library_side, whole
from support.models import blueprint
from support.pipelined import as_tuple, drawn
from thinwire.models.errors import ModelError
from thinwire.models.layers import build_stage, check_weights, stage_output_examples
from thinwire.models.lora import CONFIG_FILE, WEIGHTS_FILE, check_config, for_peft, is_adapter, linears, merged_state
from thinwire.models.model import find_model
from thinwire.models.options import LoraOptions, ModelOptions
from thinwire.models.partition import partition

peft = pytest.importorskip("peft", reason="peft is not installed")

TARGETS = {
    "gpt2": {"c_attn", "c_proj", "c_fc"},
    "llama": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "opt": {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", "project_in", "project_out"},
    "bert": {"query", "key", "value", "dense"},
    "roberta": {"query", "key", "value", "dense"},
    "qwen3": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "gemma3_text": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "phi3": {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"},
    "olmo2": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "granite": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "mixtral": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "gpt_oss": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "falcon": {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},  # had none: a Linear with its own forward
    "mamba": {"in_proj", "x_proj"},  # out_proj and dt_proj are read past their adapters
    # PEFT took gate_proj, up_proj and down_proj of shared experts for the experts', and left out what had trained
    "deepseek_v3": {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
}
"""The modules of all-linear, of cases of each kind: both sorts of linear modules, more behind the blocks, a head."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Gives the folder of a pretrained model of a case, made once."""
    made = tmp_path_factory.mktemp("pretrained")

    def of(name):
        if not (made / name).is_dir():
            with torch.random.fork_rng():
                torch.manual_seed(5)
                whole(name, tie_word_embeddings=name == "llama").save_pretrained(made / name)
        return str(made / name)

    return of


def adapted(folder, name, *, dtype="fp32", **lora):
    lora = LoraOptions(**{"rank": 3, **lora})
    options = ModelOptions(name=folder(name), weights="pretrained", lora=lora, dtype=dtype)
    find_model(options)
    made = blueprint(options, task=ALL[name].task, num_labels=LABELS, block_size=LENGTH)
    return replace(made, weights_dtype=torch.float32 if dtype == "fp32" else torch.bfloat16)


def split(model, num_stages=3, seed=11):
    return [build_stage(model, cut, seed=seed) for cut in partition([layer.cost for layer in model.layers], num_stages)]


def trained(stages):
    return {
        name: each for stage in stages for name, each in stage.full_parameters().items() if name in stage.saved_state()
    }


def saved(stages):
    return {name: each.detach() for stage in stages for name, each in stage.saved_state().items()}


def wake(stages):
    """Give the second matrices, which begin as zeros, values of their own: else the first have no gradients."""
    for name, parameter in trained(stages).items():
        if ".lora_B." in name:
            parameter.data.copy_(drawn(*parameter.shape, seed=len(name)))


def run(stages, ids, side, gradient):
    """Forward and backward of stages; nothing goes back where nothing trains."""
    leaves, outputs = [ids], []
    for stage in stages:
        [output] = as_tuple(stage(leaves[-1], **side))
        outputs.append(output)
        leaves.append(output.detach().requires_grad_(output.requires_grad))
    for leaf, output in zip(reversed(leaves[:-1]), reversed(outputs), strict=True):
        if output.requires_grad:
            output.backward(gradient)
            gradient = leaf.grad
    return outputs[-1].detach()


def unsplit(folder, name, model, stages, target):
    """PEFT's own model around the one of transformers, with the adapter of the stages, which went through files."""
    target.mkdir()
    model.save_config(target)
    save_file(for_peft(saved(stages)), target / WEIGHTS_FILE)
    auto = {"causal-lm": AutoModelForCausalLM, "classification": AutoModelForSequenceClassification}[ALL[name].task]
    base = auto.from_pretrained(folder(name), num_labels=LABELS)
    return peft.PeftModel.from_pretrained(base, target, is_trainable=True).train()


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_names_values_and_gradients_are_those_of_peft_on_the_unsplit_model(folder, tmp_path, name):
    model = adapted(folder, name)
    stages = split(model)
    wake(stages)
    theirs = unsplit(folder, name, model, stages, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / CONFIG_FILE).read_text())
    assert {target.rpartition(".")[2] for target in config["target_modules"]} == TARGETS[name]
    if name not in ("bert", "roberta"):  # whose heads have a dense as well, which trains in full
        assert config["target_modules"] == sorted(TARGETS[name])
    of_peft = peft.get_peft_model_state_dict(theirs)
    assert of_peft.keys() == for_peft(saved(stages)).keys()
    for key, tensor in for_peft(saved(stages)).items():
        assert torch.equal(of_peft[key], tensor)

    ids, side = inputs(name)
    expected = theirs(input_ids=ids, **library_side(name, side)).logits
    gradient = drawn(*expected.shape, seed=3)
    torch.testing.assert_close(run(stages, ids, side, gradient), expected.detach(), rtol=1e-5, atol=1e-5)
    expected.backward(gradient)
    gradients = {own_name(key): each.grad for key, each in theirs.named_parameters() if each.requires_grad}
    assert gradients.keys() == trained(stages).keys()
    for key, parameter in trained(stages).items():
        torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-4, atol=1e-5, msg=key)
    assert all(each.grad is None for stage in stages for each in stage.parameters() if not each.requires_grad)


def own_name(of_peft):
    """A parameter of PEFT's model as the stages call it: what trains in full is wrapped there."""
    return of_peft.removeprefix("base_model.model.").replace(".modules_to_save.default.", ".")


def of_four_bits(base):
    """A model of transformers, the linear modules of its blocks as bitsandbytes has them."""
    bits = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").nn
    for layer in base.model.layers:
        for name, linear in [(n, m) for n, m in layer.named_modules() if isinstance(m, torch.nn.Linear)]:
            made = bits.Linear4bit(linear.in_features, linear.out_features, linear.bias is not None)
            made.weight = bits.Params4bit(linear.weight.data, False, compress_statistics=False, quant_type="nf4")
            layer.set_submodule(name, made.to("cpu"))
    return base


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_beside_a_base_of_4_bits_it_is_that_of_peft(folder, tmp_path, name):
    plain = AutoModelForCausalLM.from_pretrained(folder(name), dtype=torch.bfloat16)
    base = of_four_bits(plain)
    model = adapted(folder, name, dtype="nf4")
    stages = split(model)
    wake(stages)
    model.save_config(tmp_path)
    save_file(for_peft(saved(stages)), tmp_path / WEIGHTS_FILE)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path, is_trainable=True).train()
    ids, side = inputs(name)
    expected = theirs(input_ids=ids).logits
    gradient = drawn(*expected.shape, seed=3).to(expected.dtype)
    torch.testing.assert_close(run(stages, ids, side, gradient), expected.detach(), rtol=1e-2, atol=1e-2)
    expected.backward(gradient)
    gradients = {own_name(key): each.grad for key, each in theirs.named_parameters() if each.requires_grad}
    for key, parameter in trained(stages).items():
        assert parameter.dtype == torch.float32
        difference = (parameter.grad - gradients[key]).norm() / gradients[key].norm()
        assert difference < 0.02, (key, difference)


def test_a_base_of_4_bits_never_lies_in_memory_as_a_whole(folder, monkeypatch):
    """Each block is packed before the next gets its values; the embedding, norms and head are bfloat16."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    model, filled = adapted(folder, "llama", dtype="nf4"), []
    narrow = model.narrow

    def note(index, layer):
        filled.append(index)
        narrow(index, layer)
        kinds = {p.dtype for p in layer.parameters() if not p.requires_grad}
        assert kinds == ({torch.uint8, torch.bfloat16} if index in (1, 2, 3) else {torch.bfloat16})

    stage = build_stage(replace(model, narrow=note), range(5), seed=0)
    assert filled == [0, 1, 2, 3, 4]
    assert {each.dtype for each in stage.saved_state().values()} == {torch.float32}
    whole_base = build_stage(adapted(folder, "llama", dtype="bf16"), range(5), seed=0).base
    assert stage.base == whole_base, "named as before it was packed: an adapter may be merged into the model itself"


def test_what_the_library_does_not_quantize_is_not_quantized(folder):
    model = adapted(folder, "deepseek_v3", dtype="bf16", targets=["o_proj"])
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    linear, fewer = (linears(model.layers[2].build(), kept) for kept in ((), (name,)))
    assert len(linear) == len(fewer) + 1 and "model.layers.1.mlp.gate.weight" in model.wide
    frozen = {name: each for stage in split(model) for name, each in stage.full_state().items()}
    assert {name for name, each in frozen.items() if each.dtype == torch.float32 and ".lora_" not in name} == model.wide


def test_weights_of_4_bits_are_for_lora_and_for_linear_modules(folder, monkeypatch):
    with pytest.raises(ModelError, match=r"dtype nf4 needs model\.lora, because weights of 4 bits do not train"):
        ModelOptions(name="gpt2", dtype="nf4")
    monkeypatch.setattr("thinwire.models.lora.find_spec", lambda name: None if name == "bitsandbytes" else name)
    with pytest.raises(ModelError, match=r"nf4 needs the library bitsandbytes, .*: pip install bitsandbytes"):
        adapted(folder, "gpt2", dtype="nf4")
    monkeypatch.undo()
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    with pytest.raises(ModelError, match=r"needs linear modules, and the blocks of .*gpt2 have none; take bf16"):
        adapted(folder, "gpt2", dtype="nf4")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_merged_it_is_the_model_that_peft_merges(folder, tmp_path, name):
    model = adapted(folder, name)
    [stage] = split(model, 1)
    wake([stage])
    theirs = unsplit(folder, name, model, [stage], tmp_path / "adapter").merge_and_unload().state_dict()
    for key, tensor in merged_state(stage).items():
        assert torch.equal(theirs[key], tensor), key


@pytest.mark.slow
def test_first_values_come_from_seed_and_name_whatever_the_cut(folder):
    model = adapted(folder, "llama", targets=["q_proj"])
    one, three, other = (saved(split(model, count, seed)) for count, seed in ((1, 7), (3, 7), (3, 8)))
    assert one.keys() == three.keys() == other.keys() and len(one) == 6
    for name, tensor in one.items():
        assert torch.equal(tensor, three[name])
        assert is_adapter(name) and (".lora_B." in name) == bool((tensor == 0).all())
    assert not any(torch.equal(one[name], other[name]) for name in one if ".lora_A." in name)


@pytest.mark.slow
def test_nothing_goes_back_where_nothing_trains(folder):
    model = adapted(folder, "llama", targets=r".*layers\.2\.mlp\.(up|down)_proj")
    cuts = [range(0, 2), range(2, 3), range(3, 5)]
    outputs = stage_output_examples(model, cuts, torch.zeros(BATCH, LENGTH, dtype=torch.int64), "fp32")
    assert [output.requires_grad for [output] in outputs] == [False, False, True]
    stages = [build_stage(model, cut, seed=0) for cut in cuts]
    assert [len(stage.saved_state()) for stage in stages] == [0, 0, 4]
    ids, side = inputs("llama")
    run(stages, ids, side, torch.ones(BATCH, LENGTH, VOCABULARY))
    assert {name for name, each in trained(stages).items() if each.grad is not None} == trained(stages).keys()


@pytest.mark.slow
def test_a_base_in_bfloat16_leaves_what_trains_in_float32(folder):
    model = replace(adapted(folder, "llama"), weights_dtype=torch.bfloat16)
    stages = split(model)
    assert {each.dtype for each in trained(stages).values()} == {torch.float32}
    frozen = {each.dtype for stage in stages for each in stage.parameters() if not each.requires_grad}
    assert frozen == {torch.bfloat16}
    ids, side = inputs("llama")
    assert run(stages, ids, side, torch.ones(BATCH, LENGTH, VOCABULARY).bfloat16()).dtype == torch.bfloat16


def test_the_base_is_known_by_its_bytes_and_is_not_saved(folder):
    stages = split(adapted(folder, "llama"))
    whole_state = {name for stage in stages for name in stage.full_state()}
    base = {name: line for stage in stages for name, line in stage.base.items()}
    assert base.keys() | saved(stages).keys() == whole_state and not base.keys() & saved(stages).keys()
    key = "model.layers.1.mlp.up_proj.base_layer.weight"
    assert base[key].startswith(f"{key}, float32, [24,16], ")


@pytest.mark.slow
def test_it_starts_from_an_adapter_of_peft(folder, tmp_path):
    model = adapted(folder, "bert", targets=["query"])
    stages = split(model)
    wake(stages)
    unsplit(folder, "bert", model, stages, tmp_path / "adapter")
    again = adapted(folder, "bert", targets=["query"], weights=str(tmp_path / "adapter"))
    assert check_weights(again) == []
    for name, tensor in saved(split(again, 2, seed=5)).items():
        assert torch.equal(tensor, saved(stages)[name])

    refusals = {
        "model.lora.rank must be 3, as in": {"rank": 4, "targets": ["query"], "alpha": 6},
        "model.lora.alpha must be 6, as in": {"targets": ["query"], "alpha": 7},
        "must have the targets of model.lora.targets, and has bert.encoder.layer.0.attention.self.query": {
            "targets": r".*layer\.1.*query"
        },
        "model.lora.targets must be those of the adapter in": {"targets": ["query", "key"]},
    }
    for said, lora in refusals.items():
        with pytest.raises(ModelError, match=re.escape(said)):
            check_weights(adapted(folder, "bert", weights=str(tmp_path / "adapter"), **lora))
    plain = load_file(tmp_path / "adapter" / WEIGHTS_FILE)
    for other in ("bert.embeddings.weight", "bert.pooler.lora_B.bias", "bert.embeddings.lora_embedding_A"):
        save_file(plain | {f"base_model.model.{other}": torch.ones(1)}, tmp_path / "adapter" / WEIGHTS_FILE)
        with pytest.raises(ModelError, match=rf"must hold no weights but its matrices, and .* has {other};"):
            check_weights(adapted(folder, "bert", targets=["query"], weights=str(tmp_path / "adapter")))
    config = json.loads((tmp_path / "adapter" / CONFIG_FILE).read_text()) | {"init_lora_weights": "pissa"}
    (tmp_path / "adapter" / CONFIG_FILE).write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"must be a plain LoRA, and .*config.json has init_lora_weights pissa"):
        adapted(folder, "bert", targets=["query"], weights=str(tmp_path / "adapter"))
    with pytest.raises(ModelError, match=r"model.lora.weights must be fresh or a folder with adapter_model"):
        adapted(folder, "bert", weights=folder("bert"))


PLAIN = [{}, *({"init_lora_weights": start} for start in (True, False, "gaussian", "eva", "orthogonal"))]
NOT_PLAIN = [
    *({"init_lora_weights": start} for start in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga")),
    *({field: True} for field in ("use_dora", "use_rslora", "use_qalora", "lora_bias")),
    *({field: [1]} for field in ("target_parameters", "trainable_token_indices", "layer_replication")),
    *({field: {"any": 1}} for field in ("use_bdlora", "kasa_config", "rank_pattern", "alpha_pattern")),
    *({"bias": "all"}, {"alora_invocation_tokens": [1, 2]}),
]
"""Fields of PEFT's configurations of adapters."""


@pytest.mark.parametrize("fields", NOT_PLAIN, ids=str)
def test_an_adapter_that_is_no_plain_lora_is_refused(tmp_path, fields):
    """Those that begin as PiSSA change the model too; beside the model as it was, they made another one."""
    path = tmp_path / CONFIG_FILE
    path.write_text(json.dumps({"r": 3, "lora_alpha": 6} | fields))
    [name] = fields
    with pytest.raises(ModelError, match=re.escape(f"must be a plain LoRA, and {path} has {name} {fields[name]}")):
        check_config(path, LoraOptions(rank=3))


@pytest.mark.parametrize("fields", PLAIN, ids=str)
def test_a_plain_lora_may_begin_in_several_ways(tmp_path, fields):
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"r": 3, "lora_alpha": 6} | fields))
    check_config(tmp_path / CONFIG_FILE, LoraOptions(rank=3))


def test_alpha_may_be_any_number_and_a_file_may_be_nested_deep(tmp_path):
    path = tmp_path / CONFIG_FILE
    path.write_text(json.dumps({"r": 3, "lora_alpha": 6.5}))
    check_config(path, LoraOptions(rank=3, alpha=6.5))
    path.write_text('{"r":' + "[" * 100_000)
    with pytest.raises(ModelError, match="must be the configuration of an adapter, but it is damaged: RecursionError"):
        check_config(path, LoraOptions(rank=3))


def test_an_adapter_of_other_targets_is_said_to_be_one(folder, tmp_path):
    """It was said to hold not every weight of the model."""
    stages = split(adapted(folder, "llama", targets=["q_proj", "v_proj"]))
    save_file(for_peft(saved(stages)), tmp_path / WEIGHTS_FILE)
    model = adapted(folder, "llama", targets=["q_proj", "o_proj"], weights=str(tmp_path))
    said = rf"model.lora.targets must be those of the adapter in {tmp_path}, which lacks .*o_proj.*; set them to "
    with pytest.raises(ModelError, match=said + r"\[q_proj, v_proj\]$"):
        check_weights(model)


MISTAKES = {
    "model.lora.rank must be at least 1, got 0": {"rank": 0},
    "model.lora.alpha must be above 0, got 0": {"alpha": 0},
    "model.lora.dropout must lie in 0..1, below 1, got 1": {"dropout": 1},
    "model.lora.targets must name modules, got none": {"targets": []},
    "model.lora needs a rank, such as model.lora.rank 16": {"rank": None, "dropout": 0.1},
    "model.lora.targets must name linear modules of the model in a list, such as [down_proj, gate_proj], or be": {
        "targets": ["q_proj", "k_porj"]
    },
    "model.lora.targets must name linear modules that PEFT adapts, got model.norm": {"targets": ["norm"]},
    "whole names, got .*xyz; it has": {"targets": ".*xyz"},
    "whole names, got q_proj; it has": {"targets": "q_proj"},
    "a regular expression for whole names such as .*q_proj, got *.q_proj": {"targets": "*.q_proj"},
}


@pytest.mark.parametrize("said", MISTAKES)
def test_mistakes_are_one_sentence(folder, said):
    with pytest.raises(ModelError, match=re.escape(said)) as caught:
        adapted(folder, "llama", **MISTAKES[said])
    assert len(caught.value.mistakes) == 1


@pytest.mark.parametrize(
    ("name", "target"), [("mamba", "out_proj"), ("mamba", "dt_proj"), ("deepseek_v3", "down_proj")]
)
def test_targets_that_peft_does_not_adapt_are_refused(folder, name, target):
    with pytest.raises(ModelError, match=rf"must name linear modules that PEFT adapts, got \S+\.{target}"):
        adapted(folder, name, targets=[target])


def test_it_needs_a_pretrained_model_of_text(monkeypatch):
    lora = LoraOptions(rank=4)
    with pytest.raises(ModelError, match=r"weights must be pretrained or a folder for model.lora, .* got fresh"):
        ModelOptions(name="llama", lora=lora)
    with pytest.raises(ModelError, match=r"needs a language model or a classifier of text, .* got resnet18"):
        find_model(ModelOptions(name="resnet18", weights="pretrained", lora=lora))
    monkeypatch.setattr("thinwire.models.lora.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=re.escape("not installed: pip install 'thinwire[lora]'")):
        find_model(ModelOptions(name="llama", weights="pretrained", lora=lora))
