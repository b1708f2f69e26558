"""Runs the kernels of the lane code beside its torch operations, in Triton's interpreter; prints what differs as JSON.

A process of its own: Triton reads TRITON_INTERPRET when it is first imported. Chunks and lanes are short here, because
the interpreter takes a millisecond for a step; one message has those of any run.
"""

import json
import os
import sys
from contextlib import suppress

import torch

from support.codec_helpers import gaussian
from thinwire.compress import CodecError
from thinwire.compress.codecs.coding import integers, lanes
from thinwire.compress.codecs.fused import lanes as kernels
from thinwire.compress.codecs.granularity import blocks_per

SHAPES = int(os.environ.get("THINWIRE_SHAPES", "16"))  # each form in each scale; 200 take a minute


def cases():
    """Integers of many shapes: small, shifted by column, with escapes, and of many low bits."""
    for number in range(SHAPES):
        rows, columns = 1 + number * 7 % 23, 1 + number * 5 % 31
        shape = ((columns,), (rows, columns), (2, rows, columns), (2, 3, 1 + rows % 5, columns))[number % 4]
        x = gaussian(*shape, seed=number) * (0.3, 3.0, 40.0, 900.0)[number // 4 % 4]
        if number % 3 == 0:
            x = x + torch.arange(shape[-1]) % 9 - 4
        x.view(-1)[:: 17 + number % 5] *= -30
        yield shape, x.clamp(-32000, 32000).round().to(torch.int16).view(-1)


def differing(shape, values, *, damages=True):
    columns = blocks_per("channel", shape)
    kernels.cover = lambda x: False
    expected = torch.cat(integers.encode_integers(values, columns))
    kernels.cover = lambda x: True
    coded = torch.cat(integers.encode_integers(values, columns))
    if not torch.equal(coded, expected):
        return f"{shape}: {(coded[: len(expected)] != expected[: len(coded)]).sum()} bytes of {len(expected)}"
    if not torch.equal(integers.decode_integers(expected, columns), values):
        return f"{shape}: decoded otherwise"
    if damages:
        expected[len(expected) * 2 // 3] ^= 77
        with suppress(CodecError):
            integers.decode_integers(expected, columns)
    return None


def main():
    torch.set_num_threads(1)
    if sys.argv[1:] != ["long"]:
        lanes.CHUNK, lanes.SYMBOLS_OF_LANE = 64, 8
    from thinwire.compress.codecs.fused import lane_kernels

    if sys.argv[1:] == ["long"]:
        shape = (66, 1000)
        kernels.cover = lambda x: False
        assert kernels._agree(torch.device("cpu"))
        found = [differing(shape, (gaussian(*shape) * 5).round().to(torch.int16).view(-1), damages=False)]
    else:
        lane_kernels._PART = 16
        found = [differing(shape, values) for shape, values in cases()]
    print(json.dumps({"cases": len(found), "differing": [each for each in found if each]}))


if __name__ == "__main__":
    main()
