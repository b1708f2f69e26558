"""Bits, noise, and GB/s of codecs by the size of a message, both ways, on one thread of a CPU: the best of many turns.

Noise is 10 log10 of signal over noise, in dB; bits are an element's. Both are of the longest message, Gaussian data.

python docs/measured/codec_sizes.py "q(4)" "q(8)" "q(8, step=0.2)"
"""

import math
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.compress import Codec, CodecError, Key, parse

SIZES = [1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20]
ROW = 256
KEY = Key(seed=0, boundary=0, channel="activations", phase="train", step=0, microbatch=0)
TURNS = 600


def best(act: Callable[[], None], calls: int) -> float:
    """The least seconds of a call."""
    found = []
    for _ in range(max(20, TURNS // calls)):
        started = time.perf_counter()
        for _ in range(calls):
            act()
        found.append((time.perf_counter() - started) / calls)
    return min(found)


def cell(codec: Codec, x: Tensor) -> str:
    """The speeds of a codec for a message, encode and decode."""
    payload, out = torch.empty(codec.nbytes(x.shape, x.dtype), dtype=torch.uint8), torch.empty_like(x)
    calls = max(1, min(100, SIZES[-1] // x.numel() // 2))
    encoding = best(lambda: codec.encode(x, payload, KEY), calls)
    decoding = best(lambda: codec.decode(payload, out, KEY), calls)
    return f"{x.nbytes / encoding / 1e9:.2f}, {x.nbytes / decoding / 1e9:.2f}"


def quality(codec: Codec, x: Tensor) -> str:
    """Bits an element as sent, and signal to noise in dB."""
    payload, out = torch.empty(codec.nbytes(x.shape, x.dtype), dtype=torch.uint8), torch.empty_like(x)
    codec.encode(x, payload, KEY)
    codec.decode(payload, out, KEY)
    noise, signal = (float(one.double().square().sum()) for one in (x - out, x))
    decibels = f"{10 * math.log10(signal / noise):.1f}" if noise else "exact"
    return f"{8 * codec.used(payload) / x.numel():.2f} | {decibels}"


def main() -> int:
    """Measure each codec of the command line at each size, and print a table; of feedback the codec inside."""
    torch.set_num_threads(1)
    try:
        codecs = [parse(expression).codec for expression in sys.argv[1:]]
    except CodecError as error:
        print(error, file=sys.stderr)
        return 2
    sizes = " | ".join(f"{size:,}" for size in SIZES)
    print(f"| GB/s, encode and decode | bits | SNR, dB | {sizes} |\n|{'---|' * (len(SIZES) + 3)}")
    for codec in codecs:
        # the longest first: with it the kernels are loaded
        cells = [cell(codec, torch.randn(size // ROW, ROW)) for size in reversed(SIZES)]
        found = quality(codec, torch.randn(SIZES[-1] // ROW, ROW))
        print(f"| `{codec}` | {found} | {' | '.join(reversed(cells))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
