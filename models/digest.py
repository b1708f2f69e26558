"""One hash of all weights, the same for every cut of a model. No weight moves between processes.

A stage makes one line for each of its tensors. The digest is the hash of the sorted lines of all stages.
"""

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def tensor_lines(full_state: Mapping[str, Tensor]) -> list[str]:
    """A line for each tensor, "full name, dtype, shape, SHA-256 of bytes": "ln.bias, float32, [64], 5f1c..."."""
    return [_line(name, tensor) for name, tensor in full_state.items()]


def weights_digest(lines: Iterable[str]) -> str:
    """The SHA-256, in hex, of the sorted lines of every stage, joined by newlines.

    Several stages may hold the same weight; its line counts once.
    """
    return hashlib.sha256("\n".join(sorted(set(lines))).encode()).hexdigest()


def _line(name: str, tensor: Tensor) -> str:
    # reshape makes strided and 0-d tensors viewable as bytes
    content = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = ",".join(map(str, tensor.shape))
    return f"{name}, {dtype}, [{shape}], {hashlib.sha256(content.data).hexdigest()}"
