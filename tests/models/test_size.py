"""The number of parameters, counted without the model, against the model itself."""

import pytest

from support.allocated import peak_bytes
from support.family_cases import CASES, LABELS, apart, options
from support.models import blueprint
from support.own_code import add_module
from thinwire.models.architectures import configuration
from thinwire.models.model import find_model
from thinwire.models.options import ModelOptions


def held(model):
    """The parameters of all layers of a model; those that several layers share count once."""
    found = {name: tensor for layer in model.on_meta for name, tensor in layer.full_parameters().items()}
    return sum(tensor.numel() for tensor in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_model_of_transformers_is_counted(name):
    more = {"num_labels": LABELS} if CASES[name].task == "classification" else {}
    assert find_model(options(name, **more)).parameters == held(apart(name))


def test_blocks_of_experts_behind_dense_ones_count():
    """All blocks counted as the second did: DeepSeek-V3 had 37 of its 671 billion parameters."""
    changed = {"first_k_dense_replace": 2, "num_hidden_layers": 4}
    assert find_model(options("deepseek_v3", **changed)).parameters == held(apart("deepseek_v3", **changed))


def test_blocks_beyond_some_hundred_are_not_built(monkeypatch):
    """Sizes that no memory holds were built for minutes, in silence."""
    built = []
    unsplit = configuration.unsplit

    def noted(config, task):
        built.append(config.n_layer)
        return unsplit(config, task)

    monkeypatch.setattr(configuration, "unsplit", noted)
    small = {"vocab_size": 10, "n_embd": 8, "n_head": 1, "n_positions": 4, "bos_token_id": None, "eos_token_id": None}
    one, two = (
        find_model(ModelOptions(name="gpt2", config={**small, "n_layer": count})).parameters for count in (1, 2)
    )
    monkeypatch.setattr(configuration, "_MOST_BLOCKS", 2)
    many = find_model(ModelOptions(name="gpt2", config={**small, "n_layer": 10_000})).parameters
    assert many == one + 9_999 * (two - one)
    assert max(built) == 2
    wide = find_model(ModelOptions(name="gpt2", config={**small, "n_layer": 1, "n_embd": 1_000_000})).parameters
    assert wide > 12 * 10**12, "it takes no memory"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "vit_b_32"])
def test_a_vision_model_is_counted_whole(name):
    small = {"width": 8} if name == "resnet18" else {"hidden_dim": 24, "mlp_dim": 32, "num_layers": 2, "num_heads": 2}
    given = ModelOptions(name=name, config=small)
    assert find_model(given).parameters == held(blueprint(given, task="classification"))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("resnet18", {"foo": 1}),
        ("resnet18", {"width": "8"}),
        ("vit_b_32", {"patch_size": 33}),
        ("vit_b_32", {"num_heads": 7}),
        ("vit_b_32", {"hidden_dim": -12}),
    ],
)
def test_a_vision_model_that_torchvision_refuses_is_not_counted(name, config):
    assert find_model(ModelOptions(name=name, config=config)).parameters is None


def test_a_model_of_ones_own_is_counted_by_its_layers(monkeypatch):
    own = "from torch import nn\n\n\ndef made(width):\n    return [nn.Linear(width, 4), nn.ReLU(), nn.Linear(4, 2)]\n"
    add_module(monkeypatch, "my_models", own)
    assert find_model(ModelOptions(name="my_models:made", config={"width": 3})).parameters == 3 * 4 + 4 + 4 * 2 + 2


EXPERTS = {"hidden_size": 256, "intermediate_size": 256, "num_local_experts": 16, "num_hidden_layers": 1}
WIDE = {"vocab_size": 2**17, "n_embd": 64, "n_layer": 1, "n_head": 1, "n_positions": 4}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gpt2", WIDE),
        # its experts are zeros before they are drawn
        ("llama4_text", {**EXPERTS, "num_attention_heads": 4, "head_dim": 64, "vocab_size": 64}),
    ],
)
def test_no_weight_of_a_large_model_is_made_where_only_its_shapes_are_asked_for(name, config):
    """Each was made on the CPU and thrown away: in the heap it left a gap of its size, and zeros took time as well."""
    found = []
    assert peak_bytes(lambda: found.append(blueprint(ModelOptions(name=name, config=config), task="causal-lm"))) < 2**20
    assert held(found[0]) > 2**21
