"""A tiny copy of a model, cut after every block, is compared with the uncut one before training."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.cache_utils import DynamicLayer
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from thinwire.models.architectures.library import kinds_of_blocks, take_apart
from thinwire.models.architectures.parity import check_parity, remembers, shown_by, tiny
from thinwire.models.errors import ModelError

PUBLISHED = {
    **{name: {} for name in ("llama", "gpt2", "gpt_oss", "gemma3_text")},
    # heads that must fit widths, or one another
    **{name: {} for name in ("gptj", "helium", "lfm2", "falcon_h1")},
    # some blocks have larger heads than the rest
    "gemma4_text": {"hidden_size_per_layer_input": 0},
}
"""Models in their default configurations, and what is changed of these."""


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name in CONFIG_MAPPING])
def test_a_copy_of_a_large_model_is_small_and_equal(name):
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    found = check_parity(AutoConfig.for_model(name, **PUBLISHED[name]), "causal-lm")
    assert found.startswith(f"a tiny copy of {name} computes the same, cut after every block and uncut: its logits ")
    assert found.endswith("gradients differ by 0 at most")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


@pytest.mark.skipif("falcon_h1" not in CONFIG_MAPPING, reason="needs Falcon H1 in transformers")
def test_a_copy_of_a_recurrence_has_small_chunks_and_widths():
    """Each text of 8 tokens was filled up to 256: the comparison of Falcon H1 took more than 12 s."""
    small, whole, *_ = tiny(AutoConfig.for_model("falcon_h1"), "causal-lm")
    assert small.mamba_chunk_size < 8
    assert whole.model.layers[0].mamba.intermediate_size == 128, "1,024 in the whole"


@pytest.mark.parametrize(
    ("name", "count"), [("deepseek_v3", 4), ("glm_moe_dsa", 4), ("deepseek_v4", 5), ("jamba", 5), ("llama", 3)]
)
def test_a_copy_has_a_block_of_each_kind(name, count):
    """Blocks of experts came after the last one of the copy."""
    assert shown_by(kinds_of_blocks(AutoConfig.for_model(name), "causal-lm")) == count


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
LONG |= {"short_factor": [1.0] * 8, "long_factor": [2.0 + index for index in range(8)]}
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
PHI = {**SMALL, "original_max_position_embeddings": 16, "rope_parameters": LONG}


def test_a_copy_is_so_long_that_its_forward_takes_the_other_way(monkeypatch):
    seen = []
    update = torch.where
    monkeypatch.setattr(torch, "where", lambda condition, *rest: seen.append(condition) or update(condition, *rest))
    check_parity(AutoConfig.for_model("phi3", **PHI), "causal-lm")
    assert any(one.ndim == 0 and one.item() for one in seen if not isinstance(one, FakeTensor))


def test_a_model_that_asks_for_the_longest_position_is_cut():
    """PhiMoE with its published angles was refused by an error on tensors without data."""
    angles = {**LONG, "short_mscale": 1.1, "long_mscale": 1.2}
    found = check_parity(AutoConfig.for_model("phimoe", **SMALL, rope_parameters=angles), "causal-lm")
    assert found.endswith("gradients differ by 0 at most")


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_dynamic_rotary_angles_are_the_same_as_those_of_the_uncut_model(name):
    """They were refused by an error on tensors without data."""
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    each = dynamic if name == "llama" else {"full_attention": dynamic, "sliding_attention": dynamic}
    found = check_parity(AutoConfig.for_model(name, rope_parameters=each), "causal-lm")
    assert found.endswith("gradients differ by 0 at most")


@pytest.mark.parametrize(("name", "field"), [("opt", "layerdrop"), ("bart", "decoder_layerdrop")])
def test_layers_that_are_left_out_at_random_are_refused_by_name(name, field):
    with pytest.raises(ModelError, match=rf"^{field} must be 0, because each stage runs in each step, got 0\.5;"):
        take_apart(AutoConfig.for_model(name, **{field: 0.5}), "causal-lm")


def test_a_forward_that_hands_on_more_than_the_hidden_state_is_refused(monkeypatch):
    rotate = LlamaRotaryEmbedding.forward

    def by_state(self, x, position_ids):
        cos, sin = rotate(self, x, position_ids)
        return cos * (1 + x.mean()), sin

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", by_state)
    with pytest.raises(ModelError, match=r"a tiny copy of llama, cut after every block, must .* differs by \S+ of its"):
        check_parity(AutoConfig.for_model("llama", vocab_size=1234), "causal-lm")


@pytest.mark.slow
def test_a_model_that_reads_positions_and_sees_other_conversations_is_not_packed():
    check_parity(AutoConfig.for_model("llama"), "causal-lm", packed=True)
    lfm2 = {
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_hidden_layers": 2,
        "layer_types": ["conv", "full_attention"],
    }
    for name, fields in {"opt": {}, "gpt_oss": {}, "lfm2": lfm2}.items():
        config = AutoConfig.for_model(name, **fields)
        with pytest.raises(ModelError, match=rf"one text for {name}, as with .*: in a tiny copy of it"):
            check_parity(config, "causal-lm", packed=True)


def test_a_language_model_whose_tokens_see_later_ones_is_refused():
    with pytest.raises(ModelError, match="a token of a language model must not see later ones, and those of bert do"):
        check_parity(AutoConfig.for_model("bert"), "causal-lm")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "mamba", "gemma3_text"])
def test_a_copy_computes_token_by_token_what_it_computes_of_all_at_once(name):
    """Windows of 4 tokens, states of a recurrence, positions that are counted by the cache."""
    assert remembers(AutoConfig.for_model(name), "causal-lm")


def test_a_model_that_remembers_something_else_is_found(monkeypatch):
    monkeypatch.setattr(DynamicLayer, "update", lambda self, keys, values, *args: (keys, values))
    assert not remembers(AutoConfig.for_model("llama", vocab_size=1235), "causal-lm")
