"""Packing of codes: the layout against NumPy's bit stream, every width and length."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.codec_helpers import assert_identical, few
from thinwire.compress.codecs.coding.bits import pack, packed_size, unpack

WIDTHS = range(1, 9)


def codes_of(n, bits, seed=0):
    return torch.randint(0, 2**bits, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def stream(codes, bits):
    """The layout as its definition has it: bit j of code i is bit bits*i+j, bit k is bit k%8 of byte k//8."""
    bit_rows = (codes.numpy()[:, None] >> np.arange(bits)) & 1
    return torch.from_numpy(np.packbits(bit_rows.astype(np.uint8).reshape(-1), bitorder="little"))


def packed(codes, bits, offset=0):
    size = packed_size(len(codes), bits)
    buffer = torch.full((offset + size + 8,), 0xA5, dtype=torch.uint8)
    pack(codes, bits, buffer[offset : offset + size])
    assert (buffer[:offset] == 0xA5).all() and (buffer[offset + size :] == 0xA5).all(), "wrote outside the payload"
    return buffer[offset : offset + size]


@pytest.mark.parametrize(
    ("bits", "codes", "payload"),
    [
        (1, [1, 0, 1, 1, 0, 0, 0, 1, 1], "8d01"),
        (2, [3, 0, 2, 1], "63"),
        (3, [1, 2, 3, 4, 5, 6, 7, 0], "d1581f"),
        (4, [1, 2, 15], "210f"),
        (5, [31, 0, 31], "1f7c"),
        (6, [1, 2, 3, 63], "8130fc"),
        (7, [127, 1], "ff00"),
        (8, [0, 255, 16], "00ff10"),
    ],
)
def test_golden_bytes(bits, codes, payload):
    codes = torch.tensor(codes, dtype=torch.uint8)
    assert bytes(packed(codes, bits).tolist()).hex() == payload
    assert_identical(unpack(torch.tensor(list(bytes.fromhex(payload)), dtype=torch.uint8), bits, len(codes)), codes)


@few
@given(n=st.integers(0, 130), bits=st.sampled_from(WIDTHS), offset=st.integers(0, 7), seed=st.integers(0, 99))
def test_layout_and_round_trip_at_any_length_and_alignment(n, bits, offset, seed):
    codes = codes_of(n, bits, seed)
    payload = packed(codes, bits, offset)
    assert len(payload) == packed_size(n, bits) == -(-bits * n // 8)
    assert_identical(payload, stream(codes, bits))
    assert_identical(unpack(payload, bits, n), codes)


@pytest.mark.parametrize("bits", WIDTHS)
def test_large_odd_length(bits):
    codes = codes_of(64 * 1024 + 1, bits)
    before = codes.clone()
    payload = packed(codes, bits)
    assert_identical(codes, before)
    assert_identical(payload, stream(codes, bits))
    assert_identical(unpack(payload, bits, len(codes)), codes)


@pytest.mark.parametrize("bits", WIDTHS)
def test_bits_beyond_the_last_code_are_zero_when_written_and_ignored_when_read(bits):
    codes = codes_of(3, bits)
    payload = packed(codes, bits)
    unused = 8 * len(payload) - 3 * bits
    assert payload[-1].item() >> (8 - unused) == 0, f"{payload[-1].item():08b}"
    payload[-1] |= 0xFF << (8 - unused) & 0xFF
    assert_identical(unpack(payload, bits, 3), codes)


def test_unpacked_codes_are_no_view_of_the_payload():
    payload = torch.arange(16, dtype=torch.uint8)
    for bits in WIDTHS:
        unpack(payload, bits, 16 * 8 // bits).zero_()
    assert_identical(payload, torch.arange(16, dtype=torch.uint8))
