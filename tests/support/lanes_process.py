"""Runs q's option step as a GPU does, in Triton's interpreter, beside a CPU; prints what differs as JSON.

A process of its own: Triton reads TRITON_INTERPRET when it is first imported. Chunks and lanes are short here, because
the interpreter takes a millisecond for a step; where more cases are asked for, one message has those of any run.
"""

import json
import os
from itertools import cycle

import torch

from support.codec_helpers import KEY, encode, gaussian
from thinwire.compress import CodecError, parse
from thinwire.compress.codecs.coding import lanes
from thinwire.compress.codecs.coding.scales import choose
from thinwire.compress.codecs.fused import codebook, steps
from thinwire.compress.codecs.granularity import blocks_per

SHORT = 8  # each expression, each form, wide rows
CASES = int(os.environ.get("THINWIRE_SHAPES", SHORT))  # 200 take some minutes
EXPRESSIONS = ("q(8, step=0.2)", 'q(16, step=0.001, per="tensor")', "q(16, step=0.01)", "q(8, step=0.5, codebook=2)")
EXPRESSIONS += ('q(8, step=1.0, per="channel")', "q(8, step=0.001)", "q(8, step=0.3, group=5)")


def cases():
    """Tensors of many shapes: small, shifted by column, with wide rows, with escapes, and of many low bits."""
    for number, expression in zip(range(CASES), cycle(EXPRESSIONS)):
        rows, columns = 1 + number * 7 % 13, 1 + number * 5 % 19
        shape = ((columns,), (rows, columns), (2, rows, columns), (2, 3, 1 + rows % 5, columns))[number // 2 % 4]
        if number % 8 == 5:
            shape = 64 + number % 5, 2 + columns % 5
        x = gaussian(*shape, seed=number)
        if number % 3 == 0:
            x = x + 3 * (torch.arange(shape[-1]) % 9 - 4)
        x.view(-1)[:: 17 + number % 5] *= -30
        x[0] *= 900 if number % 8 == 5 else 1
        yield expression, x


def as_on_a_gpu(work, *args):
    covers = steps.cover_on_gpu, steps.cover
    steps.cover_on_gpu, steps.cover = (lambda _: True), (lambda *_: False)
    try:
        return work(*args)
    finally:
        steps.cover_on_gpu, steps.cover = covers


def decoded(codec, payload, like):
    """The values; of a payload that is none NaN, which a CPU says in words."""
    out = torch.empty_like(like)
    try:
        codec.decode(payload, out, KEY)
    except CodecError:
        out.fill_(torch.nan)
    return out


def differing(expression, x, *, damages=1):
    codec = parse(expression)
    expected, chance = encode(codec, x), torch.Generator().manual_seed(len(x))
    used, coded, what = codec.used(expected), as_on_a_gpu(encode, codec, x), f"{expression} of {tuple(x.shape)}"
    if not torch.equal(coded, expected):
        return f"{what}: {(coded != expected).sum()} bytes of {len(expected)}"
    for damage in range(damages + 1):
        if damage:
            place = int(torch.randint(0, used, (1,), generator=chance))
            expected[place] ^= int(torch.randint(1, 256, (1,), generator=chance))
        wanted, found = decoded(codec, expected, x), as_on_a_gpu(decoded, codec, expected, x)
        if not torch.equal(wanted.nan_to_num(nan=12345.0), found.nan_to_num(nan=12345.0)):
            return f"{what}: decoded otherwise after {damage} damages"
    return None


def choosing(*shape, shift):
    """A column of 2**14 integers and more needs 64 bits where its mean is rounded."""
    from thinwire.compress.codecs.fused import lane_kernels

    columns, values = blocks_per("channel", shape), (9 * gaussian(*shape) - shift).round().view(-1).to(torch.int16)
    wanted, found = choose(columns.view(values.int())), lane_kernels._choose(values, columns)
    same = (torch.equal(getattr(wanted, name), getattr(found, name)) for name in ("means", "columns", "rows"))
    return None if all(same) else f"other scales of {shape}"


def main():
    torch.set_num_threads(1)
    found = [differing("q(8, step=0.2)", gaussian(66, 1000), damages=0)] if CASES > SHORT else []
    found += [choosing(2, 3, 100, 101, shift=80), choosing(5000, shift=0)]
    from thinwire.compress.codecs.fused import lane_kernels

    steps.cover, steps.cover_code = (lambda *_: False), (lambda _: False)  # Numba keeps the lengths of chunks
    lanes.CHUNK, lanes.SYMBOLS_OF_LANE = 64, 8
    lane_kernels.CHUNK, lane_kernels._PART, lane_kernels._ROWS = 64, 32, 4
    found += [differing(*case) for case in cases()]
    alike = steps._alike(torch.device("cpu"), 7) and codebook._alike(torch.device("cpu"))
    print(json.dumps({"alike": alike, "differing": [each for each in found if each]}))


if __name__ == "__main__":
    main()
