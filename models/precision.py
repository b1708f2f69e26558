"""The arithmetic of a stage: float32, or products in bfloat16 by autocast while the weights stay float32."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

Precision = Literal["fp32", "bf16"]
NARROW: Mapping[Precision, torch.dtype] = MappingProxyType({"bf16": torch.bfloat16})
"""The type of the products, where it is not float32."""


def arithmetic(precision: Precision, device_type: str) -> AbstractContextManager[Any]:
    """A context in which modules compute in this precision."""
    return nullcontext() if precision == "fp32" else torch.autocast(device_type, dtype=NARROW[precision])


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Inside, torch computes with so many threads of the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def narrowed(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The inputs or outputs of a stage, in this dtype where they are float32."""
    return tuple(tensor.to(dtype) if tensor.dtype == torch.float32 else tensor for tensor in tensors)


def arithmetic_note(precision: Precision, narrow_weights: bool, device_type: str) -> str | None:
    """A sentence on arithmetic that is not what its name says; None if there is nothing to say.

    On a GPU fp32 may mean TF32, which has 10 bits of digits; a CPU without instructions for 16 bits emulates them.
    """
    if device_type == "cpu":
        narrow = narrow_weights or precision == "bf16"
        if not narrow or not torch.backends.mkldnn.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return None
        return (
            "this CPU has no instructions for bf16, so torch emulates it, which can make a step ten times slower; "
            "--training.precision fp32 --model.dtype fp32 is faster here"
        )
    if precision != "fp32" or device_type != "cuda":
        return None
    rounds = {
        "matrix products": torch.get_float32_matmul_precision() != "highest",
        "convolutions": torch.backends.cudnn.allow_tf32,
    }
    said = [f"{what} {'round to TF32' if rounded else 'keep all digits'}" for what, rounded in rounds.items()]
    return f"fp32 on a GPU: {', '.join(said)}"
