"""The code of integers (coding/integers.py), by kernels where there are some."""

import torch
from torch import Tensor

from thinwire.compress.codecs.coding.integers import decode_integers, encode_integers
from thinwire.compress.codecs.fused import lanes
from thinwire.compress.codecs.fused import steps as kernels
from thinwire.compress.codecs.granularity import Blocks


def write_integers(integers: Tensor, columns: Blocks, out: Tensor) -> int:
    """Write the code of integers, int16 [n], and return its length; 0 if there is no room.

    On a GPU without kernels it is made on the host: lane by lane, torch operations are thousands of small kernels.
    """
    room = out
    if not (out.device.type == "cpu" or lanes.cover(integers)):
        integers, room = integers.cpu(), torch.empty(len(out), dtype=torch.uint8)
    if kernels.cover_code(integers):
        length = kernels.encode(integers, columns, room)
    else:
        parts = encode_integers(integers, columns)
        length = sum(map(len, parts))
        if length > len(room):
            return 0
        torch.cat(parts, out=room[:length])
    if room is not out:
        out[:length] = room[:length]
    return length


def read_integers(coded: Tensor, columns: Blocks) -> Tensor:
    """The integers, int16 [n], that `write_integers` wrote; CodecError if these bytes are no code."""
    device, integers = coded.device, torch.empty(columns.numel, dtype=torch.int16)
    if not lanes.cover(coded):
        coded = coded.cpu()
    if not (kernels.cover_code(coded) and kernels.decode(coded, columns, integers)):
        integers = decode_integers(coded, columns)  # says what is wrong
    return integers.to(device)
