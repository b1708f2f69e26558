"""What kernels do on a CPU: cpu_kernels.py, if Numba is installed.

They encode and decode parts of tensors, search for scales, rotate rows, and advance an error while they encode.

The eager code is what the kernels must equal, and does everything else: short parts, short blocks, blocks that lie
apart, noise, more than a few threads, and whatever torch traces or compiles.
"""

from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.compress.codec import Key
from thinwire.compress.codecs.clip import Gaussian, Passes, sample_step, slopes
from thinwire.compress.codecs.coding.bits import packed_size
from thinwire.compress.codecs.fused.arithmetic import CodeRule, nonzero
from thinwire.compress.codecs.fused.trial import work
from thinwire.compress.codecs.granularity import Blocks
from thinwire.compress.codecs.grid import Grid
from thinwire.compress.codecs.quantizer import GridQuantizer

LEAST_ELEMENTS = 1 << 18
"""A process whose tensors are all shorter never loads the kernels: that takes a second, and below this they save less
than 1 ms a message."""
_LEAST_BLOCK = 16
_MOST_THREADS = 2
"""The kernels use one thread; with more than this, torch's are as fast together."""


Pieces = Iterable[tuple[slice, Tensor]]
"""The columns of each piece of a row, and its signs over sqrt(m)."""


def covers(grid: Grid, values: Tensor) -> bool:
    """Whether kernels encode and decode `values` [outer, count, inner]."""
    return takes(values) and _known(grid) and work("numba", "the CPU", _agree, grid)


def takes(values: Tensor) -> bool:
    """Whether `values` [outer, count, inner] are for kernels: float32 on a CPU, not traced."""
    return (
        type(values) is Tensor
        and values.dtype == torch.float32
        and values.numel() >= LEAST_ELEMENTS
        and values.device.type == "cpu"
        and values.shape[0] == 1
        and values.shape[2] >= _LEAST_BLOCK
        and not torch.compiler.is_compiling()
        and torch.get_num_threads() <= _MOST_THREADS
        and values.is_contiguous()
    )


def encode(grid: Grid, values: Tensor, scales: Tensor | None, out: Tensor) -> Tensor:
    """Write the packed codes of `values`, and return their scales, which are measured if not given."""
    from thinwire.compress.codecs.fused import cpu_kernels

    if scales is None and grid.share is None:
        scales = grid.measure_by(KernelPasses(), values)
    count, first, second = values.shape[1], 1.0, 0.0
    if scales is None:
        rule = CodeRule.RANGE if grid.scale_dtype == torch.float32 else CodeRule.FLOOR
        measured, divisors, shifts = torch.zeros(3, count, dtype=torch.float32)
    else:
        coding = grid.coding(scales)
        assert coding is not None, "covers asks for it"
        rule, divisors, shifts = coding.rule, coding.divisors, _or_zeros(coding.shifts, count)
        measured, first, second = torch.empty(0, dtype=torch.float32), coding.first, coding.second
    cpu_kernels.encode(
        values.squeeze(0).numpy(), int(rule), np.float32(grid.share or 1.0), _array(measured), _array(divisors),
        _array(shifts), np.float32(first), np.float32(second), grid.bits, out.numpy(),
    )  # fmt: skip
    if scales is not None:
        return scales
    return measured.bfloat16().unsqueeze(1) if rule == CodeRule.FLOOR else torch.stack([shifts, measured], 1)


def decode(grid: Grid, packed: Tensor, scales: Tensor, values: Tensor) -> None:
    """Write the values of packed codes into `values`."""
    from thinwire.compress.codecs.fused import cpu_kernels

    valuing = grid.valuing(scales)
    assert valuing is not None, "covers asks for it"
    shifts = _or_zeros(valuing.shifts, len(scales))
    table = valuing.factors if valuing.table is None else valuing.table
    cpu_kernels.decode(
        packed.numpy(), int(valuing.rule), np.float32(valuing.first), np.float32(valuing.second),
        _array(table), _array(valuing.factors), _array(shifts), grid.bits, values.squeeze(0).numpy(),
    )  # fmt: skip


