import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.family_cases import CASES, LABELS, LENGTH, apart, inputs, library_side, split, state_of, whole
from support.models import blueprint
from support.scripts import said
from thinwire.errors import ThinwireWarning
from thinwire.models.checkpoint import open_checkpoint
from thinwire.models.errors import ModelError
from thinwire.models.layers import build_stage, check_weights
from thinwire.models.options import ModelOptions

IDENTICAL = {"rtol": 0, "atol": 0}
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def pretrained(folder, task, **config):
    given = ModelOptions(name=str(folder), weights="pretrained", config=config)
    return blueprint(given, task=task, num_labels=LABELS if task == "classification" else None, block_size=LENGTH)


def outputs(stages, ids, side):
    for stage in stages:
        ids = stage.eval()(ids, **side)
    return ids


@pytest.fixture
def saved(tmp_path):
    """Save a tiny random model whole, as transformers does; return it."""

    def save(name, sharded=False, **changes):
        torch.manual_seed(4)
        model = whole(name, **changes).eval()
        model.save_pretrained(tmp_path, **({"max_shard_size": "4KB"} if sharded else {}))
        return model

    return save


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_pretrained_model_is_read_and_what_is_exported_loads_in_the_library(name, saved, tmp_path, recwarn):
    import transformers

    model, (ids, side) = saved(name), inputs(name)
    layered = pretrained(tmp_path, CASES[name].task)
    stages = split(layered, 3)
    assert not [str(w.message) for w in recwarn if "drawn" in str(w.message)]
    expected = model(input_ids=ids, **library_side(name, side)).logits
    torch.testing.assert_close(outputs(stages, ids, side), expected, **CLOSE)

    exported = tmp_path / "exported"
    layered.save_config(exported)
    save_file(state_of(stages), exported / "model.safetensors", metadata={"format": "pt"})
    loaded, report = getattr(transformers, model.__class__.__name__).from_pretrained(exported, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    torch.testing.assert_close(loaded.state_dict(), state_of(stages), **IDENTICAL)
    torch.testing.assert_close(loaded.eval()(input_ids=ids, **library_side(name, side)).logits, expected, **CLOSE)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox", "opt"])
def test_a_tied_head_starts_as_a_copy_of_the_embedding(name, saved, tmp_path):
    model = saved(name, tie_word_embeddings=True)
    assert not any(key.startswith("lm_head") for key in load_file(tmp_path / "model.safetensors"))
    stages = split(pretrained(tmp_path, "causal-lm"), 4)
    ids, _ = inputs(name)
    torch.testing.assert_close(outputs(stages, ids, {}), model(input_ids=ids).logits, **CLOSE)
    embedding = model.get_input_embeddings().weight
    torch.testing.assert_close(state_of(stages)["lm_head.weight"], embedding.detach(), **IDENTICAL)


def test_a_stage_opens_only_the_shards_it_needs(saved, tmp_path):
    model = saved("llama", sharded=True)
    shards = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    layered = pretrained(tmp_path, "causal-lm")
    state = state_of(split(layered, 4))
    torch.testing.assert_close(state, dict(model.state_dict()), **IDENTICAL)
    needed = {file for name, file in shards.items() if name.startswith("model.layers.1.")}
    for file in set(shards.values()) - needed:
        (tmp_path / file).unlink()
    assert build_stage(layered, range(2, 3), seed=0).full_state().keys() < state.keys()
    with pytest.raises(ModelError, match=r"must hold model-0.*because its index names this file; it is missing"):
        build_stage(layered, range(1), seed=0)


def rewrite(folder: Path, rename, change=lambda tensor: tensor) -> None:
    state = load_file(folder / "model.safetensors")
    renamed = {new: change(tensor) for name, tensor in state.items() if (new := rename(name)) is not None}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "rename"),
    [
        ("gpt2", lambda name: name.removeprefix("transformer.")),
        ("opt", lambda name: name.removeprefix("model.")),
        (
            "bert",
            lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            ),
        ),
        ("gpt_neox", lambda name: name.replace("lm_head", "embed_out")),
    ],
)
def test_other_names_of_the_same_tensors_are_known(name, rename, saved, tmp_path):
    model = saved(name)
    rewrite(tmp_path, rename)
    state = state_of(split(pretrained(tmp_path, CASES[name].task), 2))
    torch.testing.assert_close(state, dict(model.state_dict()), **IDENTICAL)


@pytest.mark.slow
def test_a_new_classifier_is_drawn_and_said_so_once(saved, tmp_path, recwarn):
    model = saved("bert")
    rewrite(tmp_path, lambda name: name.removeprefix("bert.") if name.startswith("bert.e") else None)
    layered = pretrained(tmp_path, "classification")
    recwarn.clear()
    cut, one = state_of(split(layered, 4)), state_of(split(layered, 1))
    [said] = [str(warning.message) for warning in recwarn if warning.category is ThinwireWarning]
    names = "bert.pooler.dense.weight, bert.pooler.dense.bias, classifier.weight, classifier.bias"
    assert said == f"the checkpoint has no {names}; the seed gives their values"
    torch.testing.assert_close(cut, one, **IDENTICAL)
    fresh = state_of(split(apart("bert"), 1))
    for name, tensor in one.items():
        expected = fresh[name] if name in names else model.state_dict()[name]
        torch.testing.assert_close(tensor, expected, **IDENTICAL)


