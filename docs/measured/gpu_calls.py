"""Count what a codec asks of a GPU that is not there: kernels, and the bytes that they read and write.

    python docs/measured/gpu_calls.py

Tensors are fake: they have a device and no values, and a look of the host at a value ends the script. So whatever is
counted here is done while nobody waits. A kernel is an operation of PyTorch below autograd that moves bytes; the time
is that of these bytes at the speed of a copy on an H200, or of the launches at 5 microseconds each, if that is more.

The default waits for its length, so it is counted on a CPU by a sixteenth of the tensor, with every wait. There the
kernels of the lane code only take and give tensors; on a GPU one does 2,048 steps, whatever the size of a message, for
which the estimate has 400 cycles each at 1.75 GHz.
"""

import runpy
from collections.abc import Callable, Sequence
from functools import partial
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
from thinwire.compress.codecs.coding.lanes import CHUNK
from thinwire.compress.codecs.coding.scales import Scales
from thinwire.compress.codecs.coding.tables import ZERO
from thinwire.compress.codecs.fused import lanes, steps

FAKES = runpy.run_path(str(Path(__file__).parents[2] / "tests/support/gpus.py"))
SHAPE = (16384, 1024)
CODECS = (
    'q(4, round="stochastic")',
    "randk(0.1)",
    "topk(0.1)",
    'q(4, scale="minmax")',
    'q(8, step=0.2, code="plain")',
    "q(4)",
)
_COPY_BYTES_PER_SECOND, _LAUNCH, _SHARE = 3.072e12, 5e-6, 16
_STEPS, _CYCLES, _HERTZ = 2048, 400, 1.75e9
_FREE = {"empty", "view", "detach", "slice", "select", "unsqueeze", "expand", "as_strided", "alias", "unbind", "split"}
_FREE |= {"_reshape_alias", "reshape", "squeeze", "t", "transpose", "permute", "empty_like", "new_empty", "lift_fresh"}
_FREE |= {"prim::device", "split_with_sizes"}


class Calls(TorchDispatchMode):
    """Counts kernels, bytes, and looks of the host at a value, on devices of one type."""

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.kernels, self.bytes, self.waits = device, 0, 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count an operation, and do it."""
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, Tensor)]
        on_gpu = [each for each in tensors if each.device.type == self.device]
        name = func._schema.name.removeprefix("aten::")
        places = [each for each in tree_leaves(args[1:2]) if isinstance(each, Tensor)]
        marks = name in ("index", "index_put_", "index_put") and any(each.dtype == torch.bool for each in places)
        self.waits += marks or name in ("_local_scalar_dense", "nonzero", "masked_select")
        if on_gpu and name not in _FREE and name != "_local_scalar_dense":
            self.kernels += 1
            self.bytes += sum(each.numel() * each.element_size() for each in on_gpu)
        return result


def counted(work: Callable[[], None]) -> str:
    """What some work asks of the GPU, as cells of a table."""
    with Calls() as calls:
        work()
    time = max(calls.bytes / _COPY_BYTES_PER_SECOND, calls.kernels * _LAUNCH)
    return f"{calls.kernels} | {calls.bytes / 1e6:,.0f} | {1e3 * time:.2f}"


def coded() -> str:
    """The same of the default, whose symbols the kernels of the lane code take and give; and the waits."""
    shape, codec, cells = (SHAPE[0] // _SHARE, SHAPE[1]), parse("q(8, step=0.2)").codec, []
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).clamp_(-3, 3)
    payload, out = torch.empty(codec.nbytes(shape, x.dtype), dtype=torch.uint8), torch.empty_like(x)
    codec.encode(x, payload, NO_KEY)
    codec.decode(payload, out, NO_KEY)
    lanes.cover, steps.cover, steps.cover_code = (lambda *_: True), (lambda *_: False), (lambda *_: False)
    n, length, given = x.numel(), codec.used(payload), payload.clone()
    words = torch.empty(length // 2, dtype=torch.int16)

    def encoded(table: Tensor, symbols: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        chunks = -(-n // CHUNK)
        return torch.zeros(chunks, dtype=torch.int16), torch.zeros(chunks * count, dtype=torch.int32), words

    def listing(tensor: Tensor) -> Any:
        looks.append(tensor)
        return listed(tensor)

    def read(*given: Any) -> Any:
        waits, seen = calls.waits, len(looks)
        result = reads(*given)
        calls.waits, looks[:] = waits + 1, looks[:seen]  # after one look it works on the host
        return result

    lanes.encode, lanes.decode = encoded, lambda table, *_: (torch.full((n,), ZERO, dtype=torch.uint8), True)
    listed, reads, looks = Tensor.tolist, Scales.read, list[Tensor]()
    encode, decode = partial(codec.encode, x, payload, NO_KEY), partial(codec.decode, given, out, NO_KEY)
    for work in (encode, decode):
        looks.clear()
        with Calls("cpu") as calls, patch.object(Tensor, "tolist", listing), patch.object(Scales, "read", read):
            work()
        calls.bytes = _SHARE * (calls.bytes + 2 * n + 4 * length)
        seconds = max(calls.bytes / _COPY_BYTES_PER_SECOND, calls.kernels * _LAUNCH) + _STEPS * _CYCLES / _HERTZ
        waits = calls.waits + len(looks) + 1  # for the words of all chunks, or for whether they end as they must
        cells.append(f"{calls.kernels + 4} | {calls.bytes / 1e6:,.0f} | {1e3 * seconds:.2f} | {waits}")
    return " | ".join(cells)


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
    print(f"| `q(8, step=0.2)` (and waits) | {coded()} |")


if __name__ == "__main__":
    main()
