"""The packaged recipes: the tiny ones run as they are, the others on tiny stand-ins for what they download."""

import json

import pytest
import torch
from torchvision.models import ResNet, VisionTransformer

from support.data_files import WORDS, random_pixels, write_images, write_rows, write_tokenizer
from support.recipe_runs import SHORT, TINY, evaluated, export, loaded_as_its_readme_says, outputs_of, simulate
from support.run_files import losses, summary
from thinwire.launch.plan.places import real_placement
from thinwire.launch.plan.prepare import prepare
from thinwire.launch.recipe import recipe
from thinwire.models import checkpoint

pytestmark = pytest.mark.slow

STATEFUL = ("gpt2-xl-tiny", "deberta-tiny")
"""Where the scores of later evaluations depend on earlier ones."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Make the short run of a tiny recipe, and its export, once each."""
    made = {}

    def run_of(name):
        if name in ("resnet-tiny", "split-tiny", "vit-tiny"):
            pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            run = simulate(name, folder / "run", *TINY[name], *SHORT)
            made[name] = run, export(run, folder / "export")
        return made[name]

    return run_of


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_recipe_trains_and_what_it_exports_computes_the_same(runs, name):
    run, exported = runs(name)
    told = summary(run)
    assert told["steps"] == len(losses(run)) == 2
    inputs, side, outputs = outputs_of(run)
    model = loaded_as_its_readme_says(exported)
    with torch.no_grad():
        expected = model(inputs) if isinstance(model, ResNet | VisionTransformer) else model(inputs, **side).logits
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("name", TINY)
def test_an_evaluation_of_the_export_repeats_the_runs_scores(runs, name, tmp_path, capsys):
    run, exported = runs(name)
    moved = exported.rename(exported.with_name("moved"))
    try:
        scores, expected = evaluated(moved, tmp_path / "elsewhere", capsys), summary(run)["held_out"]
    finally:
        moved.rename(exported)
    assert scores["off"] == expected["off"]
    assert scores["on"] == expected["on"]
    assert (scores["on"] == scores["off"]) == (name in STATEFUL), "AQ-SGD sends a first visit as it is"


# --- those that download ------------------------------------------------------------------------------------------

# 2401.07788, sections 3.1 and 3.2; 2206.01299, section 4, which gives a grid of learning rates and batch sizes
GRID = {"optimizer.lr": {2.5e-6, 3e-6, 5e-6, 1e-5}, "pipeline.batch_size": {32, 64, 96}}
PUBLISHED = {
    "gpt2-wikitext2": {
        "model.name": "openai-community/gpt2",
        "model.weights": "pretrained",
        "pipeline.num_stages": 4,
        "pipeline.layers": ["block 2", "block 5", "block 8"],
        "pipeline.batch_size": 8,
        "data.block_size": 1024,
        "compression.activations": "topk(0.3)",
        "compression.gradients": "reuse",
        "optimizer.lr": 5e-5,
        "training.epochs": 4,
    },
    "resnet18-cifar10": {
        "model.name": "resnet18",
        "pipeline.num_stages": 4,
        "pipeline.batch_size": 100,
        "optimizer.lr": 0.01,
        "optimizer.momentum": 0.9,
        "optimizer.weight_decay": 5e-4,
        "optimizer.cosine_steps": 200 * 500,
        "training.epochs": 100,
    },
    "gpt2-xl-wikitext2": {
        "model.name": "openai-community/gpt2-xl",
        "pipeline.num_stages": 8,
        "pipeline.microbatch_size": 1,
        "data.block_size": 1024,
        "data.shuffle": "once",
        "compression.activations": 'aqsgd(q(4, per="channel", grid="midtread"), store="disk")',
        "compression.gradients": 'q(8, per="channel", grid="midtread")',
    },
    "deberta-xxlarge-qnli": {
        "model.name": "microsoft/deberta-v2-xxlarge",
        "pipeline.num_stages": 8,
        "data.subset": "qnli",
        "data.shuffle": "once",
        "compression.activations": 'aqsgd(q(3, per="channel", grid="midtread"), store="disk")',
        "compression.gradients": 'q(6, per="channel", grid="midtread")',
    },
    "split-cifar10": {"pipeline.schedule": "zbv-zero-bubble", "pipeline.num_processes": 2, "pipeline.batch_size": 100},
    "vit-cifar10": {"model.name": "vit_b_16", "pipeline.num_stages": 4, "pipeline.batch_size": 100},
    "bert-qnli": {"model.name": "google-bert/bert-base-uncased", "data.subset": "qnli", "pipeline.num_stages": 4},
    "qwen3-0.6b-wikitext2": {"model.name": "Qwen/Qwen3-0.6B", "model.weights": "pretrained", "pipeline.num_stages": 4},
}


def value_of(found, path):
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_fields_of_a_full_size_recipe(name):
    found = recipe.parse([name])
    assert {path: value_of(found, path) for path in PUBLISHED[name]} == PUBLISHED[name]
    if "2206.01299" in found.description:
        assert all(value_of(found, path) in values for path, values in GRID.items())


