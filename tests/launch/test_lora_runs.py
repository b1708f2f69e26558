"""Runs with LoRA: as PEFT trains the unsplit model, in processes and simulated, stopped, exported, scored."""

import json
import shutil
import warnings
from contextlib import chdir

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from support.data_files import write_reviews
from support.recipe_files import LORA, WITH_DROPOUT, write_lora, written
from support.recipe_runs import evaluated, export, loaded_as_its_readme_says, simulate
from support.run_files import losses, summary, weights_of
from thinwire.launch import cli
from thinwire.launch.plan.prepare import prepare
from thinwire.launch.recipe import recipe
from thinwire.models.data.chats import visible
from thinwire.models.data.tokenizer import Bytes
from thinwire.models.lora import for_peft

peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a tiny pretrained model, `tiny`, its recipe, and a run without compression, `trained`."""
    folder = tmp_path_factory.mktemp("lora")
    write_lora(folder)
    with chdir(folder):
        simulate("lora.yaml", folder / "trained")
    return folder


@pytest.fixture
def folder(made, monkeypatch):
    """The folder, as the current one."""
    monkeypatch.chdir(made)
    return made


def adapter_of(run):
    """The tensors of an adapter that a run has saved, by PEFT's names."""
    stages = [weights_of(run, stage["stage"]) for stage in summary(run)["stages"]]
    return for_peft({name: each for stage in stages for name, each in stage.items()})


def test_it_trains_as_peft_trains_the_unsplit_model(folder, tmp_path):
    ready = prepare(recipe.parse(["lora.yaml"]))
    assert not any("are one weight in" in note for note in ready.notes), "both are frozen, so they stay equal"
    untrained = simulate("lora.yaml", tmp_path / "untrained", "--training.steps", "0")
    base = AutoModelForCausalLM.from_pretrained("tiny")
    model = peft.PeftModel.from_pretrained(base, export(untrained, tmp_path / "adapter"), is_trainable=True)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.5)
    expected = []
    for step in range(4):
        batch = ready.sampler.batch(step)
        inputs = ready.data.training.inputs(batch.ids, batch.epoch)
        targets = ready.data.training.targets(batch.ids)
        loss = ready.data.task.loss_sum(model(inputs).logits, targets) / ready.data.task.num_valid(targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses(folder / "trained") == pytest.approx(expected, rel=1e-5)
    of_peft, got = peft.get_peft_model_state_dict(model), adapter_of(folder / "trained")
    assert got.keys() == of_peft.keys()
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, of_peft[name], rtol=1e-4, atol=1e-6, msg=name)


def test_stages_without_an_adapter_are_clipped_with_the_others(folder, tmp_path):
    """Embedding and head alone have no gradient to clip, and the last stage failed."""
    options = ["--optimizer.max_grad_norm", "0.05"]
    alone = simulate("lora.yaml", tmp_path / "alone", *options, "--pipeline.layers", "[1, 4, 1]")
    together = simulate("lora.yaml", tmp_path / "together", *options, "--pipeline.layers", "[2, 2, 2]")
    unclipped = adapter_of(folder / "trained")
    for name, expected in adapter_of(together).items():
        torch.testing.assert_close(adapter_of(alone)[name], expected)
        assert "lora_B" not in name or not expected.allclose(unclipped[name]), "clipped"


def test_a_run_that_stops_goes_on_as_if_it_had_not(folder):
    checkpoints = ["--checkpoint.every", "2 steps", "--optimizer.schedule", "constant"]
    simulate("lora.yaml", folder / "whole", *WITH_DROPOUT, *checkpoints)
    simulate("lora.yaml", folder / "stopped", *WITH_DROPOUT, *checkpoints, "--training.steps", "2")
    [*_, saved] = sorted((folder / "stopped" / "checkpoints").glob("step-*"))
    assert not any("base_layer" in name for path in saved.rglob("*.safetensors") for name in load_file(path))
    for stages in ("3", "2"):
        again = shutil.copytree(folder / "stopped", folder / f"again-{stages}")
        more = ["--training.steps", "4", "--pipeline.num_stages", stages]
        assert cli.main(["simulate", "--resume", str(again), *more]) == 0
    assert summary(folder / "again-3")["weights_digest"] == summary(folder / "whole")["weights_digest"]


