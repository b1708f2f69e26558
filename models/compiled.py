"""Compiled layers: torch makes one program of each layer, forward and back.

Layers are compiled in place, so weights keep their names, and a checkpoint does not show it. Programs add in another
order than the layers themselves, so the last bits of results differ.
"""

import os
import shutil
import sysconfig
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from thinwire.models.errors import require
from thinwire.models.layers import Stage
from thinwire.models.recompute import BuffersApart
from thinwire.models.tensors import as_tuple

_MANY = 1 << 16
"""Programs of one function: torch stops at 8, but all layers share the code of their library."""


def check_compiler(device: torch.device) -> None:
    """Check that this machine has what torch needs to compile. ModelError with a sentence if not."""
    if device.type != "cpu":
        require((find_spec("triton") is not None, "training.compile needs Triton on a GPU; pip install triton"))
        return
    compiler = os.environ.get("CXX", "g++")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    require(
        (
            shutil.which(compiler) is not None,
            f"training.compile needs a C++ compiler, and there is no {compiler}; install g++, or set CXX",
        ),
        (
            header.is_file(),
            f"training.compile needs the headers of Python, and {header} is missing; install python3-dev",
        ),
    )


def compile_layers(stage: Stage, inputs: tuple[Tensor, ...], side: Mapping[str, Tensor]) -> None:
    """Compile the layers of a stage for training and for evaluation; neither weights nor generators change.

    The inputs are one micro-batch, with requires_grad as in training.
    """
    import torch._dynamo
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # processes of a pool would outlive a stage that is killed
    torch._dynamo.config.recompile_limit = _MANY
    torch._dynamo.config.accumulated_recompile_limit = _MANY
    for layer in stage.layers:
        layer.compile(dynamic=False)  # sizes of another layer must not change the program of this one
    trains = stage.training
    gpus = [inputs[0].device] if inputs[0].device.type != "cpu" else []
    with torch.random.fork_rng(devices=gpus), BuffersApart(stage):
        with torch.enable_grad():
            results = [tensor for tensor in as_tuple(stage.train()(*inputs, **side)) if tensor.requires_grad]
            torch.autograd.backward(results, [torch.ones_like(tensor) for tensor in results])
        with torch.no_grad():
            stage.eval()(*(tensor.detach() for tensor in inputs), **side)
    stage.train(trains).zero_grad()
