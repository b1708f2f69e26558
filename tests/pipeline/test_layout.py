"""The order of elements in the rows that replicas exchange."""

import pytest
import torch

from thinwire.compress import parse
from thinwire.pipeline.replicas.layout import FLAT, SIDE, TILES, StageRows

SHAPES = {"wide": (130, 70), "bias": (5,), "even": (64, 128), "small": (3, 9), "kernel": (4, 2, 3, 3)}


def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def rows_of(layout):
    return StageRows({name: torch.Size(shape) for name, shape in SHAPES.items()}, layout)


def gathered(rows, given):
    """All rows of tensors, by buckets of three."""
    flat, filled = rows.flat(given), torch.full((rows.count, rows.layout.row), torch.nan)
    for first in range(0, rows.count, 3):
        bucket = range(first, min(first + 3, rows.count))
        rows.gather(flat, bucket, filled[bucket.start : bucket.stop])
    return filled


@pytest.mark.parametrize("layout", [FLAT, TILES])
def test_rows_hold_every_element_once(layout):
    rows, given = rows_of(layout), tensors()
    filled = gathered(rows, given)
    assert filled.count_nonzero() == sum(tensor.numel() for tensor in given)
    memory = [torch.full_like(tensor, torch.nan) for tensor in given]
    # the memory of some tensors: one of them is missing, and one lies otherwise
    room = rows.room([*memory[:3], None, memory[4].to(memory_format=torch.channels_last)])
    for piece in (range(3), range(3, rows.count)):
        rows.scatter(filled[piece.start : piece.stop], piece, room)
    for tensor, back in zip(given, rows.read(room), strict=True):
        assert torch.equal(tensor, back)
    assert torch.equal(memory[0], given[0]) == (layout == FLAT), "new memory is as slow as a copy"


def test_gradients_in_one_memory_get_sums_of_their_own():
    """They were written over each other: autograd gives both parameters the same memory."""
    tall, wide = (torch.nn.Parameter(torch.ones(shape)) for shape in ((3, 2), (2, 3)))
    (tall.view(6) + wide.view(6)).square().sum().backward()
    assert tall.grad.data_ptr() == wide.grad.data_ptr()
    rows = StageRows({"tall": tall.shape, "wide": wide.shape}, FLAT)
    room = rows.room([tall.grad, wide.grad])
    rows.scatter(torch.arange(float(FLAT.row))[None], range(1), room)
    assert torch.equal(torch.cat([each.flatten() for each in rows.read(room)]), torch.arange(12.0))


def test_rows_within_one_tensor_are_not_copied():
    rows, given = rows_of(FLAT), tensors()
    flat = rows.flat(given)
    window = rows.window(flat, range(2, 5))
    assert window.data_ptr() == given[0].data_ptr() + 4 * 2 * FLAT.row
    assert torch.equal(window, gathered(rows, given)[2:5])
    assert rows.window(flat, range(rows.count)) is None
    assert rows.window(rows.flat([None] * len(given)), range(2, 5)) is None


def test_whole_tiles_come_first():
    wide, bias, even, *_ = tensors()
    filled = gathered(rows_of(TILES), tensors())
    tiles = [wide[:SIDE, :SIDE], wide[SIDE : 2 * SIDE, :SIDE], even[:, :SIDE], even[:, SIDE:]]
    for row, tile in zip(filled, tiles, strict=False):
        assert torch.equal(row, tile.flatten())
    rest = torch.cat([wide[:128, 64:].flatten(), wide[128:].flatten(), bias])
    assert torch.equal(filled.view(-1)[4 * 4096 :][: len(rest)], rest)


def test_a_missing_tensor_is_zeros():
    assert not gathered(rows_of(TILES), [None] * len(SHAPES)).any()


@pytest.mark.parametrize("layout", [FLAT, TILES])
def test_pieces_name_every_element_of_every_parameter_once(layout):
    rows = rows_of(layout)
    half = rows.count // 2
    found = {}
    for part in (range(half), range(half, rows.count)):
        for name, piece in rows.pieces(part):
            parameter, first = name.split("/")
            found.setdefault(parameter, []).append(range(int(first), int(first) + piece.stop - piece.start))
    padding = found.pop("padding")
    for name, pieces in found.items():
        assert sorted(place for piece in pieces for place in piece) == list(range(torch.Size(SHAPES[name]).numel()))
    assert sum(map(len, padding)) == rows.count * layout.row - sum(
        torch.Size(shape).numel() for shape in SHAPES.values()
    )


def test_bytes_of_a_frame_do_not_depend_on_torchs_default_dtype():
    """With bfloat16 they were said to be half of what travels."""
    expected = FLAT.frame_bytes(4, parse("none"))
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert FLAT.frame_bytes(4, parse("none")) == expected > 4 * 4 * FLAT.row
    finally:
        torch.set_default_dtype(torch.float32)
