"""torchvision's pretrained weights as a safetensors file, of which each stage reads its own tensors."""

import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from thinwire.models.errors import ModelError, require
from thinwire.models.vision import VISION

_SUFFIX = ".safetensors"


def weights_file(name: str, weights: str) -> Path:
    """Return a safetensors file of a model's weights, tensors named as in torchvision's model.

    Weights that torchvision names are downloaded and written beside torch's own downloads once; for that moment the
    whole model is in memory, which every later run is spared.

    Args:
        name: one of `VISION`.
        weights: such a file, or a name that torchvision gives to weights of this model: "IMAGENET1K_V1", "DEFAULT".

    Raises:
        ModelError: if there is no such file or name, or the download fails.
    """
    require((name in VISION, f"a vision model must be one of {', '.join(VISION)}, got {name!r}"))
    if weights.endswith(_SUFFIX):
        path = Path(weights)
        require((path.is_file(), f"weights must be a {_SUFFIX} file that exists, got {weights}"))
        return path
    from torchvision.models import get_model, get_model_weights

    known = get_model_weights(name)
    members = known.__members__
    require(
        (
            weights in members,
            f"weights of {name} must be a {_SUFFIX} file or one of {', '.join(members)}, got {weights}",
        )
    )
    # DEFAULT is another name of one of them, and not of the same for ever
    path = Path(torch.hub.get_dir(), "checkpoints", f"{name}-{known[weights].name}{_SUFFIX}")
    if path.is_file():
        return path
    try:
        # through the model, which knows how old files named their tensors
        state = get_model(name, weights=known[weights], progress=False).state_dict()
    except OSError as error:
        raise ModelError(
            f"{known[weights].url} cannot be downloaded: {error}; give a {_SUFFIX} file of the same tensors instead"
        ) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    # stages may come here at once, and must not read each other's half
    partial_path = path.with_name(f"{path.name}.{os.getpid()}")
    save_file(state, partial_path)
    partial_path.replace(path)
    return path
