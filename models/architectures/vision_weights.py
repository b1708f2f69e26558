"""torchvision's pretrained weights as a folder with a safetensors file. Each stage reads only its own tensors."""

import os
import socket
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors.torch import save_file

from thinwire.models.architectures.vision import VISION
from thinwire.models.errors import ModelError, require
from thinwire.models.file_mode import follow_umask

_FILE = "model.safetensors"
_SILENCE = 10.0
"""The most seconds that a server may be silent. The system would wait minutes for one that cannot be reached."""


def weights_folder(name: str, weights: str) -> Path:
    """A folder with model.safetensors. Its tensors have the names of torchvision's model.

    Weights with a name of torchvision are downloaded once, and written beside torch's own downloads. Only this first
    run holds the whole model in memory.

    Args:
        name: one of `VISION`.
        weights: such a folder, or torchvision's name for weights of this model: "IMAGENET1K_V1", "DEFAULT".

    Raises:
        ModelError: there is no such folder or name, or the download fails.
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
    # DEFAULT is an alias, and torchvision may point it at other weights later: use the weights' own name
    folder = Path(torch.hub.get_dir(), "checkpoints", f"{name}-{known[weights].name}")
    path = folder / _FILE
    if path.is_file():
        return folder
    try:
        # load through the model: it renames the tensors of old files
        with _impatient():
            # an earlier download is not hashed again, and a pickle could run code
            stored = known[weights].get_state_dict(progress=_is_watched(), check_hash=True, weights_only=True)
        model = get_model(name)
        model.load_state_dict(stored)
        state = model.state_dict()
    except OSError as error:
        raise ModelError(
            f"{known[weights].url} cannot be downloaded: {error}; give a folder with {_FILE} that holds these tensors"
        ) from error
    except UnpicklingError as error:
        raise ModelError(
            f"{known[weights].url} must hold weights alone, and the file in {folder.parent} holds something else: "
            f"remove it"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    # several stages may write at the same time; each writes its own file, so no stage reads half a file
    unfinished = folder / f"{_FILE}.{uuid.uuid4().hex}"
    save_file(state, unfinished)
    follow_umask(unfinished)
    unfinished.replace(path)
    return folder


@contextmanager
def _impatient() -> Iterator[None]:
    """Inside, a connection that is silent for too long raises an OSError."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_SILENCE)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _is_watched() -> bool:
    """Whether this process shows how far a download is: on a terminal, the first of its host."""
    return sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0"
