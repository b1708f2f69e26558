"""Count what a codec asks of a GPU that is not there: kernels, and the bytes that they read and write.

    python docs/measured/gpu_calls.py

Tensors are fake: they have a device and no values, and a look of the host at a value ends the script. So whatever is
counted here is done while nobody waits. A kernel is an operation of PyTorch below autograd that moves bytes; the time
is that of these bytes at the speed of a copy on an H200, or of the launches at 5 microseconds each, if that is more.
"""

import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thinwire.compress import parse, words
from thinwire.compress.codec import NO_KEY
from thinwire.compress.codecs.coding import lengths

FAKES = runpy.run_path(str(Path(__file__).parents[2] / "tests/support/gpus.py"))
SHAPE = (16384, 1024)
CODECS = ('q(4, round="stochastic")', "randk(0.1)", 'q(8, step=0.2, code="plain")', "q(4)")
_COPY_BYTES_PER_SECOND, _LAUNCH = 3.072e12, 5e-6
_FREE = {"empty", "view", "detach", "slice", "select", "unsqueeze", "expand", "as_strided", "alias", "unbind", "split"}
_FREE |= {"_reshape_alias", "reshape", "squeeze", "t", "transpose", "permute", "empty_like", "new_empty", "lift_fresh"}


class Calls(TorchDispatchMode):
    """Counts kernels and bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels, self.bytes = 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count an operation, and do it."""
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, Tensor)]
        on_gpu = [each for each in tensors if each.device.type == "cuda"]
        if on_gpu and func._schema.name.removeprefix("aten::") not in _FREE:
            self.kernels += 1
            self.bytes += sum(each.numel() * each.element_size() for each in on_gpu)
        return result


def counted(work: Callable[[], None]) -> str:
    """What some work asks of the GPU, as cells of a table."""
    with Calls() as calls:
        work()
    time = max(calls.bytes / _COPY_BYTES_PER_SECOND, calls.kernels * _LAUNCH)
    return f"{calls.kernels} | {calls.bytes / 1e6:,.0f} | {1e3 * time:.2f}"


def main() -> None:
    """Print a table."""
    print("| codec | kernels | MB | ms, encode | kernels | MB | ms, decode |\n|---|---|---|---|---|---|---|")
    for expression in CODECS:
        codec = parse(expression).codec
        puts = [patch.object(module, "put", FAKES["fake_put"]) for module in (words, lengths)]
        with FAKES["FakeGpu"](), puts[0], puts[1]:
            x = torch.empty(SHAPE, device=FAKES["GPU"])
            words.tables.cache_clear()
            words.tables(x.device)
            payload = torch.empty(codec.nbytes(SHAPE, x.dtype), dtype=torch.uint8, device=x.device)
            encode = counted(lambda: codec.encode(x, payload, NO_KEY))  # noqa: B023
            decode = counted(lambda: codec.decode(payload, torch.empty_like(x), NO_KEY))  # noqa: B023
        print(f"| `{expression}` | {encode} | {decode} |")


if __name__ == "__main__":
    main()
