"""Code that lies beside a model or a tokenizer does not run, even if standard input says yes to every question."""

import io
import json
import re

import pytest
import torch
from torchvision.models import ResNet18_Weights

from support.data_files import write_tokenizer
from support.models import blueprint
from thinwire.models.architectures.vision import weights_folder
from thinwire.models.data.tokenizer import load_tokenizer, make_tokenizer
from thinwire.models.errors import ModelError
from thinwire.models.options import ModelOptions

LLAMA = {"model_type": "llama", "vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


class Marks:
    """A pickle of it touches a file when it is read."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """The file that foreign code writes. Standard input says yes, again and again."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    yield tmp_path / "mark"
    assert not (tmp_path / "mark").exists(), "the code ran"


def with_code(folder, mark, **files):
    folder.mkdir(exist_ok=True)
    code = f"open({str(mark)!r}, 'w')\nclass Theirs: pass\n"
    for name in ("configuration_theirs", "modeling_theirs", "tokenization_theirs"):
        (folder / f"{name}.py").write_text(code)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


def refusal(name):
    return f"{re.escape(name)} must need no Python code of its own, because Thinwire never runs such code"


def test_a_model_that_needs_its_own_code_is_refused(tmp_path, mark):
    config = {"model_type": "theirs", "auto_map": {"AutoConfig": "configuration_theirs.Theirs"}}
    folder = with_code(tmp_path / "model", mark, config=config)
    with pytest.raises(ModelError, match=refusal(folder)):
        blueprint(ModelOptions(name=folder), task="causal-lm")


def test_a_known_model_beside_code_is_built_by_the_library(tmp_path, mark):
    code = {"AutoConfig": "configuration_theirs.Theirs", "AutoModelForCausalLM": "modeling_theirs.Theirs"}
    folder = with_code(tmp_path / "model", mark, config=LLAMA | HEADS | {"auto_map": code})
    made = blueprint(ModelOptions(name=folder), task="causal-lm")
    assert [spec.name for spec in made.layers] == ["embedding", "block 0", "head"]


@pytest.mark.parametrize("make", [make_tokenizer, load_tokenizer], ids=["for a run", "for its folder"])
def test_a_tokenizer_that_needs_its_own_code_is_refused(tmp_path, mark, make):
    code = {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": ["tokenization_theirs.Theirs", None]}}
    folder = with_code(tmp_path / "words", mark, tokenizer_config=code)
    with pytest.raises(ModelError, match=refusal(folder)):
        make(folder)


def test_a_tokenizer_beside_code_for_its_configuration_is_read(tmp_path, mark):
    folder = write_tokenizer(tmp_path / "words")
    config = {"model_type": "theirs", "auto_map": {"AutoConfig": "configuration_theirs.Theirs"}}
    assert make_tokenizer(with_code(tmp_path / "words", mark, config=config)).name == folder


def test_a_download_of_torchvision_is_not_unpickled(tmp_path, mark, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    place = tmp_path / "checkpoints" / ResNet18_Weights.IMAGENET1K_V1.url.rpartition("/")[2]
    torch.save(Marks(mark), place)
    with pytest.raises(ModelError, match=r"must hold weights alone, and the file in .* holds something else"):
        weights_folder("resnet18", "DEFAULT")
