"""The device of a process: the CPU, or a GPU. Nothing else in Thinwire chooses one.

On the CPU every function here does nothing, so the same lines run there.
"""

from __future__ import annotations

import os
import time
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire.compress.transfer import put
from thinwire.pipeline.errors import OptionsError

DeviceName = Literal["auto", "cpu", "cuda"]
CPU = torch.device("cpu")


def choose(wanted: DeviceName, local_rank: int = 0) -> torch.device:
    """The device of a process: of the GPUs of its host, the one that its number there points at, in turn.

    `auto` takes the CPU where there is no GPU. Asking does not start the driver, so a launcher may fork afterwards.

    Raises:
        OptionsError: `cuda` is wanted, and torch can use no GPU.
    """
    count = 0 if wanted == "cpu" else num_gpus()
    if count:
        return torch.device("cuda", local_rank % count)
    if wanted == "cuda":
        raise OptionsError(f"training.device cuda needs a GPU that torch can use, and {_without()}")
    return CPU


def _without() -> str:
    """Why there is no GPU, and what to do."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if seen is not None and torch.version.cuda is not None:
        return f"CUDA_VISIBLE_DEVICES={seen!r} leaves none; change or unset it, or add --training.device cpu"
    return (
        "this machine has none; add --training.device cpu, or install the driver and a CUDA build of torch (thinwire "
        "doctor shows both)"
    )


def num_gpus() -> int:
    """The GPUs that torch can use here."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else the question starts the driver
    kind = torch.accelerator.current_accelerator()
    is_gpu = kind is not None and kind.type == "cuda" and torch.accelerator.is_available()
    return torch.accelerator.device_count() if is_gpu else 0


def use(device: torch.device) -> None:
    """Make `device` the current one of this process, and its arithmetic the same in each run."""
    if device.type == "cpu":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # else with NaN
    make_current(device)


def make_current(device: torch.device) -> None:
    """Make `device` the current one of this thread: each begins with the first GPU, and would use memory there."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)


def described(device: torch.device) -> str:
    """A device in words: `cpu`, or `cuda:0 (NVIDIA H200)`."""
    return "cpu" if device.type == "cpu" else f"{device} ({torch.get_device_module(device).get_device_name(device)})"


def seconds_now(device: torch.device) -> float:
    """The time, once the device has done all that was asked of it: for measurements, never inside a step."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def put_all(tensors: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The same, with every tensor of the host on the device."""
    return {name: put(value, device) if isinstance(value, Tensor) else value for name, value in tensors.items()}


def copy_to_host(tensor: Tensor) -> Tensor:
    """A copy in the memory of the host, which nothing else changes."""
    return tensor.detach().to(CPU, copy=True)
