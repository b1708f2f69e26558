"""What kernels do for q's option step: step_kernels.py on a CPU, and lane_kernels.py for integers on a GPU.

They give what the torch operations give.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.compress.codecs.coding.integers import decode_integers, encode_integers
from thinwire.compress.codecs.coding.lanes import MOST_LANES, STATE, WORD, chunks_of
from thinwire.compress.codecs.coding.tables import Tables, classes, tables
from thinwire.compress.codecs.fused.trial import is_gpu, work
from thinwire.compress.codecs.granularity import Blocks, blocks_per
from thinwire.compress.codecs.grid import scales_of_steps


def cover(flat: Tensor, blocks: Blocks) -> bool:
    """Whether kernels measure and scale float32 `flat` [n] in blocks that lie side by side."""
    return blocks.outer == 1 and cover_code(flat)


def cover_code(x: Tensor) -> bool:
    """Whether kernels code a tensor: one of a CPU that torch does not trace."""
    on_cpu = type(x) is Tensor and x.device.type == "cpu"
    return on_cpu and not torch.compiler.is_compiling() and work("numba", "the option step", _agree)


def cover_on_gpu(x: Tensor) -> bool:
    """Whether kernels code integers where a tensor is: on a GPU."""
    return type(x) is Tensor and is_gpu(x.device) and work("triton", f"the lane code on {x.device}", _alike, x.device)


def measure(flat: Tensor, count: int, size: int, step: float, last: int) -> tuple[Tensor, Tensor]:
    """The scales, bf16 as int16 [count], and the integers, int16 [n], of float32 `flat`."""
    scales, integers = np.empty(count, np.uint16), np.empty(len(flat), np.int16)
    _kernels().measure(flat.contiguous().numpy(), size, np.float32(step), np.float32(last), scales, integers)
    return torch.from_numpy(scales.view(np.int16)), torch.from_numpy(integers)


def values(integers: Tensor, scales: Tensor, size: int, out: Tensor) -> None:
    """Write integers times the scales of their blocks into float32 `out` [n]."""
    _kernels().values(integers.numpy(), scales.numpy().view(np.uint16), size, out.numpy())


def encode_message(flat: Tensor, size: int, step: float, last: int, columns: Blocks, out: Tensor) -> None:
    """Write the payload of float32 `flat` [n], in blocks of `size`: scales and integers."""
    values, shape = flat.contiguous().numpy(), (columns.outer, columns.count, columns.inner)
    _kernels().encode_message(values, size, np.float32(step), np.float32(last), shape, _for_encoding(), out.numpy())


def decode_message(payload: Tensor, size: int, width: int, columns: Blocks, out: Tensor) -> bool:
    """Write the float32 values [n] of a payload of scales and integers; False if it is none."""
    shape = columns.outer, columns.count, columns.inner
    read: bool = _kernels().decode_message(payload.numpy(), size, width, shape, tables().slot, out.numpy())
    return read


def write_integers(integers: Tensor, columns: Blocks, out: Tensor) -> int:
    """Write the code of integers, int16 [n], and return its length; 0 if there is no room.

    Those of a GPU without kernels are coded on the host: lane by lane, torch operations are thousands of small kernels.
    """
    room = out
    if out.device.type != "cpu":
        integers, room = integers.cpu(), torch.empty(len(out), dtype=torch.uint8)
    if cover_code(integers):
        length = encode(integers, columns, room)
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
    device, coded, integers = coded.device, coded.cpu(), torch.empty(columns.numel, dtype=torch.int16)
    if not (cover_code(coded) and decode(coded, columns, integers)):
        integers = decode_integers(coded, columns)  # says what is wrong
    return integers.to(device)


def encode(integers: Tensor, columns: Blocks, out: Tensor) -> int:
    """Write the code of integers, int16 [n], and return its length; 0 if there is no room."""
    shape = columns.outer, columns.count, columns.inner
    length: int = _kernels().encode(integers.contiguous().numpy(), *shape, *_for_encoding(), out.numpy())
    return max(0, length)


def decode(coded: Tensor, columns: Blocks, integers: Tensor) -> bool:
    """Write the integers that `encode` coded, int16 [n]; False if these bytes are no code."""
    lists = (np.zeros(n, np.int32) for n in (columns.count, columns.count, columns.outer))
    found: bool = _kernels().decode(coded.numpy(), columns.inner, *lists, tables().slot, integers.numpy())
    return found


def encode_symbols(symbols: Tensor, made: Tables) -> Tensor:
    """The lanes of symbols, uint8 [n], by the first of these tables."""
    # a symbol sends a word at most
    size = WORD * len(symbols) + (WORD + STATE * MOST_LANES) * chunks_of(len(symbols))
    room = torch.empty(size, dtype=torch.uint8)
    length = _kernels().encode_symbols(symbols.contiguous().numpy(), made.packed, room.numpy())
    return room[:length]


def decode_symbols(coded: Tensor, made: Tables, symbols: Tensor) -> int:
    """Write the symbols, uint8 [n], that lanes code; return how many bytes these are, or -1 if they are no code."""
    size: int = _kernels().decode_symbols(coded.numpy(), made.slot, symbols.numpy())
    return size


def _kernels() -> Any:
    """The kernels; they and their compiler are imported where they are used."""
    from thinwire.compress.codecs.fused import step_kernels

    return step_kernels


@cache
def _for_encoding() -> tuple[NDArray[np.generic], ...]:
    known, made = classes(), tables()
    return known.mean, known.least, known.slope, known.bounds, known.reach.astype(np.int32), made.packed


def _agree() -> bool:
    """Whether kernels and torch operations code alike, and kernels decode it."""
    x = (torch.linspace(-9, 7, 24 * 16).sin() * torch.linspace(0, 40, 16).repeat(24)).round().to(torch.int16)
    x[5] = 3000
    columns, again = blocks_per("channel", (24, 16)), torch.empty_like(x)
    eager, room = torch.cat(encode_integers(x, columns)), torch.zeros(2 * len(x), dtype=torch.uint8)
    length = encode(x, columns, room)
    known = torch.equal(eager, room[:length]) and decode(eager, columns, again) and torch.equal(x, again)
    return known and torch.equal(decode_integers(eager, columns), x)


def _alike(device: torch.device, rows: int = 350) -> bool:
    """Whether a GPU codes rows of 200 integers, two chunks of all lanes, and measures rows, as torch operations do."""
    from thinwire.compress.codecs.fused import lane_kernels as kernels
    from thinwire.compress.codecs.fused import row_kernels

    x = (torch.linspace(-9, 9, 200 * rows).sin() * torch.linspace(0, 400, 200).repeat(rows)).round().to(torch.int16)
    x[7] = 30000
    columns = blocks_per("channel", (rows, 200))
    expected = torch.cat(encode_integers(x, columns))
    coded, length = kernels.encode(x.to(device), columns, len(expected) + 1)
    found, fine = kernels.decode(coded, 0, length, columns)
    values = x.view(rows, 200) * torch.linspace(0, 3, rows).unsqueeze(1)
    values[1:3], values[3:6, 9] = torch.tensor([[2.0**-130], [2.0**-122]]), torch.tensor([torch.inf, torch.nan, 3e38])
    scales = scales_of_steps(values.unsqueeze(0), 0.2, 127).view(torch.int16).squeeze(1)
    measured = torch.equal(row_kernels.scales(values.to(device), 0.2, 127).cpu(), scales)
    return measured and bool(fine) and torch.equal(coded.cpu()[:length], expected) and torch.equal(found.cpu(), x)
