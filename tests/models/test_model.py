import json
from dataclasses import replace

import pytest

from support.family_cases import LENGTH, apart, options
from support.models import blueprint
from thinwire.models.architectures.configuration import LibrarySource
from thinwire.models.errors import ModelError
from thinwire.models.model import find_model
from thinwire.models.options import ModelOptions
from thinwire.models.source import Use


def build(name, task="causal-lm", weights="fresh", **config):
    return blueprint(ModelOptions(name=name, weights=weights, config=config), task=task, block_size=LENGTH)


def test_a_folder_names_the_family_and_overrides_go_on_top(tmp_path):
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 40, **small}))
    model = build(str(tmp_path), num_hidden_layers=3)
    assert (len(model.layers), model.vocab_size) == (5, 40)


def test_labels_are_the_datas():
    [*_, head] = apart("bert").layers
    assert head.build().parts["classifier"].out_features == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "no/such/folder"}, r"module:factory or a type .* such as gpt2, got 'no/such/folder': no such f"),
        ({"name": "gpt2", "n_layers": 3}, r"configuration of gpt2 has no 'n_layers' \(did you mean n_layer\?\)"),
        (
            {"name": "gpt2", "n_embd": 10, "n_head": 4},
            r"cannot build gpt2 of this configuration: .*divisible",
        ),
        ({"name": "gpt2", "n_layer": "many"}, r"transformers refuses the configuration of 'gpt2'"),
        (
            {"name": "bert"},
            r"the task of bert must be classification or token-classification, got causal-lm",
        ),
    ],
)
def test_what_cannot_be_built_is_one_sentence(given, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match=message):
        build(**given)


def test_an_unsupported_architecture_is_told(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(
        ModelError, match=r"type 'vit' is not supported.*: take one that .*give layers as module:factory"
    ):
        build(str(tmp_path))


def test_bad_options_are_named_all_at_once():
    with pytest.raises(ModelError, match=r"name must be .* nothing; weights must be fresh, .* got nothing"):
        ModelOptions(name="", weights="")


def test_tokens_and_blocks_must_fit():
    source = find_model(options("roberta"))
    # RoBERTa counts positions from the padding token's number on
    source.blueprint(Use(task="classification", vocab_size=61, block_size=14))
    source.blueprint(Use(task="classification"))
    with pytest.raises(ModelError) as caught:
        source.blueprint(Use(task="classification", vocab_size=62, block_size=15))
    assert str(caught.value) == (
        "the model's vocab_size must be at least the tokenizer's 62, got 61; take the model's own tokenizer, or raise "
        "vocab_size in config; block_size must be at most the model's 14 positions, got 15"
    )


def test_a_classifier_that_looks_for_the_padding_is_known():
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    found = [build(name, "classification", **sizes, pad_token_id=7).padding for name in ("llama", "bert")]
    assert found == [7, None]


def test_pretrained_weights_are_not_widened(monkeypatch):
    made = replace(apart("gpt2"), checkpoint=object())
    monkeypatch.setattr(LibrarySource, "_layers", lambda self, use: made)
    with pytest.raises(ModelError, match="or set weights: fresh, or enlarge the model with resize_token"):
        find_model(options("gpt2")).blueprint(Use(task="causal-lm", vocab_size=62, block_size=4))


def config_of(tmp_path, **fields):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **fields}))
    return ModelOptions(name=str(tmp_path))


def test_a_vocabulary_for_each_layer_is_no_number_of_layers(tmp_path):
    """Every Gemma 4 and Gemma 3n in a folder has this field, and was refused as of 262,144 layers."""
    fields = {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 262_144}
    assert find_model(config_of(tmp_path, **fields)).config.vocab_size_per_layer_input == 262_144


@pytest.mark.parametrize(
    "fields",
    [{"num_hidden_layers": 10**9}, {"num_labels": 90_000_001}, {"max_position_embeddings": 10**12}],
)
def test_sizes_that_take_memory_before_the_model_is_built_are_refused(tmp_path, fields):
    [(name, value)] = fields.items()
    told = f"must have layer up to 10000, labels up to 1000000, max_position up to 16777216, got {name} {value}"
    with pytest.raises(ModelError, match=told):
        blueprint(config_of(tmp_path, **fields), task="causal-lm")
    with pytest.raises(ModelError, match=told):
        blueprint(ModelOptions(name="llama", config=fields), task="causal-lm")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"hidden_act": "glue"}, "transformers cannot build llama of this configuration: KeyError"),
        ({"rope_parameters": {"rope_type": "odd"}}, "transformers .* llama|refuses the configuration"),
        ({"quantization_config": {"quant_method": "fp8"}}, "must hold weights that are not quantized, got fp8; take"),
    ],
)
def test_configurations_that_cannot_be_built_are_one_sentence(tmp_path, fields, told):
    options = config_of(tmp_path, **fields, hidden_size=8, num_hidden_layers=1, vocab_size=9, num_attention_heads=2)
    with pytest.raises(ModelError, match=told):
        blueprint(replace(options, weights="pretrained"), task="causal-lm")


def test_a_folder_that_is_no_model_is_told(tmp_path):
    with pytest.raises(ModelError, match=f"{tmp_path} must be the folder of a model, with its config.json"):
        blueprint(ModelOptions(name=str(tmp_path)), task="causal-lm")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="it holds an adapter: merge it into its base model"):
        blueprint(ModelOptions(name=str(tmp_path)), task="causal-lm")
