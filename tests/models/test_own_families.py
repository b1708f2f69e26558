"""A family of the user's own: its names are checked, and its numbers are compared with those of the library."""

import pytest
import torch
import transformers

from support.own_code import add_module
from thinwire.models.architectures import families
from thinwire.models.errors import ModelError
from thinwire.models.layers import build_stage
from thinwire.models.model import blueprint
from thinwire.models.options import ModelOptions

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
MULTIPLIED = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 16.0}
OWN = """
from functools import partial

from thinwire.models.architectures.families import causal_family, encoder_family, typed_embedding
from thinwire.models.architectures.pieces import CopiedChain


def multiply(hidden, config):
    return hidden * config.embedding_multiplier


def divide(logits, config):
    return logits / config.logits_scaling


STABLELM = causal_family("stablelm", "StableLmForCausalLM", "model")
GRANITE = causal_family("granite", "GraniteForCausalLM", "model")
WHOLE_GRANITE = causal_family(
    "granite",
    "GraniteForCausalLM",
    "model",
    embedding=partial(CopiedChain, steps=("model.embed_tokens", multiply)),
    head=("model.norm", "lm_head", divide),
)
COHERE = causal_family("cohere", "CohereForCausalLM", "model")
WINDOW = causal_family("starcoder2", "Starcoder2ForCausalLM", "model")
WRONG_CLASS = causal_family("stablelm", "StableLmForCausallM", "model")
WRONG_NAME = causal_family("stablelmm", "StableLmForCausalLM", "model")
WRONG_BASE = causal_family("stablelm", "StableLmForCausalLM", "modell")
WRONG_BLOCKS = causal_family("stablelm", "StableLmForCausalLM", "model", blocks="model.blocks")
NO_LIST = causal_family("stablelm", "StableLmForCausalLM", "model", blocks="model.norm")
NO_ROTARY = causal_family("gpt_bigcode", "GPTBigCodeForCausalLM", "transformer", tokens="wte", blocks="transformer.h",
    norm="ln_f")
GPTJ = causal_family("gptj", "GPTJForCausalLM", "transformer", tokens="wte", blocks="transformer.h", norm="ln_f")
XLM_ROBERTA = encoder_family(
    "xlm-roberta",
    "XLMRobertaForSequenceClassification",
    "roberta",
    embedding=typed_embedding("roberta.embeddings"),
    head=("classifier",),
    fresh=("classifier.",),
)
"""


@pytest.fixture(autouse=True)
def own_families(monkeypatch):
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))
    add_module(monkeypatch, "own_families", OWN)


def cut(name, task="causal-lm", **config):
    given = ModelOptions(name=f"own_families:{name}", config={**SMALL, **config})
    return blueprint(given, task=task, num_labels=2 if task == "classification" else None, block_size=16)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("STABLELM", {}),
        ("STABLELM", {"num_hidden_layers": 1}),
        ("GRANITE", {}),
        ("WHOLE_GRANITE", MULTIPLIED),
        ("WINDOW", {"sliding_window": 9}),
    ],
)
def test_a_family_that_computes_what_the_library_does_is_taken(name, config):
    assert len(cut(name, **config).layers) == config.get("num_hidden_layers", 3) + 2


def test_an_encoder_is_compared_with_padding():
    given = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
    options = ModelOptions(name="own_families:XLM_ROBERTA", config={**given, "max_position_embeddings": 40})
    assert len(blueprint(options, task="classification", num_labels=2, block_size=16).layers) == 5


def test_what_the_librarys_forward_does_between_the_layers_is_noticed():
    """It trained another model without a word: a loss of 4.697 here, of 5.463 in transformers."""
    with pytest.raises(ModelError) as caught:
        cut("GRANITE", **MULTIPLIED)
    said = str(caught.value)
    assert said.startswith(
        "the family 'granite' must compute what GraniteForCausalLM computes, and its logits differ by "
    )
    assert "\n" not in said


def test_what_comes_after_the_head_is_noticed():
    with pytest.raises(ModelError, match="must compute what CohereForCausalLM computes"):
        cut("COHERE")


def test_comparing_leaves_the_generator_as_it_was():
    state = torch.get_rng_state()
    cut("STABLELM")
    assert torch.equal(torch.get_rng_state(), state)


def test_layers_of_a_family_equal_the_unsplit_model():
    """The comparison is with the library itself, not with Thinwire's own copy."""
    made = cut("WHOLE_GRANITE", **MULTIPLIED)
    config = transformers.AutoConfig.for_model("granite", **SMALL, **MULTIPLIED, tie_word_embeddings=False)
    whole = transformers.AutoModelForCausalLM.from_config(config).eval()
    stage = build_stage(made, range(5), seed=3).eval()
    whole.load_state_dict(stage.full_state())
    ids = torch.arange(20).view(2, 10)
    torch.testing.assert_close(stage(ids), whole(input_ids=ids).logits, rtol=1e-5, atol=1e-6)


MISTAKES = {
    "WRONG_CLASS": "stablelm of transformers is a StableLmForCausalLM, and the family names StableLmForCausallM",
    "WRONG_NAME": "the name of a family must be a model type of transformers, got 'stablelmm' (did you mean stablelm?)",
    "WRONG_BASE": "StableLmForCausalLM must have a part 'modell.layers', its parts are model, lm_head",
    "WRONG_BLOCKS": "StableLmForCausalLM must have a part 'model.blocks', the parts of model are embed_tokens, ",
    "NO_LIST": "model.norm of StableLmForCausalLM must be a list of blocks, got LayerNorm",
}


@pytest.mark.parametrize(("name", "said"), MISTAKES.items())
def test_a_wrong_name_in_a_family_is_one_sentence(name, said):
    with pytest.raises(ModelError) as caught:
        cut(name)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_a_family_whose_attention_must_be_eager_is_told_so(monkeypatch):
    """The library's long answer named an argument of its own, which a family has under another name.

    Until 5.23 GPT-J had eager attention alone.
    """
    monkeypatch.setattr(transformers.GPTJForCausalLM, "_supports_sdpa", False)
    config = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "rotary_dim": 8}
    told = (
        "attention of the family 'gptj' must be one that GPTJForCausalLM has, got 'sdpa'; add attention=\"eager\" to "
    )
    with pytest.raises(ModelError, match=told):
        blueprint(ModelOptions(name="own_families:GPTJ", config=config), task="causal-lm", block_size=16)


def test_a_family_without_rotary_positions_must_say_so():
    config = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
    options = ModelOptions(name="own_families:NO_ROTARY", config=config)
    with pytest.raises(
        ModelError, match=r"must have a part 'transformer\.rotary_emb', the parts of transformer are wte"
    ):
        blueprint(options, task="causal-lm", block_size=16)