def test_bf16_files_fill_fp32_weights(saved, tmp_path):
    model = saved("qwen3").bfloat16()
    model.save_pretrained(tmp_path)
    state = state_of(split(pretrained(tmp_path, "causal-lm"), 2))
    expected = {name: tensor.float() for name, tensor in model.state_dict().items()}
    torch.testing.assert_close(state, expected, **IDENTICAL)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}


def test_every_weight_of_another_shape_is_named(saved, tmp_path):
    saved("gpt2")
    [stage_of_embedding] = [pretrained(tmp_path, "causal-lm", vocab_size=70, n_positions=20)]
    with pytest.raises(ModelError) as caught:
        build_stage(stage_of_embedding, range(1), seed=0)
    for part in ("transformer.wte.weight must be of shape [70, 16], got [61, 16]", "wpe.weight must be", "do not fit"):
        assert part in str(caught.value), str(caught.value)


def test_a_lost_block_is_an_error_and_not_drawn(saved, tmp_path):
    saved("bert")
    rewrite(tmp_path, lambda name: None if "layer.1.output.dense" in name else name)
    layered = pretrained(tmp_path, "classification")
    with pytest.raises(ModelError, match=r"must hold every weight .* lacks bert\.encoder\.layer\.1\.output\.dense\."):
        build_stage(layered, range(5), seed=0)


@pytest.mark.slow
def test_lost_experts_are_told_by_the_weight_that_they_make(saved, tmp_path):
    saved("mixtral")
    experts = "model.layers.1.block_sparse_moe.experts"
    rewrite(tmp_path, lambda name: None if name == f"{experts}.2.w2.weight" else name)
    with pytest.raises(
        ModelError, match=r"layers\.1\.mlp\.experts\.down_proj must be of shape \[4, 16, 24\], got \[3, 16, 24\]$"
    ):
        check_weights(pretrained(tmp_path, "causal-lm"))
    add(tmp_path, **{f"{experts}.2.w2.weight": torch.ones(16, 23)})
    with pytest.raises(ModelError, match=r"got 4 tensors that do not make one: RuntimeError: stack"):
        check_weights(pretrained(tmp_path, "causal-lm"))
    rewrite(tmp_path, lambda name: None if ".1." in name and ".w2." in name else name)
    with pytest.raises(ModelError, match=r"weight of the model, and lacks model\.layers\.1\.mlp\.experts\.down_proj"):
        check_weights(pretrained(tmp_path, "causal-lm"))


def test_folders_without_safetensors(saved, tmp_path):
    saved("gpt2")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"must hold model\.safetensors or .*; to draw .*, set weights: fresh"):
        pretrained(tmp_path, "causal-lm")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"it holds pytorch_model\.bin: convert it with from_pretrained"):
        pretrained(tmp_path, "causal-lm")
    (tmp_path / "model.safetensors").write_bytes(b"\x08")
    with pytest.raises(ModelError, match="must be a whole safetensors file"):
        pretrained(tmp_path, "causal-lm")


