"""What kernels do for the lane code on a GPU: lane_kernels.py, which give the bytes of the torch operations."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from thinwire.compress.codec import CodecError, tensor_bytes
from thinwire.compress.codecs.coding import lanes
from thinwire.compress.codecs.coding.tables import tables
from thinwire.compress.codecs.fused.trial import is_gpu, work
from thinwire.compress.transfer import put


def cover(x: Tensor) -> bool:
    """Whether kernels code a tensor: one of a GPU."""
    return type(x) is Tensor and is_gpu(x.device) and work("triton", f"the lane code on {x.device}", _agree, x.device)


def encode_lanes(table: Tensor, symbols: Tensor) -> list[Tensor]:
    """As coding/lanes.py has it, by kernels where there are some."""
    if not cover(symbols):
        return lanes.encode_lanes(table, symbols)
    return [tensor_bytes(part) for part in encode(table, symbols, lanes.lanes_of(len(symbols)))]


def decode_lanes(table: Tensor, coded: Tensor) -> tuple[Tensor, Tensor]:
    """As coding/lanes.py has it, by kernels where there are some."""
    if not cover(coded):
        return lanes.decode_lanes(table, coded)
    counts, states, words, rest = lanes.split(coded, len(table))
    symbols, fine = decode(table, counts, states, words)
    if not fine:
        raise CodecError(lanes.DAMAGED)
    return symbols, rest


def encode(table: Tensor, symbols: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The counts, the states and the words, int16 and int32, of symbols, uint8 [n], in so many lanes."""
    from thinwire.compress.codecs.fused import lane_kernels

    with _on(symbols.device):
        room, counts, states = lane_kernels.encode(table, symbols, _packed(symbols.device), count)
        ends = counts.cumsum(0)
        return counts.to(torch.int16), states, lane_kernels.gather(room, counts, ends, int(ends[-1]))


def decode(table: Tensor, counts: Tensor, states: Tensor, words: Tensor) -> tuple[Tensor, bool]:
    """The symbols, uint8 [n], and whether states and words end as they must; all but the table is int64."""
    from thinwire.compress.codecs.fused import lane_kernels

    given = (each.to(torch.int32) for each in (counts, counts.cumsum(0), states, words))
    with _on(table.device):
        found = lane_kernels.decode(table, _slots(table.device), *given)
    return found[: len(table)], bool(found[len(table) :].all())


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Where Triton launches kernels; tests have its interpreter, on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def _packed(device: torch.device) -> Tensor:
    return put(torch.from_numpy(tables().packed.astype("int32")), device)


@cache
def _slots(device: torch.device) -> Tensor:
    return put(torch.from_numpy(tables().slot.astype("int32").reshape(-1)), device)


def _agree(device: torch.device) -> bool:
    """Whether kernels code a short message as the torch operations do on the host."""
    symbols = (torch.linspace(-9, 9, 5000).sin() * 6 + 128).round().to(torch.uint8)
    table = (torch.arange(5000) % 16 + 20).to(torch.uint8)  # all of these have the symbols
    expected = torch.cat(lanes.encode_lanes(table, symbols))
    coded = encode(table.to(device), symbols.to(device), lanes.lanes_of(len(symbols)))
    again = torch.cat([part.cpu().view(torch.uint8).view(-1) for part in coded])
    found, fine = decode(table.to(device), *(each.to(device) for each in lanes.split(expected, len(symbols))[:3]))
    same = torch.equal(lanes.decode_lanes(table, expected)[0], found.cpu())
    return torch.equal(expected, again) and fine and same
