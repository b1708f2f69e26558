"""What cannot work is said in a sentence, with status 2, before any process starts or anything is written."""

import pytest

from support.data_files import random_pixels, write_images, write_json, write_tokenizer
from thinwire.launch import cli
from thinwire.launch.processes import launcher

GPT2 = {"vocab_size": 256, "n_layer": 6, "n_embd": 64, "n_head": 4, "n_positions": 64}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of data that is sound by itself."""
    folder = tmp_path_factory.mktemp("files")
    write_json(folder / "rows.jsonl", [{"text": "the cat sat on a mat " * 20, "n": 1}] * 50)
    write_images(folder / "images.parquet", random_pixels(20), [0, 1] * 10)
    write_tokenizer(folder / "words")
    (folder / "nothing").mkdir()
    return folder


@pytest.fixture
def refused(files, hub_cache, monkeypatch, capsys):
    """Ask `thinwire train` for what cannot work; return what it says."""
    monkeypatch.chdir(files)
    monkeypatch.setattr(launcher, "launch", lambda *_: pytest.fail("processes were started"))

    def ask(recipe, **changes):
        options = [part for name, value in changes.items() for part in (f"--{name.replace('__', '.')}", str(value))]
        capsys.readouterr()  # what the libraries say of files they write
        assert cli.main(["train", recipe, "--output", "run", *options]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert "Traceback" not in said.err and said.err.count("\n") == 1
        assert not (files / "run").exists()
        return said.err

    return ask


def gpt2_config(**changes):
    return "{" + ", ".join(f"{name}: {value}" for name, value in (GPT2 | changes).items()) + "}"


MISTAKES = {
    "no such model": (
        "gpt2-tiny",
        {"model__name": "/no/model", "model__config": "{}"},
        "a model must be a folder, a name on the hub, module:factory or a type of transformers such as gpt2, ",
        "got '/no/model': no such file or folder",
    ),
    "no such data": (
        "gpt2-tiny",
        {"data__name": "/no/data.txt"},
        "a readable file or folder, a data set on the hub, or module:function for your own, got '/no/data.txt': no ",
    ),
    "no such tokenizer": (
        "gpt2-tiny",
        {"data__tokenizer": "/no/words"},
        "tokenizer must be 'bytes', or the name or folder of one",
        "got '/no/words': no such file or folder",
    ),
    "three of them": (
        "gpt2-tiny",
        {"data__tokenizer": "/no/words", "data__name": "/no/data.txt", "model__name": "/no/model"},
        "got '/no/words'",
        "got '/no/data.txt'",
        "got '/no/model'",
    ),
    "a missing column": (
        "gpt2-tiny",
        {"data__name": "rows.jsonl", "data__columns": "[story]"},
        "columns must name columns of rows.jsonl, got story; it has text, n",
    ),
    "a column of numbers": (
        "gpt2-tiny",
        {"data__name": "rows.jsonl", "data__columns": "[n]"},
        "columns must name one column of text of rows.jsonl, got n of another type; set kind",
    ),
    "a missing label": (
        "deberta-tiny",
        {"data__name": "rows.jsonl"},
        "label must be a column of rows.jsonl, got 'label'; it has text, n",
    ),
    "a missing split": (
        "gpt2-tiny",
        {"data__name": "rows.jsonl", "data__evaluation": "test"},
        "the split of rows.jsonl must be one of train, got 'test'",
    ),
    "another vocabulary, and samples that are too long": (
        "gpt2-tiny",
        {
            "data__name": "rows.jsonl",
            "data__tokenizer": "words",
            "data__block_size": 65,
            "model__config": gpt2_config(vocab_size=10),
        },
        "the model's vocab_size must be at least the tokenizer's 19, got 10; take the model's own tokenizer",
        "block_size must be at most the model's 64 positions, got 65",
    ),
    "more stages than layers": (
        "gpt2-tiny",
        {"pipeline__layers": "null", "pipeline__num_stages": 9},
        "each stage must have a layer, got 9 stages for 8 layers; lower pipeline.num_stages to at most 8, or take "
        "a model with more layers",
    ),
    "a cut that is no layer": (
        "gpt2-tiny",
        {"pipeline__layers": "[block 0, block 2, blok 4]"},
        "a cut must name one of the layers embedding, block 0, ",
        "got 'blok 4' (did you mean block 4",
    ),
    "a cut after the last layer, and too few samples": (
        "gpt2-tiny",
        {"pipeline__layers": "[block 0, block 2, head]", "data__limit": 3000},
        "a cut must leave layers after it",
        "it needs 16 samples, and there are 4 held out; raise data.limit, which is 3000, or raise "
        "data.held_out, or lower pipeline.num_microbatches",
    ),
    "too few samples to train on": (
        "gpt2-tiny",
        {"data__limit": 1000, "data__held_out": 0},
        "a step needs 16 samples, and there are 15 to train on",
    ),
    "images for a language model": (
        "gpt2-tiny",
        {"data__name": "images.parquet", "data__kind": "images"},
        "gpt2 reads text, but the data are images; take a vision model",
    ),
    "images for a classifier of text": (
        "deberta-tiny",
        {"data__name": "images.parquet", "data__kind": "images"},
        "deberta-v2 reads text, but the data are images; take a vision model",
    ),
    "text for a vision model": (
        "resnet-tiny",
        {"data__name": "pydoc", "data__channels": "null"},
        "resnet18 reads images, but the data are text; take a language model",
    ),
    "a table of images as text": (
        "gpt2-tiny",
        {"data__name": "images.parquet"},
        "columns must name one column of text of images.parquet, got []; it has img, label; set kind or columns",
    ),
    "grey images": (
        "resnet-tiny",
        {"data__name": "images.parquet", "data__kind": "images", "data__channels": 1},
        "resnet18 reads images of 3 channels, got 1; set data.channels to 3",
    ),
    "text to classify for a language model": (
        "gpt2-tiny",
        {"data__kind": "pairs"},
        "a classifier of the type gpt2 reads the last token before the padding, so its config must have the pad_",
    ),
    "no weights": (
        "gpt2-tiny",
        {"model__weights": "/no/weights"},
        "weights must be fresh, pretrained or a folder that exists for 'gpt2', got '/no/weights'",
    ),
    "a folder without weights": (
        "gpt2-tiny",
        {"model__weights": "./nothing"},
        "./nothing must hold model.safetensors or model.safetensors.index.json; both are missing",
    ),
    "unknown weights of torchvision": (
        "resnet-tiny",
        {"data__name": "images.parquet", "data__kind": "images", "model__weights": "IMAGENET9"},
        "weights of resnet18 must be a folder with model.safetensors or IMAGENET1K_V1, DEFAULT, got 'IMAGENET9'",
    ),
    "an unknown key": (
        "gpt2-tiny",
        {"model__config": "{n_layers: 6}"},
        "a configuration of gpt2 has no 'n_layers' (did you mean n_layer?)",
    ),
    "a value of another type": (
        "gpt2-tiny",
        {"model__config": "{n_embd: big}"},
        "transformers refuses the configuration of 'gpt2': Validation error for field 'n_embd': TypeError: ",
    ),
    "an unsupported architecture": (
        "gpt2-tiny",
        {"model__name": "vit", "model__config": "{}"},
        "model type 'vit' is not supported",
        "or give layers as module:factory, a function that returns its layers in order",
    ),
    "no such factory": (
        "gpt2-tiny",
        {"model__name": "nomodule:make", "model__config": "{}"},
        "module nomodule of 'nomodule:make' cannot be imported",
    ),
    "a field of another name": (
        "gpt2-tiny",
        {"data__text": "pydoc"},
        "there is no option --data.text",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_it_is_said_before_anything_starts(refused, mistake):
    recipe, changes, *sentences = MISTAKES[mistake]
    said = refused(recipe, **changes)
    for sentence in sentences:
        assert sentence in said
    assert len(said) < 900


@pytest.mark.slow
def test_weights_of_another_model_are_told_before_a_stage_reads_them(refused, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    small = GPT2Config(**{**GPT2, "n_embd": 8}, bos_token_id=None, eos_token_id=None)
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).save_pretrained(tmp_path / "llama")
    GPT2LMHeadModel(small).save_pretrained(tmp_path / "small")
    said = refused("gpt2-tiny", model__weights=tmp_path / "llama")
    assert "llama must hold every weight of the model, and lacks transformer.wpe.weight, transformer.h.0.ln_1.w" in said
    assert said.endswith("c_attn.bias and 70 more\n")
    said = refused("gpt2-tiny", model__weights=tmp_path / "small")
    assert "small do not fit the model: transformer.wte.weight must be of shape [256, 64], got [256, 8]; " in said


@pytest.mark.slow
def test_a_recipe_without_a_mistake_is_launched(files, monkeypatch):
    started = []
    monkeypatch.setattr(launcher, "launch", lambda prepared, *arguments: started.append(prepared.recipe))
    assert cli.main(["train", "gpt2-tiny", "--output", str(files / "fine"), "--training.steps", "3"]) == 0
    assert [wanted.training.steps for wanted in started] == [3]
    assert [wanted.training.epochs for wanted in started] == [None], "steps on the command line take epochs' place"