def test_the_whole_file_counts_before_an_index_that_was_left(saved, tmp_path):
    """As in transformers. The index came first, and named the weights of before."""
    saved("llama", sharded=True)
    model = saved("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(0.25)
    model.save_pretrained(tmp_path / "new")
    (tmp_path / "new" / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    torch.testing.assert_close(
        state_of(split(pretrained(tmp_path, "causal-lm"), 2)), dict(model.state_dict()), **IDENTICAL
    )


@pytest.mark.slow
def test_a_head_that_is_stored_is_read_whatever_the_configuration_says_of_ties(saved, tmp_path):
    model = saved("llama", tie_word_embeddings=False)
    for changes in ({}, {"tie_word_embeddings": True}):
        state = state_of(split(pretrained(tmp_path, "causal-lm", **changes), 2))
        torch.testing.assert_close(state["lm_head.weight"], model.lm_head.weight.detach(), **IDENTICAL)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["lm_head.weight", "model.embed_tokens.weight"])
def test_of_a_tied_pair_one_stored_tensor_gives_both(lost, saved, tmp_path):
    model = saved("llama", tie_word_embeddings=False)
    rewrite(tmp_path, lambda name: None if name == lost else name)
    [kept] = {"lm_head.weight", "model.embed_tokens.weight"} - {lost}
    state = state_of(split(pretrained(tmp_path, "causal-lm", tie_word_embeddings=True), 2))
    torch.testing.assert_close(state[lost], model.state_dict()[kept], **IDENTICAL)
    with pytest.raises(ModelError, match=rf"must hold every weight of the model, and lacks {lost}"):
        check_weights(pretrained(tmp_path, "causal-lm"))


def add(folder: Path, **tensors) -> None:
    state = load_file(folder / "model.safetensors") | {name.replace("__", "."): t for name, t in tensors.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def test_stored_tensors_that_nobody_reads_are_named(saved, tmp_path):
    saved("gpt2")
    assert check_weights(pretrained(tmp_path, "causal-lm")) == []
    add(tmp_path, transformer__h__0__attn__bias=torch.ones(2), extra__weight=torch.ones(2))
    assert check_weights(pretrained(tmp_path, "causal-lm")) == ["extra.weight"]


def test_quantized_weights_are_refused(saved, tmp_path):
    saved("llama")
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(tmp_path, lambda name: name, lambda tensor: tensor.to(torch.float8_e4m3fn))
    with pytest.raises(ModelError, match=r"weights of F64, F32, F16, BF16, got model\..* \(F8_E4M3\) and \d+ more;"):
        check_weights(pretrained(tmp_path, "causal-lm"))
    add(tmp_path, **{f"{name}_scale_inv": torch.ones(1, 1)})
    with pytest.raises(ModelError, match=rf"weights that are not quantized, got {name}_scale_inv; take the model that"):
        check_weights(pretrained(tmp_path, "causal-lm"))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_refused(saved, tmp_path, value):
    saved("gpt2")
    add(tmp_path, transformer__ln_f__weight=torch.tensor([1.0, value] * 8))
    with pytest.raises(
        ModelError, match=r"must be numbers, got NaN or infinity in transformer\.ln_f\.weight; .* it diverged"
    ):
        split(pretrained(tmp_path, "causal-lm"), 2)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (
            "model.safetensors",
            b"version https://git-lfs.github.com/spec/v1\noid",
            "got a pointer of Git LFS: git lfs pull",
        ),
        ("adapter_config.json", b"{}", "it holds an adapter: merge it into its base model"),
        ("model.Q4.gguf", b"GGUF", "it holds a GGUF file: take the model as safetensors"),
    ],
)
def test_what_stands_in_place_of_weights_is_named(saved, tmp_path, name, content, told):
    saved("gpt2")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=told):
        pretrained(tmp_path, "causal-lm")


MEASURE = """
import ctypes, dataclasses, gc, pathlib, sys
import torch
from thinwire.models.layers import build_stage, check_weights
from support.models import blueprint
from thinwire.models.options import ModelOptions

def memory(field):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

# the same steps on a model of no size take what the libraries take
tiny = ModelOptions(config=dict(n_layer=1, n_embd=8, n_head=1, vocab_size=8, n_positions=8))
build_stage(blueprint(tiny, task="causal-lm"), range(3), seed=0)
for layers, dtype in ((range(2, 5), "float32"), (range(1), "float32"), (range(2, 7), "bfloat16")):
    gc.collect()
    # what was freed goes back, and the highest mark begins anew
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    options = ModelOptions(name=sys.argv[1], weights="pretrained")
    model = dataclasses.replace(blueprint(options, task="causal-lm"), weights_dtype=getattr(torch, dtype))
    stage = build_stage(model, layers, seed=0)
    print(sum(tensor.nbytes for tensor in stage.full_state().values()), memory("VmHWM") - before)
    del stage
"""


def write_gpt2(folder: Path, n_layer: int, n_embd: int) -> int:
    """Write a GPT-2 of these sizes without computing its values; return its bytes."""
    import transformers

    config = transformers.GPT2Config(n_layer=n_layer, n_embd=n_embd, n_head=n_embd // 64, tie_word_embeddings=False)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in transformers.GPT2LMHeadModel(config).state_dict().items()}
    config.save_pretrained(folder)
    tensors = {name: torch.full(shape, 0.5) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's account of memory")
def test_a_stage_takes_the_memory_of_its_own_weights(tmp_path):
    """With a quarter of the weights, a stage that takes a tenth more than they do peaks at 0.35 of the whole."""
    whole_bytes = write_gpt2(tmp_path, n_layer=8, n_embd=640)
    (tmp_path / "measure.py").write_text(MEASURE)
    for line in said([sys.executable, "measure.py", tmp_path], tmp_path).splitlines():
        held, grown = map(int, line.split())
        assert 0.1 * whole_bytes < held < 0.4 * whole_bytes
        assert 0.95 * held <= grown < held + 0.1 * whole_bytes, (held, grown, whole_bytes)


@pytest.mark.parametrize(
    "index",
    [
        *('{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}', "[]", "{", "[" * 100_000),
        *('{"weight_map": {"a": "../of-others.safetensors"}}', '{"weight_map": {"a": "/dev/zero"}}'),
    ],
)
def test_an_index_that_is_none_is_one_sentence(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"weight_map in .* must name the file of each tensor"):
        open_checkpoint(str(tmp_path))
