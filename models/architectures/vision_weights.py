"""torchvision's pretrained weights as a folder with a safetensors file, of which each stage reads its own tensors."""

import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from thinwire.models.architectures.vision import VISION
from thinwire.models.errors import ModelError, require
from thinwire.models.file_mode import follow_umask

_FILE = "model.safetensors"


def weights_folder(name: str, weights: str) -> Path:
    """A folder with model.safetensors: a model's weights, tensors named as in torchvision's model.

    Weights that torchvision names are downloaded and written beside torch's own downloads once; for that moment the
    whole model is in memory, which every later run is spared.

    Args:
        name: one of `VISION`.
        weights: such a folder, or a name that torchvision gives to weights of this model: "IMAGENET1K_V1", "DEFAULT".

    Raises:
        ModelError: if there is no such folder or name, or the download fails.
    """
    require((name in VISION, f"a vision model must be one of {', '.join(VISION)}, got {name!r}"))
    if Path(weights).is_dir():
        require((Path(weights, _FILE).is_file(), f"weights of {name} must be a folder with {_FILE}, got {weights}"))
        return Path(weights)
    from torchvision.models import get_model, get_model_weights

    known = get_model_weights(name)
    names = ", ".join(known.__members__)
    require(
        (weights in known.__members__, f"weights of {name} must be a folder with {_FILE} or {names}, got {weights!r}")
    )
    # DEFAULT is another name of one of them, and not of the same for ever
    folder = Path(torch.hub.get_dir(), "checkpoints", f"{name}-{known[weights].name}")
    path = folder / _FILE
    if path.is_file():
        return folder
    try:
        # through the model, which knows how old files named their tensors
        state = get_model(name, weights=known[weights], progress=False).state_dict()
    except OSError as error:
        raise ModelError(
            f"{known[weights].url} cannot be downloaded: {error}; give a folder with {_FILE} of the same tensors"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    # stages may come here at once, and must not read each other's half
    unfinished = folder / f"{_FILE}.{os.getpid()}"
    save_file(state, unfinished)
    follow_umask(unfinished)
    unfinished.replace(path)
    return folder
