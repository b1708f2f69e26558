"""Speed of codecs on a CUDA GPU, beside a copy of the same tensor on the GPU: medians of CUDA events, as a page.

    make bench-gpu
    python docs/measured/codecs_gpu.py 16777216 'q(4)' 'topk(0.1)'

A copy reads and writes each byte of the tensor, so its bytes a second count both ways. A codec counts the same bytes:
its share is the copy's time divided by its own. It reads the tensor and writes a fraction, so 1 is not the limit.
"""

import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

from thinwire.compress import Key, parse

CODECS = (
    'q(2, grid="midrise")', "q(4)", "q(8)", "q(8, step=0.2)", 'q(4, round="stochastic")', "fp8", "bf16", "topk(0.1)",
    "randk(0.1)",
)  # fmt: skip
ELEMENTS = 16 << 20
COLUMNS = 1024
WARM_UP, REPETITIONS = 5, 30
KEY = Key(seed=0, boundary=0, channel="activations", phase="train", step=0, microbatch=0)


def main(arguments: Sequence[str]) -> int:
    """Print the page; 0 also where there is no GPU, with the reason."""
    if not torch.cuda.is_available():
        print("not measured: this needs a CUDA device, and torch finds none here")
        return 0
    elements = int(arguments[0]) if arguments else ELEMENTS
    x = torch.randn(elements // COLUMNS, COLUMNS, device="cuda")
    target = torch.empty_like(x)
    moved = 2 * x.numel() * x.element_size()
    copy = seconds(lambda: target.copy_(x))
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}, {platform.platform()}"
    )
    print(f"float32 [{elements // COLUMNS}, {COLUMNS}], medians of {REPETITIONS} runs after {WARM_UP}")
    print(f"a copy on the GPU: {copy * 1e3:.3f} ms, {moved / copy / 1e9:.0f} GB/s counted both ways\n")
    print("| codec | encode, ms | decode, ms | encode, of the copy | decode, of the copy |\n|---|---|---|---|---|")
    for expression in arguments[1:] or CODECS:
        codec = parse(expression).codec
        payload = torch.empty(codec.nbytes(x.shape, x.dtype), dtype=torch.uint8, device="cuda")
        encode = seconds(partial(codec.encode, x, payload, KEY))
        decode = seconds(partial(codec.decode, payload, target, KEY))
        times = f"{encode * 1e3:.3f} | {decode * 1e3:.3f} | {copy / encode:.2f} | {copy / decode:.2f}"
        print(f"| `{expression}` | {times} |", flush=True)
    return 0


def seconds(act: Callable[[], object]) -> float:
    """Median seconds of an act on the GPU."""
    for _ in range(WARM_UP):
        act()
    spent = []
    for _ in range(REPETITIONS):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        act()
        ended.record()
        ended.synchronize()
        spent.append(begun.elapsed_time(ended) / 1e3)
    return statistics.median(spent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
