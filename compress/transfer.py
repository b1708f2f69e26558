"""Tensors of the host on their way to a GPU. Nobody waits for the copy: it goes through pinned memory."""

import torch
from torch import Tensor


def put(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`; on the CPU, the tensor itself."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