SIZES = {
    "gpt2-wikitext2": ("GPT2Config", {"n_layer": 12, "n_embd": 16, "n_head": 2, "n_positions": 16}),
    "gpt2-xl-wikitext2": ("GPT2Config", {"n_layer": 8, "n_embd": 16, "n_head": 2, "n_positions": 16}),
    "qwen3-0.6b-wikitext2": (
        "Qwen3Config",
        {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
        | {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 16},
    ),
    "bert-qnli": (
        "BertConfig",
        {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 6, "num_attention_heads": 2}
        | {"max_position_embeddings": 16},
    ),
    "deberta-xxlarge-qnli": (
        "DebertaV2Config",
        {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 8, "num_attention_heads": 2}
        | {"max_position_embeddings": 16, "relative_attention": True, "position_buckets": 4, "pos_att_type": "p2c|c2p"}
        | {"norm_rel_ebd": "layer_norm", "share_att_key": True, "position_biased_input": False, "type_vocab_size": 0}
        | {"conv_kernel_size": 3},
    ),
}


def write_stand_in(folder, name):
    """Write a tiny model as transformers saves it: its head is tied where the real one's is."""
    import transformers

    config_class, sizes = SIZES[name]
    config = getattr(transformers, config_class)(
        vocab_size=len(WORDS) + 5, bos_token_id=None, eos_token_id=None, pad_token_id=0, **sizes
    )
    auto = transformers.AutoModelForSequenceClassification if "bert" in name else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    auto.from_config(config).save_pretrained(folder)
    return str(folder)


def text_options(folder):
    text = " ".join(WORDS * 40)
    rows = [write_rows(folder / f"{part}.parquet", [{"text": text}, {"text": ""}]) for part in ("train", "validation")]
    return ["--data.name", rows[0], "--data.evaluation", rows[1], "--data.block_size", "16"]


def pair_options(folder):
    rows = [{"question": "why did it", "sentence": " ".join(WORDS[: 1 + i % 7]), "label": i % 2} for i in range(40)]
    parts = [write_rows(folder / f"{part}.parquet", rows) for part in ("train", "validation")]
    return ["--data.name", parts[0], "--data.evaluation", parts[1], "--data.block_size", "12"]


@pytest.mark.parametrize("name", SIZES)
def test_a_full_size_recipe_runs_on_a_stand_in(name, tmp_path, hub_cache):
    data = pair_options(tmp_path) if "qnli" in name else text_options(tmp_path)
    words = write_tokenizer(tmp_path / "words", pairs="qnli" in name)
    model = write_stand_in(tmp_path / "model", name)
    options = ["--model.name", model, "--data.subset", "null", "--data.tokenizer", words, *data]
    options += ["--pipeline.num_microbatches", "4"]  # some have 32
    run = simulate(name, tmp_path / "run", *options, "--training.steps", "1", "--training.evaluate_every", "0 steps")
    told = summary(run)
    assert next(stage["layers"] for stage in told["stages"]) == (4 if name == "gpt2-wikitext2" else 2)
    assert told["held_out"]["on"]["num_targets"] > 0
    assert (export(run, tmp_path / "export") / "tokenizer.json").is_file()


SMALL_VIT = {"image_size": 32, "patch_size": 4, "num_layers": 8, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}


@pytest.mark.parametrize(
    ("name", "image_size", "layers", "smaller"),
    [
        ("resnet18-cifar10", 8, [3, 2, 2, 3], {"stem": "cifar", "width": 8}),
        ("split-cifar10", 8, [3, 2, 4, 1], {"stem": "cifar", "width": 8}),
        ("vit-cifar10", 32, [3, 2, 2, 3], SMALL_VIT),
    ],
    ids=["resnet", "split", "vit"],
)
def test_images_like_those_of_cifar10_are_read(name, image_size, layers, smaller, tmp_path, hub_cache):
    places = [
        write_images(tmp_path / f"{part}.parquet", random_pixels(100, seed=seed), [i % 2 for i in range(100)])
        for seed, part in enumerate(("train", "test"))
    ]
    options = ["--data.name", places[0], "--data.evaluation", places[1], "--training.steps", "1"]
    options += ["--data.image_size", str(image_size), "--training.evaluate_every", "0 steps"]
    options += ["--model.config", json.dumps(smaller)]
    run = simulate(name, tmp_path / "run", *options)
    assert [stage["layers"] for stage in summary(run)["stages"]] == layers
    assert summary(run)["held_out"]["off"]["num_targets"] == 100


def test_each_process_reads_its_own_tensors_only(tmp_path, hub_cache, monkeypatch):
    name = "gpt2-wikitext2"
    options = ["--model.name", write_stand_in(tmp_path / "model", name), "--data.subset", "null"]
    options += ["--data.tokenizer", write_tokenizer(tmp_path / "words", pairs=False), *text_options(tmp_path)]
    prepared = prepare(recipe.parse([name, *map(str, options)]))
    read = []
    copy = checkpoint._copy

    def recording_copy(path, key, out):
        read.append(key)
        copy(path, key, out)

    monkeypatch.setattr(checkpoint, "_copy", recording_copy)
    for rank in range(4):
        read.clear()
        modules = prepared.build_all(real_placement(prepared.recipe), rank)
        assert list(modules) == [rank]
        # the head's values are the embedding's
        tied = {"lm_head.weight": "transformer.wte.weight"}
        assert sorted(read) == sorted(tied.get(own, own) for own in modules[rank].full_state())