def test_it_is_exported_for_peft_and_merged_for_transformers(folder, tmp_path, capsys):
    adapter = export(folder / "trained", tmp_path / "adapter")
    assert cli.main(["export", str(folder / "trained"), "--to", str(tmp_path / "merged"), "--merged"]) == 0
    assert {path.name for path in adapter.iterdir()} == {
        *("README.md", "adapter_config.json", "adapter_model.safetensors", "facts.json", "recipe.yaml")
    }
    base = AutoModelForCausalLM.from_pretrained("tiny")
    ids = torch.arange(40, 56)[None]
    before = base(ids).logits
    theirs = peft.PeftModel.from_pretrained(base, adapter).eval()
    expected = theirs(ids).logits
    assert not torch.allclose(expected, before, atol=1e-3)
    assert torch.equal(loaded_as_its_readme_says(adapter)(ids).logits, expected)
    merged = loaded_as_its_readme_says(tmp_path / "merged")
    assert torch.equal(merged(ids).logits, theirs.merge_and_unload()(ids).logits)
    assert merged.config.tie_word_embeddings and merged.lm_head.weight is merged.model.embed_tokens.weight
    scores = [evaluated(place, tmp_path / "elsewhere", capsys) for place in (adapter, tmp_path / "merged")]
    for score in scores:
        assert score["off"]["loss"] == pytest.approx(summary(folder / "trained")["held_out"]["off"]["loss"], rel=1e-5)


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-6), ("bfloat16", 2**-8)])
def test_an_adapter_beside_weights_in_bf16_is_added_in_float32(folder, tmp_path, dtype, close):
    """It was added in bf16, and most of it was lost."""
    run = simulate("lora.yaml", tmp_path / "run", "--model.dtype", "bf16")
    adapter = load_file(export(run, tmp_path / "adapter") / "adapter_model.safetensors")
    place = tmp_path / "merged"
    assert cli.main(["export", str(run), "--to", str(place), "--merged", "--dtype", dtype]) == 0
    found, base = (load_file(each / "model.safetensors") for each in (place, folder / "tiny"))
    name = "model.layers.1.mlp.up_proj"
    first, second = (adapter[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    expected = base[f"{name}.weight"].bfloat16().float() + 2 * second @ first
    got = found[f"{name}.weight"]
    assert got.dtype == getattr(torch, dtype)
    torch.testing.assert_close(got.float(), expected, rtol=close, atol=0)


@pytest.mark.parametrize(("names", "expected"), [(("ham", "spam"), ["ham", "spam"]), ((), ["LABEL_0", "LABEL_1"])])
def test_a_classifier_with_an_adapter_has_the_classes_of_the_data(tmp_path, monkeypatch, hub_cache, names, expected):
    """The head is a part of the adapter, and its classes are those of the data, not those of the model beside it."""
    monkeypatch.chdir(tmp_path)
    sizes = {"vocab_size": 259, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    before = {"id2label": {0: "POSITIVE", 1: "NEGATIVE"}, "label2id": {"POSITIVE": 0, "NEGATIVE": 1}}
    before["problem_type"] = "regression"
    config = RobertaConfig(**sizes, intermediate_size=24, max_position_embeddings=32, **before)
    RobertaForSequenceClassification(config).save_pretrained("tiny")
    write_reviews(tmp_path / "text.parquet", names)
    written(tmp_path, LORA, "lora.yaml")
    reviews = ["--data.name", "text.parquet", "--data.kind", "pairs", "--data.held_out", "0.2"]
    run = simulate("lora.yaml", tmp_path / "run", *reviews)
    adapter = loaded_as_its_readme_says(export(run, tmp_path / "adapter"))
    assert cli.main(["export", str(run), "--to", str(tmp_path / "merged"), "--merged"]) == 0
    merged = loaded_as_its_readme_says(tmp_path / "merged")
    ids = torch.arange(40, 56)[None]
    torch.testing.assert_close(adapter(input_ids=ids).logits, merged(input_ids=ids).logits)
    assert adapter.config.id2label == merged.config.id2label == dict(enumerate(expected))
    assert adapter.config.problem_type == merged.config.problem_type == "single_label_classification"


_SIZES = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32}
_LINEAR = {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_EYE = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 16}
CHANGED = {
    "llama": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}, "pad_token_id": 3},
    "qwen3_5": {"rms_norm_eps": 0.5},
}
"""What recipes change, of a text model and of one inside a model of text and images."""


