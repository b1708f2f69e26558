"""Models of text and images: the text model inside trains where transformers takes it; how to save it, of others."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from support.family_cases import LENGTH, VOCABULARY, split, state_of
from support.models import blueprint
from support.pages import DOCS, blocks
from thinwire.models.architectures.library import for_the_library
from thinwire.models.errors import ModelError
from thinwire.models.lora import WEIGHTS_FILE, for_peft
from thinwire.models.model import find_model
from thinwire.models.options import LoraOptions, ModelOptions

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_EYE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
_SQUARES = {"image_size": 28, "patch_size": 14}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_EYE_OF_QWEN = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 16}
_EYE_OF_LLAMA = {"projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16}
TAKEN = {
    "qwen3_5": ({**_TEXT, **_LINEAR}, {**_EYE_OF_QWEN, "num_position_embeddings": 16}),
    "llama4": ({**_TEXT, "intermediate_size_mlp": 24, "num_local_experts": 2}, {**_EYE, **_SQUARES, **_EYE_OF_LLAMA}),
}
"""Of these transformers itself takes the text model: configurations of text and of images."""
SAVED = {
    "gemma3": (_TEXT, {**_EYE, **_SQUARES}),
    "mistral3": ({**_TEXT, "model_type": "mistral"}, {**_EYE, **_SQUARES, "model_type": "pixtral"}),
    "llava": ({**_TEXT, "model_type": "llama"}, {**_EYE, **_SQUARES, "model_type": "clip_vision_model"}),
}
"""Of these it does not."""


def whole(name, folder):
    """A tiny model of text and images of that type, with noise for weights, saved in a folder."""
    text, images = (TAKEN | SAVED)[name]
    config = CONFIG_MAPPING[name](text_config=text, vision_config=images)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForImageTextToText.from_config(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return model


def build(folder, task="causal-lm"):
    given = ModelOptions(name=str(folder), weights="pretrained")
    return blueprint(given, task=task, num_labels=None if task == "causal-lm" else 2, block_size=LENGTH)


def tokens():
    return torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def run(stages, x):
    with torch.no_grad():
        for stage in stages:
            x = stage.eval()(x)
    return x


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TAKEN if name in CONFIG_MAPPING])
def test_the_text_model_inside_is_cut_as_the_library_takes_it(name, tmp_path):
    whole(name, tmp_path / "whole")
    unsplit = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    model = build(tmp_path / "whole")
    assert model.inside == name
    stages, ids = split(model, 3), tokens()
    with torch.no_grad():
        assert torch.equal(run(stages, ids), unsplit(input_ids=ids).logits)
    assert "computes the same" in model.compare()
    model.save_config(tmp_path / "exported")
    stored = for_the_library(tmp_path / "exported", "causal-lm", state_of(stages))
    save_file(stored, tmp_path / "exported" / "model.safetensors", metadata={"format": "pt"})
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    with torch.no_grad():
        assert torch.equal(loaded.eval()(input_ids=ids).logits, unsplit(input_ids=ids).logits)
    with pytest.raises(ModelError, match=f"the task of {name} must be causal-lm, got classification"):
        build(tmp_path / "whole", "classification")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TAKEN if name in CONFIG_MAPPING])
def test_an_adapter_of_the_text_model_is_one_of_the_whole(name, tmp_path):
    """PEFT names the whole; the router of Llama 4 is a Linear that returns two tensors, and has no matrices beside."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    whole(name, tmp_path / "whole")
    given = ModelOptions(name=str(tmp_path / "whole"), weights="pretrained", lora=LoraOptions(rank=2))
    model = blueprint(given, task="causal-lm", block_size=LENGTH)
    stages, ids = split(model, 3), tokens()
    with torch.no_grad():
        for stage in stages:
            for each in stage.saved_state().values():
                each.copy_(torch.randn(each.shape, generator=torch.Generator().manual_seed(len(each))))
    model.save_config(tmp_path)
    save_file(for_peft({k: v for stage in stages for k, v in stage.saved_state().items()}), tmp_path / WEIGHTS_FILE)
    with torch.no_grad():
        loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path).eval()
        torch.testing.assert_close(run(stages, ids), loaded(input_ids=ids).logits)
        with loaded.disable_adapter():
            assert not torch.allclose(run(stages, ids), loaded(input_ids=ids).logits)


def test_sizes_are_those_of_the_text_model():
    found = find_model(ModelOptions(name="llama4", config={"num_hidden_layers": 2}))
    config, inside = found.config, found.inside
    assert (config.model_type, config.num_hidden_layers, inside) == ("llama4_text", 2, "llama4")
    with pytest.raises(ModelError, match="a configuration of llama4_text has no 'vision_config'"):
        find_model(ModelOptions(name="llama4", config={"vision_config": {}}))


def test_what_the_whole_says_of_all_its_parts_counts(tmp_path):
    whole("llama4", tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    fields["text_config"].pop("dtype", None)
    changes = {"num_attention_heads": 2, "attention_dropout": 0.25}
    given = ModelOptions(name=str(tmp_path), weights="pretrained", config=changes)
    path.write_text(json.dumps({**fields, "dtype": "bfloat16"}))
    config = find_model(given).config
    assert (str(config.dtype), config.num_attention_heads, config.attention_dropout) == ("torch.bfloat16", 2, 0.25)
    path.write_text(json.dumps({**fields, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ModelError, match="must hold weights that are not quantized, got fp8"):
        build(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED)
def test_the_text_model_of_others_is_saved_as_the_page_shows(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    unsplit = whole(name, "whole")
    with pytest.raises(ModelError, match=rf"reads text alone, and {name} reads more; take .*models\.md"):
        build("whole")
    (code,) = blocks(DOCS / "reference" / "models.md", "python")
    exec("\n".join(line for line in code.splitlines() if not line.startswith("AutoTokenizer")), {})
    ids = tokens()
    with torch.no_grad():
        torch.testing.assert_close(run(split(build("text"), 3), ids), unsplit(input_ids=ids).logits)
    assert not any("vision" in key or "projector" in key for key in load_file("text/model.safetensors"))
