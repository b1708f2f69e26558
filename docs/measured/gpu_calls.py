"""Count what a codec asks of a GPU that is not there: kernels, and the bytes that they read and write.

    python docs/measured/gpu_calls.py

Tensors are fake: they have a device and no values, and a look of the host at a value ends the script. So whatever is
counted here is done while nobody waits. A kernel is an operation of PyTorch below autograd that moves bytes; the time
is that of these bytes at the speed of a copy on an H200, or of the launches at 5 microseconds each, if that is more.
The search in a codebook is a product of matrices besides, of 17 GFLOP.

Kernels of Triton count too, as such that read and write all of each of their tensors. Those of the lane code do 2,048
steps each way, whatever the size of a message. Compiled for an H200 a step has 183 instructions to encode and 159 to
decode, and two to three loads that wait for each other: the estimate has 900 cycles for each, at 1.75 GHz.
"""

import runpy
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thinwire.compress import parse, words
from thinwire.compress.codebook import Codebook
from thinwire.compress.codec import NO_KEY
from thinwire.compress.codecs.coding import lengths, scales
from thinwire.compress.codecs.fused import codebook, lane_kernels, row_kernels, steps
from thinwire.compress.entries import EXTRA

FAKES = runpy.run_path(str(Path(__file__).parents[2] / "tests/support/gpus.py"))
SHAPE = (16384, 1024)
CODECS = (
    'q(4, round="stochastic")',
    "randk(0.1)",
    "topk(0.1)",
    'q(4, scale="minmax")',
    'q(8, step=0.2, code="plain")',
    "q(4)",
    "q(8, step=0.2)",
    "q(8, step=0.2, codebook=4096)",
)
_COPY_BYTES_PER_SECOND, _LAUNCH = 3.072e12, 5e-6
_STEPS, _CYCLES, _HERTZ = 2048, 900, 1.75e9
_FREE = {"empty", "view", "detach", "slice", "select", "unsqueeze", "expand", "as_strided", "alias", "unbind", "split"}
_FREE |= {"_reshape_alias", "reshape", "squeeze", "t", "transpose", "permute", "empty_like", "new_empty", "lift_fresh"}
_FREE |= {"prim::device", "split_with_sizes"}


class Calls(TorchDispatchMode):
    """Counts kernels and bytes on a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels, self.bytes = 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count an operation, and do it."""
        result = func(*args, **(kwargs or {}))
        if func._schema.name.removeprefix("aten::") not in _FREE:
            self.add(tree_leaves((args, kwargs, result)))
        return result

    def add(self, given: Iterable[Any]) -> None:
        """Count a kernel that takes and gives these, if any is a tensor on a GPU."""
        on_gpu = [each for each in given if isinstance(each, Tensor) and each.device.type == "cuda"]
        self.kernels += bool(on_gpu)
        self.bytes += sum(each.numel() * each.element_size() for each in on_gpu)


def counted(work: Callable[[], None], *, steps: int) -> str:
    """What some work asks of the GPU, as cells of a table."""
    with Calls() as calls, ExitStack() as patches:
        for module in (lane_kernels, row_kernels):
            for name in FAKES["launches_of"](module):
                patches.enter_context(patch.object(module, name, FAKES["Launches"](calls.add)))
        work()
    time = max(calls.bytes / _COPY_BYTES_PER_SECOND, calls.kernels * _LAUNCH) + steps * _CYCLES / _HERTZ
    return f"{calls.kernels} | {calls.bytes / 1e6:,.0f} | {1e3 * time:.2f}"


def main() -> None:
    """Print a table."""
    print("| codec | kernels | MB | ms, encode | kernels | MB | ms, decode |\n|---|---|---|---|---|---|---|")
    for expression in CODECS:
        codec = parse(expression).codec
        lane_steps = _STEPS if codec.varies else 0
        with ExitStack() as fakes:
            for module in (words, lengths, scales, lane_kernels):
                fakes.enter_context(patch.object(module, "put", FAKES["fake_put"]))
            fakes.enter_context(patch.object(steps, "cover_on_gpu", lambda _: True))
            fakes.enter_context(patch.object(codebook, "cover_on_gpu", lambda *_: True))
            for module in (lane_kernels, row_kernels):
                fakes.enter_context(patch.object(module, "on", lambda _: nullcontext()))
            fakes.enter_context(FAKES["FakeGpu"]())
            x = torch.empty(SHAPE, device=FAKES["GPU"])
            words.tables.cache_clear()
            lane_kernels._known.cache_clear()
            scales.known.cache_clear()
            scales.known(x.device)
            lane_kernels._known(x.device)
            words.tables(x.device)
            table = torch.empty(getattr(codec, "entries", 0), SHAPE[1] + EXTRA, device=x.device)
            book = Codebook(SHAPE[1], lambda: table, lambda: None)  # noqa: B023
            codec = codec.predicting(book) if len(table) else codec
            payload = torch.empty(codec.nbytes(SHAPE, x.dtype), dtype=torch.uint8, device=x.device)
            encode = counted(lambda: codec.encode(x, payload, NO_KEY), steps=lane_steps)  # noqa: B023
            decode = counted(lambda: codec.decode(payload, torch.empty_like(x), NO_KEY), steps=lane_steps)  # noqa: B023
            learn = counted(book.learn, steps=0)
        print(f"| `{expression}` | {encode} | {decode} |")
    print(f"What either end learns from the last one takes {learn} more.")


if __name__ == "__main__":
    main()