@pytest.mark.parametrize("name", [name for name in CHANGED if name in CONFIG_MAPPING])
def test_an_adapter_is_loaded_beside_the_model_that_the_recipe_changed(folder, tmp_path, capsys, name):
    """PEFT took the model as its folder has it, and nothing said so."""
    base = "tiny"
    if name != "llama":
        base = str(tmp_path / "whole")
        config = CONFIG_MAPPING[name](text_config={**_SIZES, **_HEADS, **_LINEAR}, vision_config=_EYE)
        AutoModelForImageTextToText.from_config(config).save_pretrained(base)
    options = ["--model.name", base, "--model.config", json.dumps(CHANGED[name])]
    run = simulate("lora.yaml", tmp_path / "run", *options)
    capsys.readouterr()
    adapter = loaded_as_its_readme_says(export(run, tmp_path / "adapter"))
    said = capsys.readouterr().out
    assert f"load the adapter with {', '.join(CHANGED[name])} as README.md does" in said
    assert ("the adapter is of the text model in qwen3_5, as AutoModel" in said) == (name == "qwen3_5")
    assert cli.main(["export", str(run), "--to", str(tmp_path / "merged"), "--merged"]) == 0
    merged, ids = loaded_as_its_readme_says(tmp_path / "merged"), torch.arange(40, 56)[None]
    torch.testing.assert_close(adapter(input_ids=ids).logits, merged(input_ids=ids).logits)
    assert {field: getattr(adapter.config, field) for field in CHANGED[name]} == CHANGED[name]


def test_an_adapter_of_a_text_model_is_named_as_servers_of_the_whole_expect_it(folder, tmp_path, capsys):
    """None of 31 matrices was found in the whole, and served did nothing."""
    config = CONFIG_MAPPING["qwen3_5"](text_config={**_SIZES, **_HEADS, **_LINEAR}, vision_config=_EYE)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "whole")
    run = simulate("lora.yaml", tmp_path / "run", "--model.name", str(tmp_path / "whole"))
    adapter = loaded_as_its_readme_says(export(run, tmp_path / "adapter"))
    assert cli.main(["export", str(run), "--to", str(tmp_path / "named"), "--whole"]) == 0
    assert "the adapter has the names of the whole qwen3_5" in capsys.readouterr().out
    ids = torch.arange(40, 56)[None]
    before = AutoModelForImageTextToText.from_pretrained(tmp_path / "whole")(input_ids=ids).logits
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")
        found = loaded_as_its_readme_says(tmp_path / "named")(input_ids=ids).logits
    torch.testing.assert_close(found, adapter(input_ids=ids).logits)
    assert not torch.allclose(found, before)
    assert cli.main(["export", "trained", "--to", str(tmp_path / "other"), "--whole"]) == 2
    assert "--whole is for an adapter of a text model in one of images and text, got" in capsys.readouterr().err


@pytest.mark.parametrize("source", ["a run", "an export"])
def test_a_run_starts_from_an_adapter(folder, tmp_path, source):
    start = folder / "trained" if source == "a run" else export(folder / "trained", tmp_path / "adapter")
    simulate("lora.yaml", tmp_path / "run", "--model.lora.weights", start, "--training.steps", "0")
    assert summary(tmp_path / "run")["weights_digest"] == summary(folder / "trained")["weights_digest"]


def test_the_adapter_of_a_run_is_not_scaled_otherwise(folder, tmp_path, capsys):
    other = ["--model.lora.weights", "trained", "--model.lora.alpha", "16"]
    assert cli.main(["simulate", "lora.yaml", "--output", str(tmp_path / "run"), *other]) == 2
    assert "model.lora.alpha must be 8, as in trained/model/adapter_config.json, got 16" in capsys.readouterr().err


