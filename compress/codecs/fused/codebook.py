"""A codebook by codebook_kernels.py on a CPU, by row_kernels.py on a GPU, else by the operations of entries.py."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from thinwire.compress import entries as eager
from thinwire.compress.codecs.fused.trial import is_gpu, work
from thinwire.compress.entries import EXTRA


def cover(*tensors: Tensor) -> bool:
    """Whether kernels work on these: contiguous tensors of a CPU that torch does not trace."""
    plain = all(type(each) is Tensor and each.device.type == "cpu" and each.is_contiguous() for each in tensors)
    return plain and not torch.compiler.is_compiling() and work("numba", "the codebook", _agree)


def cover_on_gpu(*tensors: Tensor) -> bool:
    """Whether kernels predict where these are: contiguous tensors on one GPU."""
    device = tensors[0].device
    plain = all(type(each) is Tensor and each.device == device and each.is_contiguous() for each in tensors)
    return plain and is_gpu(device) and work("triton", f"the codebook on {device}", _alike, device)


def unpredicted(rows: Tensor, scales: Tensor, table: Tensor, last: int, entries: Tensor) -> tuple[Tensor, Tensor]:
    """entries.unpredicted; the entries may be changed in place."""
    if cover_on_gpu(rows, scales, table, entries):
        from thinwire.compress.codecs.fused import row_kernels

        return entries, row_kernels.unpredicted(rows, scales, table, last, entries)
    if not cover(rows, scales, table, entries):
        return eager.unpredicted(rows, scales, table, last, entries)
    from thinwire.compress.codecs.fused import codebook_kernels

    integers = np.empty(rows.numel(), np.int16)
    arrays = (each.numpy() for each in (rows.view(-1), scales, table))
    codebook_kernels.unpredicted(*arrays, np.float32(last), entries.numpy(), integers)
    return entries, torch.from_numpy(integers)


def values(integers: Tensor, scales: Tensor, table: Tensor, entries: Tensor, out: Tensor) -> None:
    """Write integers, with what entries predict, times the scales of their rows into float32 `out` [n]."""
    given = integers, scales, table, entries
    if cover_on_gpu(*given, out):
        from thinwire.compress.codecs.fused import row_kernels

        row_kernels.values(*given, out)
    elif cover(*given, out):
        from thinwire.compress.codecs.fused import codebook_kernels

        codebook_kernels.values(*(each.numpy() for each in (*given, out)))
    else:
        out.copy_(eager.values(*given))


def learn(table: Tensor, entries: Tensor, integers: Tensor) -> None:
    """Update a table by a message."""
    if not cover(table, entries, integers):
        eager.update(table, entries, integers)
        return
    from thinwire.compress.codecs.fused import codebook_kernels

    codebook_kernels.learn(table.numpy(), entries.numpy(), integers.numpy())


def _agree() -> bool:
    """Whether kernels and torch operations learn alike."""
    from thinwire.compress.codecs.fused import codebook_kernels

    width = 24
    tables = [torch.zeros(7, width + EXTRA, dtype=torch.float32) for _ in range(2)]
    for message in range(4):
        integers = (torch.linspace(-9, 7, 12 * width).sin() * (20 - message)).round().to(torch.int16).view(12, width)
        entries = torch.arange(12) * message % 7
        eager.update(tables[0], entries, integers)
        codebook_kernels.learn(tables[1].numpy(), entries.numpy(), integers.numpy())
    return torch.equal(*tables)


def _alike(device: torch.device) -> bool:
    """Whether a GPU predicts rows as torch operations do on the host, also such as are too far from their entry."""
    from thinwire.compress.codecs.fused import row_kernels

    many, width, evenly = 20, 1040, partial(torch.linspace, dtype=torch.float32)
    table = (evenly(-8, 8, 5 * (width + EXTRA)).sin() * 900).round().view(5, -1)
    rows = evenly(-99, 99, many * width).cos().view(many, width) * evenly(0, 9, many).unsqueeze(1)
    scales = evenly(0.01, 0.2, many).bfloat16().view(torch.int16)
    scales[3:5] = torch.tensor([0, 0x7F80])
    table[0], entries = 0, torch.arange(many) % 5
    wanted, integers = eager.unpredicted(rows, scales, table, 127, entries)
    rows, scales, table, entries = (each.to(device) for each in (rows, scales, table, entries))
    found, values = row_kernels.unpredicted(rows, scales, table, 127, entries), torch.empty_like(rows).view(-1)
    row_kernels.values(found, scales, table, entries, values)
    expected = eager.values(*(each.cpu() for each in (found, scales, table, entries)))
    alike = torch.equal(entries.cpu(), wanted) and torch.equal(found.cpu(), integers)
    return alike and torch.equal(values.cpu().nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
