import json
import os
import shutil
import stat
from contextlib import chdir

import pytest
import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from support.data_files import random_pixels, write_images, write_reviews, write_tokenizer
from support.recipe_runs import evaluated, export, loaded_as_its_readme_says, outputs_of, simulate
from support.run_files import summary, weight_file, weights_of
from thinwire.launch import cli
from thinwire.launch.results.figures import read_summary
from thinwire.pipeline.errors import OptionsError

pytestmark = pytest.mark.slow

RECIPE = """
model: {name: gpt2, config: {vocab_size: 256, n_layer: 2, n_embd: 16, n_head: 2, n_positions: 16}}
data: {name: text, block_size: 16, held_out: 0.2}
pipeline: {num_stages: 2, num_microbatches: 2, microbatch_size: 2}
compression: {activations: q(4), gradients: q(8), boundaries: {0: {activations: q(2)}}}
training: {steps: 1}
"""
IMAGES = """
data: {name: images.parquet, kind: images, held_out: 0.3}
pipeline: {num_stages: 2, num_microbatches: 2, microbatch_size: 2}
compression: {activations: q(4), gradients: q(8)}
training: {steps: 1}
"""
FACTORY = """
from torch import nn

def make(width):
    return [nn.Flatten(), nn.Linear(192, width), nn.ReLU(), nn.Linear(width, 2)]
"""
VIT = {"image_size": 8, "patch_size": 4, "num_layers": 2, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 8}
OWN_MODELS = {"own_model_of_test_export:make": {"width": 8}, "vit_b_16": VIT, "resnet18": {}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with `tiny.yaml`, its text, and the run `trained`."""
    made = tmp_path_factory.mktemp("runs")
    (made / "tiny.yaml").write_text(RECIPE)
    (made / "text").write_bytes(b"some words, many times; " * 83)
    with chdir(made):
        simulate("tiny.yaml", made / "trained")
    return made


@pytest.fixture
def copied(folder, tmp_path, monkeypatch):
    """A copy of the run that a test may change, `run`; `folder` is the current one."""
    monkeypatch.chdir(folder)
    return shutil.copytree(folder / "trained", tmp_path / "run")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
@pytest.mark.parametrize("at", ["huggingface_hub.save_torch_state_dict", "shutil.copyfile"])
def test_a_full_disk_is_a_sentence_and_leaves_no_half_model(copied, tmp_path, monkeypatch, capsys, at, error):
    def full(*arguments):
        (tmp_path / "out/model.safetensors").write_text("half")
        raise error

    monkeypatch.setattr(at, full)
    assert cli.main(["export", str(copied), "--to", str(tmp_path / "out")]) == 1
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith("out cannot be written: No space left on device; free some space, or name another --to")
    )
    assert not (tmp_path / "out").exists()


def refused(capsys, *arguments):
    capsys.readouterr()
    assert cli.main([*map(str, arguments)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    return said.err


def rewrite_scores(run, *, error=None, targets=1000, gap=None, **losses):
    [told] = map(json.loads, (run / "evaluations.jsonl").read_text().splitlines())
    assert told["error"] > 0 and told["on"]["num_targets"] < 1000
    told["error"] = error
    for mode, loss in losses.items():
        told[mode] |= {"loss": loss, "num_targets": targets}
    if gap is not None:
        said = json.loads((run / "summary.json").read_text())
        said["look"] = {"on": {"loss": 4.0}, "off": {"loss": 4.0 + gap}}
        (run / "summary.json").write_text(json.dumps(said))
    (run / "evaluations.jsonl").write_text(json.dumps(told) + "\n")


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        ({"on": 3.0, "off": 3.02}, "Inference does not need the codec: the held-out loss is 3.0000 with compression"),
        ({"on": 3.0, "off": 2.0}, "Inference does not need the codec: the held-out loss is 3.0000 with compression"),
        ({"on": 3.0, "off": 2.0}, "In training the codecs cost too much: the held-out loss is 3.0000 with compression"),
        ({"on": None, "off": None}, "The training diverged: the held-out loss is NaN. Lower the learning rate, and"),
        ({"on": 3.0, "off": 3.1}, "Inference needs the codec: the held-out loss is 3.0000 with compression and 3.1000"),
    ],
)
def test_the_readme_says_whether_inference_needs_the_codec(copied, tmp_path, losses, verdict):
    rewrite_scores(copied, **losses)
    said = (export(copied, tmp_path / "export") / "README.md").read_text()
    assert verdict in said
    assert f"| compression off | {'NaN' if losses['off'] is None else format(losses['off'], '.4f')} |" in said
    assert "| 0 | activations | `q(2)` |" in said and "| 0 | gradients | `q(8)` |" in said


@pytest.mark.parametrize(
    ("known", "verdict"),
    [
        ({"targets": 116}, "Whether inference needs the codec is not known from 116 targets: the held-out loss is 3.0"),
        ({"error": 0.06}, "does not need the codec: the held-out loss is 3.0000 with compression and 3.1000 without, "),
        ({"error": 0.06}, "and the error of the difference over this text 0.0600."),
        ({"error": 0.04}, "Inference needs the codec: "),
        ({"gap": 0.2}, "Inference does not need the codec: "),
        ({"gap": 0.05}, "Inference needs the codec: "),
    ],
)
def test_a_verdict_needs_text_and_a_gap_that_training_made(copied, tmp_path, known, verdict):
    """It rested on 1 % of a loss over 116 tokens, where the untouched model had a larger gap."""
    rewrite_scores(copied, on=3.0, off=3.1, **known)
    assert verdict in (export(copied, tmp_path / "export") / "README.md").read_text()


def test_scores_of_other_weights_are_said_to_be(copied, tmp_path, capsys):
    assert cli.main(["export", str(copied), "--to", str(tmp_path / "narrow"), "--dtype", "bfloat16"]) == 0
    said = "the held-out scores in README.md are of the weights before they were rounded; `thinwire eval` scores the"
    assert said in capsys.readouterr().out and said in (tmp_path / "narrow" / "README.md").read_text()
    assert "scores in README.md" not in (export(copied, tmp_path / "as it is") / "README.md").read_text()


def test_an_export_carries_the_boundary_settings(copied, tmp_path):
    exported = yaml.safe_load((export(copied, tmp_path / "export") / "recipe.yaml").read_text())
    trained = yaml.safe_load((copied / "recipe.yaml").read_text())
    assert exported["compression"] == trained["compression"]
    assert exported["pipeline"] == trained["pipeline"]


def test_without_held_out_samples_nobody_knows(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    run = simulate("tiny.yaml", tmp_path / "run", "--data.held_out", "0")
    said = (export(run, tmp_path / "export") / "README.md").read_text()
    assert "The run did not score these weights, so it is not known whether inference needs the codec." in said
    told = refused(capsys, "eval", tmp_path / "export")
    assert told == "an evaluation needs held-out samples; raise data.held_out, or name data.evaluation\n"


def test_the_scores_are_measured_anywhere(copied, tmp_path, capsys):
    """Data that a recipe names by a relative path is found from another folder too."""
    exported = export(copied, tmp_path / "export")
    assert evaluated(exported, tmp_path / "elsewhere", capsys) == summary(copied)["held_out"]


def test_what_is_exported_is_the_head_of_its_own(copied, tmp_path):
    exported = export(copied, tmp_path / "export")
    assert json.loads((exported / "config.json").read_text())["tie_word_embeddings"] is False
    state = loaded_as_its_readme_says(exported).state_dict()
    assert not torch.equal(state["lm_head.weight"], state["transformer.wte.weight"])
    stages = [weights_of(copied, index) for index in range(2)]
    torch.testing.assert_close(dict(state), stages[0] | stages[1], rtol=0, atol=0)


GENERATION = {"eos_token_id": [7, 9], "do_sample": True, "temperature": 0.6, "top_p": 0.95}


@pytest.fixture
def pretrained(tmp_path):
    """The folder of a tied bfloat16 model that says how it generates."""
    from transformers import GenerationConfig

    config = AutoConfig.for_model(
        "gpt2", vocab_size=256, n_layer=2, n_embd=16, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2
    )
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.generation_config = GenerationConfig(**GENERATION)
    model.save_pretrained(tmp_path / "pretrained")
    return tmp_path / "pretrained"


def test_a_model_leaves_as_it_came(pretrained, folder, tmp_path, monkeypatch, capsys):
    """`use_cache` was false, the sampling was gone, and so were bfloat16 and the tie, though no step was trained."""
    monkeypatch.chdir(folder)
    given = ["--model.name", pretrained, "--model.weights", "pretrained", "--model.config", "{}"]
    run = simulate("tiny.yaml", tmp_path / "run", *given, "--training.steps", "0")
    capsys.readouterr()
    exported = export(run, tmp_path / "export")
    assert "no longer equal" not in capsys.readouterr().out
    config = json.loads((exported / "config.json").read_text())
    assert (config["use_cache"], config["dtype"], config["tie_word_embeddings"]) == (True, "bfloat16", True)
    generation = json.loads((exported / "generation_config.json").read_text())
    assert {name: generation[name] for name in GENERATION} == GENERATION
    stored, came = load_file(exported / "model.safetensors"), load_file(pretrained / "model.safetensors")
    assert stored.keys() == came.keys() and "lm_head.weight" not in stored
    torch.testing.assert_close(stored, came, rtol=0, atol=0)
    model = loaded_as_its_readme_says(exported)
    assert model.lm_head.weight is model.transformer.wte.weight and model.dtype == torch.bfloat16


def test_a_run_that_starts_from_a_run_keeps_how_the_model_generates(pretrained, folder, tmp_path, monkeypatch):
    """The file was looked for beside the weights of the first run, where it never is."""
    monkeypatch.chdir(folder)
    given = ["--model.name", pretrained, "--model.config", "{}", "--training.steps", "0"]
    first = simulate("tiny.yaml", tmp_path / "first", *given, "--model.weights", "pretrained")
    saved = simulate("tiny.yaml", tmp_path / "second", *given, "--model.weights", first)
    third = simulate("tiny.yaml", tmp_path / "third", *given, "--model.weights", saved / "weights")
    for run in (saved, third):
        exported = export(run, tmp_path / f"export of {run.name}")
        generation = json.loads((exported / "generation_config.json").read_text())
        assert {name: generation[name] for name in GENERATION} == GENERATION


EXPERTS = {"vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16}
EXPERTS |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16, "num_local_experts": 4}


def test_experts_leave_under_the_names_that_the_library_stores(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    run = simulate("tiny.yaml", tmp_path / "run", "--model.name", "mixtral", "--model.config", json.dumps(EXPERTS))
    exported = export(run, tmp_path / "export")
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in load_file(exported / "model.safetensors")
    inputs, _, outputs = outputs_of(run)
    with torch.no_grad():
        torch.testing.assert_close(loaded_as_its_readme_says(exported)(inputs).logits, outputs, rtol=0, atol=0)
    assert evaluated(exported, tmp_path / "elsewhere", capsys) == summary(run)["held_out"]


def test_weights_leave_in_the_types_in_which_they_came(folder, tmp_path, monkeypatch):
    """A router in float32 was rounded to bfloat16, and so was what only the files had wide."""
    monkeypatch.chdir(folder)
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    groups = {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    }
    sizes = {name: EXPERTS[name] for name in EXPERTS if name != "num_local_experts"} | {"num_key_value_heads": 2}
    config = AutoConfig.for_model("deepseek_v3", **sizes, **latent, **groups, moe_intermediate_size=8, dtype="bfloat16")
    made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    router, norm = made.model.layers[1].mlp.gate, made.model.layers[0].input_layernorm
    router.float(), norm.float()
    for tensor in (router.weight, router.e_score_correction_bias, norm.weight):
        torch.nn.init.normal_(tensor)
    made.save_pretrained(tmp_path / "came")
    given = ["--model.name", tmp_path / "came", "--model.weights", "pretrained", "--model.config", "{}"]
    run = simulate("tiny.yaml", tmp_path / "run", *given, "--training.steps", "0")
    came, stored = (
        load_file(place / "model.safetensors") for place in (tmp_path / "came", export(run, tmp_path / "to"))
    )
    assert {came[f"model.layers.{name}"].dtype for name in ("1.mlp.gate.weight", "0.input_layernorm.weight")} == {
        torch.float32
    }
    torch.testing.assert_close(stored, came, rtol=0, atol=0)


QWEN = {name: value for name, value in EXPERTS.items() if name != "num_local_experts"}


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_tokenizer_that_the_library_takes_for_another_is_said_to_be(folder, tmp_path, monkeypatch, capsys, name):
    """Beside a qwen2, transformers 5.24 makes a Qwen2Tokenizer of any other: it gives other tokens without a word."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    monkeypatch.chdir(folder)
    given = ["--data.tokenizer", write_tokenizer(tmp_path / "words"), "--model.name", name]
    (tmp_path / "text").write_text("the cat why did it\n" * 60)
    run = simulate("tiny.yaml", tmp_path / "run", *given, "--data.name", tmp_path / "text", "--model.config", QWEN)
    capsys.readouterr()
    exported = export(run, tmp_path / "export")
    saved, found = (each.from_pretrained(exported) for each in (PreTrainedTokenizerFast, AutoTokenizer))
    differs, said = saved("the cat").input_ids != found("the cat").input_ids, "loads the tokenizer as a Qwen2Tokenizer"
    assert (said in capsys.readouterr().out, said in (exported / "README.md").read_text()) == (differs, differs)


def test_weights_that_are_tied_no_more_are_said_to_be(pretrained, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    given = ["--model.name", pretrained, "--model.weights", "pretrained", "--model.config", "{}"]
    run = simulate("tiny.yaml", tmp_path / "run", *given)
    capsys.readouterr()
    assert cli.main(["export", str(run), "--to", str(tmp_path / "export"), "--dtype", "float32"]) == 0
    said = "lm_head.weight and transformer.wte.weight were tied, but are no longer equal: the export has both, untied"
    assert said in capsys.readouterr().out.splitlines()
    assert f"- {said}" in (tmp_path / "export/README.md").read_text()
    stored = load_file(tmp_path / "export/model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32} and "lm_head.weight" in stored
    torch.testing.assert_close(dict(loaded_as_its_readme_says(tmp_path / "export").state_dict()), stored)


def test_neither_the_data_nor_the_first_model_is_read_again(pretrained, folder, tmp_path, monkeypatch):
    shutil.copytree(folder, tmp_path / "work", ignore=shutil.ignore_patterns("trained"))
    monkeypatch.chdir(tmp_path / "work")
    given = ["--model.name", pretrained, "--model.weights", "pretrained", "--model.config", "{}"]
    run = simulate("tiny.yaml", tmp_path / "run", *given)
    shutil.rmtree(pretrained)
    (tmp_path / "work/text").unlink()
    exported = export(run, tmp_path / "export")
    assert loaded_as_its_readme_says(exported).generation_config.eos_token_id == GENERATION["eos_token_id"]


REVIEWS = """
model: {name: sentiment, weights: pretrained}
data: {name: reviews.parquet, kind: pairs, block_size: 16, held_out: 0.25}
pipeline: {num_stages: 2, num_microbatches: 2, microbatch_size: 2}
training: {steps: 0}
"""


@pytest.mark.parametrize(
    ("names", "given", "expected"),
    [
        (("ham", "spam"), {}, ["ham", "spam"]),
        ((), {}, ["LABEL_0", "LABEL_1"]),
        ((), {"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}, ["no", "yes"]),
    ],
)
def test_classes_have_the_names_of_the_data(tmp_path, monkeypatch, hub_cache, names, given, expected):
    """Classes had the names of the pretrained model where it had as many, whatever the data called them."""
    from transformers import BertConfig, BertForSequenceClassification

    monkeypatch.chdir(tmp_path)
    sizes = {"vocab_size": 259, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    before = {"id2label": {0: "POSITIVE", 1: "NEGATIVE"}, "label2id": {"POSITIVE": 0, "NEGATIVE": 1}}
    before["problem_type"] = "multi_label_classification"  # for which pipelines take the sigmoid of each class
    config = BertConfig(**sizes, intermediate_size=16, max_position_embeddings=16, **before)
    BertForSequenceClassification(config).save_pretrained("sentiment")
    write_reviews(tmp_path / "reviews.parquet", names)
    (tmp_path / "reviews.yaml").write_text(REVIEWS)
    run = simulate("reviews.yaml", tmp_path / "run", "--model.config", json.dumps(given))
    config = loaded_as_its_readme_says(export(run, tmp_path / "export")).config
    assert config.id2label == dict(enumerate(expected))
    assert config.label2id == {name: number for number, name in enumerate(expected)}
    assert config.problem_type == "single_label_classification"


@pytest.mark.parametrize("name", OWN_MODELS)
def test_models_that_transformers_lacks(name, tmp_path, monkeypatch, capsys, hub_cache):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_model_of_test_export.py").write_text(FACTORY)
    write_images(tmp_path / "images.parquet", random_pixels(20), [0, 1] * 10)
    (tmp_path / "own.yaml").write_text(IMAGES)
    given = ["--model.name", name, "--model.config", json.dumps(OWN_MODELS[name])]
    run = simulate("own.yaml", tmp_path / "run", *given)
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("batch norm")]
    once = ["batch norm bn1 and 19 more"]  # whatever the number of stages
    assert [note.partition(":")[0] for note in notes] == (once if name == "resnet18" else [])
    exported = export(run, tmp_path / "export")
    inputs, _, outputs = outputs_of(run)
    with torch.no_grad():
        expected = loaded_as_its_readme_says(exported)(inputs)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=0)
    assert evaluated(exported, tmp_path / "elsewhere", capsys) == summary(run)["held_out"]


def test_every_file_follows_the_umask(copied, tmp_path):
    """safetensors leaves its files to their owner alone: whoever an export was made for could not read its weights."""
    before = os.umask(0o027)
    try:
        exported = export(copied, tmp_path / "export")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in exported.iterdir()}
    assert set(modes) >= {"model.safetensors", "config.json", "recipe.yaml", "README.md"}
    assert set(modes.values()) == {0o640}, modes


def test_weights_of_a_run_have_the_mode_of_its_other_files(folder):
    run = folder / "trained"
    modes = [path.stat().st_mode for path in (run / "summary.json", *(weight_file(run, index) for index in range(2)))]
    assert len(modes) == 3 and len(set(modes)) == 1, modes


# --- what cannot be exported --------------------------------------------------------------------------------------


def test_what_is_no_run_that_ended(copied, tmp_path, capsys):
    (path := weight_file(copied, 1)).unlink()
    said = refused(capsys, "export", copied, "--to", tmp_path / "export")
    assert "must hold the parts of all 2 stages as they were written, but " in said
    assert f"{path} cannot be read: No such file or directory; copy it from the machine" in said
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file or directory; "),
        ("", "cannot be read: "),
        ('{"name": "x", "weights_', "cannot be read: "),
        ("[" * 99_999, "cannot be read: it is nested too deep; "),
        ("[]", "cannot be read: it holds no JSON object but list; "),
        ("{}", "is not the summary of a run: it has no name, steps, "),
    ],
)
def test_a_damaged_summary_is_one_sentence(tmp_path, text, said):
    path = tmp_path / "summary.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(OptionsError) as caught:
        read_summary(tmp_path)
    assert str(caught.value).startswith(f"{path} {said}") and "\n" not in str(caught.value)


def test_a_summary_that_is_missing_or_damaged_keeps_no_model_from_its_export(copied, tmp_path):
    (copied / "summary.json").write_text("{")
    assert (export(copied, tmp_path / "export") / "model.safetensors").exists()


def test_damaged_facts_are_one_sentence(copied, tmp_path, capsys):
    """It was a traceback."""
    path = copied / "model" / "facts.json"
    path.write_bytes(b"{")
    said = refused(capsys, "export", copied, "--to", tmp_path / "export")
    assert said.startswith(f"{path} must hold ") and "but it is damaged" in said
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("wrong", [{"classes": 3}, {"classes": [["a"]]}, {"classes": "ab"}, {"num_labels": 10**12}])
def test_facts_of_other_types_are_one_sentence(copied, tmp_path, capsys, wrong):
    path = copied / "model" / "facts.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    assert "but it is damaged: it" in refused(capsys, "export", copied, "--to", tmp_path / "export")


def test_weights_of_another_run_are_not_mixed_in(copied, tmp_path, capsys):
    path = weight_file(copied, 1)
    save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path)
    said = refused(capsys, "export", copied, "--to", tmp_path / "export")
    assert f"{path} is not as it was written; copy it from the machine" in said