def test_the_adapter_of_a_run_is_no_whole_model(folder, capsys):
    assert cli.main(["simulate", "lora.yaml", "--model.weights", "trained"]) == 2
    said = "must name whole weights, but trained is a run that trained an adapter; give that run to model.lora.weights"
    assert said in capsys.readouterr().err


def test_an_adapter_beside_the_weights_of_a_run_says_what_peft_needs(folder, tmp_path, capsys):
    whole = simulate("lora.yaml", tmp_path / "whole", "--model.lora.rank", "null", "--training.steps", "1")
    beside = simulate("lora.yaml", tmp_path / "run", "--model.weights", whole, "--training.steps", "1")
    capsys.readouterr()
    adapter = export(beside, tmp_path / "adapter")
    saved = whole / "weights" / "step-00000001"
    assert f"PEFT cannot read {saved}, which a run saved: export that run, and name" in capsys.readouterr().out
    with pytest.raises(ValueError, match="Unrecognized model"):
        loaded_as_its_readme_says(adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(export(whole, tmp_path / "exported"))
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    loaded_as_its_readme_says(adapter)


def test_an_adapter_writes_what_the_merged_model_writes(folder, tmp_path, capsys):
    assert cli.main(["export", "trained", "--to", str(tmp_path / "merged"), "--merged"]) == 0
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    asked = torch.tensor([list(b"abc")])
    tokens = whole.generate(asked, do_sample=False, max_new_tokens=6, pad_token_id=0)[0, 3:].tolist()
    capsys.readouterr()
    assert cli.main(["generate", "trained", "--prompt", "abc", "--tokens", "6"]) == 0
    assert capsys.readouterr().out == visible(Bytes().decode(tokens)) + "\n"


def test_another_base_is_refused(folder, tmp_path, capsys):
    simulate("lora.yaml", tmp_path / "run", "--checkpoint.every", "2 steps")
    assert cli.main(["eval", str(tmp_path / "run"), "--model.dtype", "bf16"]) == 0, "it is the same base, rounded"
    kept = shutil.copytree(folder / "tiny", tmp_path / "kept")
    try:
        model = LlamaForCausalLM.from_pretrained("tiny")
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
        model.save_pretrained("tiny")
        capsys.readouterr()
        assert cli.main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out"), "--merged"]) == 2
        assert "tiny must hold the weights that the adapter was trained with" in capsys.readouterr().err
        for asked in (["eval"], ["generate", "--prompt", "abc"]):
            assert cli.main([asked[0], str(tmp_path / "run"), *asked[1:]]) == 2
            told = capsys.readouterr()
            said = "tiny must hold the weights that the adapter was trained with, and they have changed; put them back"
            assert told.out == "" and told.err.splitlines()[-1] == said
        assert cli.main(["simulate", "--resume", str(tmp_path / "run"), "--training.steps", "5"]) == 1
        assert (
            "goes with the model that it was made with, which has changed: "
            "model.layers.1.mlp.up_proj.base_layer.weight; put that model back"
        ) in " ".join(capsys.readouterr().err.split())
    finally:
        shutil.rmtree("tiny")
        shutil.move(kept, "tiny")


def test_an_adapter_with_other_tensors_is_not_exported(folder, tmp_path, capsys):
    run = shutil.copytree(folder / "trained", tmp_path / "run")
    facts = json.loads((run / "model" / "facts.json").read_text())
    facts["trained"].remove(name := "model.layers.2.mlp.up_proj.lora_B.default.weight")
    (run / "model" / "facts.json").write_text(json.dumps(facts))
    capsys.readouterr()
    assert cli.main(["export", str(run), "--to", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert f"must hold the 55 tensors of its adapter and no others, but {name} is missing or too many" in said


def test_merged_is_for_lora_alone(tmp_path, capsys):
    simulate("gpt2-tiny", tmp_path / "run", "--data.limit", "5000", "--training.steps", "0", "--data.held_out", "0.3")
    assert cli.main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out"), "--merged"]) == 2
    assert "--merged is for a run with model.lora, and" in capsys.readouterr().err
