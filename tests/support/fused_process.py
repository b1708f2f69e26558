"""Runs the fused kernels beside the eager code in Triton's interpreter, and prints the cases that differ as JSON.

A process of its own: Triton reads TRITON_INTERPRET when it is first imported.
"""

import json
import warnings

import torch

from support.fused_cases import CASES, SELECTED, differing, names_of, selected, tensor_of
from thinwire.compress import parse
from thinwire.compress.codecs.fused.largest import covers as covers_rows
from thinwire.compress.codecs.fused.largest import marks_by_kernel
from thinwire.compress.codecs.fused.quantizer import covers, decode_fused, encode_fused


def fused(codec, x):
    grid, blocks = codec._grid, codec._blocks(x.shape)
    assert covers(grid, blocks, x.dtype)
    backing = torch.full((codec.nbytes(x.shape, x.dtype) + 8,), 0xA5, dtype=torch.uint8)
    payload = backing[3:-5]
    encode_fused(grid, blocks, x, payload)
    assert (backing[:3] == 0xA5).all() and (backing[-5:] == 0xA5).all(), "wrote outside the payload"
    return payload, lambda sent, out: decode_fused(grid, blocks, sent, out)


def marked(integers, mask, k):
    assert covers_rows(integers.dtype, mask, integers.shape[1])
    return marks_by_kernel(integers, mask, k).view(-1).nonzero().view(len(integers), k)


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of infinity minus infinity
    cases = [(expression, dtype, name) for expression, dtype in CASES for name in names_of(expression)]
    found = []
    for expression, dtype, name in cases:
        wrong = differing(parse(expression), tensor_of(name, dtype), fused)
        found += [f"{expression} {dtype} {name}: {wrong}"] if wrong else []
    two = (torch.float32, torch.bfloat16)  # the kernel is given integers of 32 or 16 bits
    chosen = [wrong for name in SELECTED if (wrong := selected(name, marked, two))]
    print(json.dumps({"cases": len(cases), "differing": found, "chosen otherwise": chosen}))


if __name__ == "__main__":
    main()