def covers_error(grid: Grid, values: Tensor) -> bool:
    """Whether the kernel takes blocks of `values` [outer, count, inner], and of errors that lie in the same way."""
    return grid.share is not None and covers(grid, values) and work("numba", "feedback", _errors_agree, grid)


def encode_with_error(grid: Grid, values: Tensor, error: Tensor, decay: float, out: Tensor) -> Tensor:
    """Write the packed codes of u = values + decay * error, and u - C(u) into `error`; return the scales.

    By steps of their own, message, payload and new error read or write all of a tensor eleven times; this, three times
    and the payload.
    """
    from thinwire.compress.codecs.fused import cpu_kernels

    rule = CodeRule.RANGE if grid.scale_dtype == torch.float32 else CodeRule.FLOOR
    scales, shifts = torch.zeros(2, values.shape[1], dtype=torch.float32)
    cpu_kernels.encode_with_error(
        values.squeeze(0).numpy(), error.squeeze(0).numpy(), np.float32(decay), int(rule), np.float32(grid.share),
        grid.bits, scales.numpy(), shifts.numpy(), out.numpy(),
    )  # fmt: skip
    return torch.stack([shifts, scales], 1) if rule == CodeRule.RANGE else scales.bfloat16().unsqueeze(1)


class KernelPasses(Passes):
    """One pass each over `values` [1, count, inner], float32 and contiguous."""

    def ends(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the largest value of each block."""
        from thinwire.compress.codecs.fused import cpu_kernels

        least, most = torch.empty(2, values.shape[1], 1, dtype=torch.float32)
        cpu_kernels.ends(values.squeeze(0).numpy(), *_arrays(least, most))
        return least, most

    def least_square_scales(
        self, values: Tensor, bits: int, grids: Sequence[Gaussian]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The ends of each block, and its scale for each of `grids`."""
        from thinwire.compress.codecs.fused import cpu_kernels

        _, count, inner = values.shape
        pairs = np.array([slopes(bits, grid, inner) for grid in grids])
        least, most = torch.empty(2, count, 1, dtype=torch.float32)
        out = torch.empty(len(grids), count, 1, dtype=torch.float32)
        cpu_kernels.least_square_scales(values.squeeze(0).numpy(), pairs, *_arrays(least, most), out.squeeze(2).numpy())
        return least, most, list(out)

    def losses(self, values: Tensor, steps: Tensor, shifts: Tensor, half: int) -> Tensor:
        """What grids that hold zero, or are half a step lower, lose of each block's sample."""
        from thinwire.compress.codecs.fused import cpu_kernels

        sample, out = values.squeeze(0)[:, :: sample_step(values.shape[2])], np.empty(steps.shape[:2], np.int32)
        factors, lower = (part.squeeze(2).numpy() for part in (-1 / nonzero(steps), shifts))
        cpu_kernels.losses(sample.contiguous().numpy(), factors, lower, np.float32(half), out)
        return torch.from_numpy(out).unsqueeze(2).double().mul_(steps.double().square_())


def covers_rows(rows: Tensor) -> bool:
    """Whether kernels rotate `rows` [R, n]."""
    return takes(rows.unsqueeze(0)) and work("numba", "rotation", _rotations_agree)


def turn(rows: Tensor, pieces: Pieces) -> Tensor:
    """The float32 `rows` [R, n], each rotated."""
    from thinwire.compress.codecs.fused import cpu_kernels

    turned = torch.empty_like(rows)
    for columns, factors in pieces:
        cpu_kernels.turn(rows[:, columns].numpy(), factors.numpy(), turned[:, columns].numpy())
    return turned


def turn_back_(rows: Tensor, pieces: Pieces) -> None:
    """Undo `turn` on float32 `rows` [R, n], in place."""
    from thinwire.compress.codecs.fused import cpu_kernels

    for columns, factors in pieces:
        cpu_kernels.turn_back(rows[:, columns].numpy(), factors.numpy())


def _arrays(*numbers: Tensor) -> list[np.ndarray]:
    return [part.view(-1).numpy() for part in numbers]


def _or_zeros(shifts: Tensor | None, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.float32) if shifts is None else shifts


def _array(numbers: Tensor) -> NDArray[np.float32]:
    """The memory of a tensor, so that kernels write into it if it was contiguous."""
    array: NDArray[np.float32] = numbers.contiguous().view(-1).numpy()
    return array


@cache
def _known(grid: Grid) -> bool:
    """Whether the kernels know this grid."""
    scales = grid.measure(_sample())
    return not grid.stochastic and grid.coding(scales) is not None and grid.valuing(scales) is not None


def _sample() -> Tensor:
    """Blocks [1, 64, 64] to try kernels on."""
    return torch.linspace(-3, 2, 64 * 64, dtype=torch.float32).sin().view(1, 64, 64)


def _agree(grid: Grid) -> bool:
    """Whether kernels and eager code give the same scales, codes and values."""
    sample = _sample()
    scales, (_, count, inner) = grid.measure(sample), sample.shape
    eager = GridQuantizer(grid, lambda shape: Blocks(count * inner, 1, count, inner))
    part = next(eager.blocks(sample.shape).parts(count * inner))
    packed = torch.zeros(3, packed_size(count * inner, grid.bits), dtype=torch.uint8)
    eager.write_part(part, sample, scales, None, packed[0])
    measured = encode(grid, sample, None, packed[1])
    encode(grid, sample, scales, packed[2])
    values, others = torch.zeros(2, 1, count, inner, dtype=torch.float32)
    eager.read_part(packed[0], scales, values, values.numel())
    decode(grid, packed[0], scales, others)
    same_codes = torch.equal(packed[0], packed[1]) and torch.equal(packed[0], packed[2])
    return same_codes and torch.equal(measured, scales) and torch.equal(values, others)


def _errors_agree(grid: Grid) -> bool:
    """Whether kernel and eager code give the same payload and errors."""
    values = _sample()
    errors = torch.linspace(2, -1, 2 * 64 * 64, dtype=torch.float32).cos().mul_(0.1).view(2, 1, 64, 64)
    eager = GridQuantizer(grid, lambda shape: Blocks(64 * 64, 1, 64, 64))
    size, key = grid.scales_size(64), Key(0, 0, "gradients", "train", 0, 0)
    payloads = torch.zeros(2, eager.nbytes(values.shape), dtype=torch.uint8)
    for error, decay in zip(errors, (1.0, 0.95), strict=True):
        message = values + error if decay == 1 else torch.mul(error, decay).add_(values)
        eager.encode(message, payloads[0], key)
        decoded = torch.empty_like(message)
        eager.decode(payloads[0], decoded)
        payloads[1, :size] = grid.pack_scales(encode_with_error(grid, values, error, decay, payloads[1, size:]))
        if not torch.equal(payloads[0], payloads[1]) or not torch.equal(error, message.sub_(decoded)):
            return False
    return True


def _rotations_agree() -> bool:
    """Whether kernels and eager code rotate alike, there and back."""
    from thinwire.compress.codecs import rotation

    rows = torch.linspace(-3, 2, 8 * 78, dtype=torch.float32).sin().view(8, 78)
    rows[1::2] *= 2.0**97
    pieces, turned = rotation.factors(rows), rotation.turn_eagerly(rows)
    back, others = turned.clone(), turned.clone()
    rotation.turn_back_eagerly_(back)
    turn_back_(others, pieces)
    return torch.equal(turn(rows, pieces), turned) and torch.equal(back, others)
