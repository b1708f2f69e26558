"""A tiny copy of a model, cut after every block, is compared with the uncut one before training."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.cache_utils import DynamicLayer
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from thinwire.models.architectures.parity import check_parity, remembers
from thinwire.models.errors import ModelError

PUBLISHED = {
    **{name: {} for name in ("llama", "gpt2", "gpt_oss", "gemma3_text")},
    # heads that must fit widths, or one another
    **{name: {} for name in ("gptj", "helium", "lfm2")},
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
        with pytest.raises(ModelError, match=rf"data\.packing must be false for {name}: in a tiny copy of it"):
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
