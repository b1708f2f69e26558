"""Frozen weights in 4 bits beside LoRA: NF4 of QLoRA, by the library bitsandbytes."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.models.errors import require
from thinwire.models.layers import Layer, replace_module
from thinwire.models.lora import is_linear

_BLOCK = 64
"""Weights with one scale, a number of float32: 4.5 bits a weight."""


def require_bitsandbytes() -> None:
    """Raise ModelError, with what to install, where bitsandbytes is missing."""
    lacks = find_spec("bitsandbytes") is None
    require(
        (not lacks, "model.dtype nf4 needs the library bitsandbytes, which is not installed: pip install bitsandbytes")
    )


def linears(layer: Layer) -> list[nn.Linear]:
    """The linear modules of a layer whose weights do not train."""
    modules = layer.full_modules().values()
    linear = [each for each in modules if isinstance(each, nn.Linear) and is_linear(each)]
    return [each for each in linear if not each.weight.requires_grad]


def to_four_bits(blocks: range, index: int, layer: Layer) -> None:
    """Replace the linear modules of a layer that do not train by such with weights of 4 bits, if it is a block."""
    if index not in blocks:
        return
    for linear in linears(layer):
        replace_module(layer, linear, FourBits(linear))


class FourBits(nn.Module):
    """A frozen linear module. Its weight is uint8 [numbers / 2, 1]; it computes in the type of its inputs."""

    def __init__(self, linear: nn.Linear) -> None:
        """On the meta device only the bytes are as those of a weight with values."""
        super().__init__()
        weight = linear.weight.detach()
        packed, state = torch.empty(weight.numel() // 2, 1, dtype=torch.uint8, device="meta"), None
        if not weight.is_meta:
            bits: Any = import_module("bitsandbytes")
            packed, state = bits.functional.quantize_4bit(weight, blocksize=_BLOCK, quant_type="nf4")
        self.weight, self.bias = nn.Parameter(packed, requires_grad=False), linear.bias
        self.given = {"shape": weight.shape, "dtype": weight.dtype, "blocksize": _BLOCK, "quant_type": "nf4"}
        for name in ("absmax", "code"):
            self.register_buffer(name, None if state is None else getattr(state, name), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The linear module's output."""
        bits: Any = import_module("bitsandbytes")
        given: dict[str, Any] = {**self.given, "absmax": self.absmax, "code": self.code}
        bias = None if self.bias is None else self.bias.to(x.dtype)
        found: Tensor = bits.matmul_4bit(x, self.weight.t(), quant_state=bits.functional.QuantState(**given), bias=bias)
        return found
