"""The codecs of examples with scales of half the size: what they save, what they lose, and what a byte can say."""

import pytest
import torch

from support.codec_contract import assert_contract, documented
from support.codec_helpers import assert_identical, encode, gaussian, roundtrip, said_by, snr_db
from thinwire.compress import parse

SHORT = {
    "short_scales.ByteScales(4, group=32)": 'q(4, group=32, grid="midrise")',
    "short_scales.ShortRanges(4, group=32)": 'q(4, group=32, scale="minmax")',
}
"""Codecs -> those with long scales."""


@pytest.mark.parametrize(("expression", "plain", "short"), list(zip(SHORT, (4.5, 6), (4.25, 5), strict=True)))
def test_a_scale_takes_half_the_bits_and_costs_less_than_they_give(expression, plain, short):
    x, codec = gaussian(64, 1024), parse(expression)
    long = parse(SHORT[expression])
    assert 8 * codec.nbytes(x.shape, x.dtype) / x.numel() == pytest.approx(short, abs=0.001)
    assert 8 * long.nbytes(x.shape, x.dtype) / x.numel() == plain
    lost = snr_db(x, roundtrip(long, x)) - snr_db(x, roundtrip(codec, x))
    assert 0 < lost < 6 * (plain - short), f"{lost:.2f} dB"


@pytest.mark.parametrize("expression", [*SHORT, "short_scales.ByteScales(1)"])
@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 5, 64), (2, 3, 4, 5)])
@pytest.mark.parametrize("factor", [1.0, 1e-30, 1e30])
def test_the_error_is_within_the_bound(expression, shape, factor):
    assert_contract(parse(expression), gaussian(*shape) * factor, offset=1)


def test_a_byte_is_rounded_up_by_at_most_an_eighth():
    x = torch.logspace(0, 9, 500)[:, None].repeat(1, 2)
    payload = encode("short_scales.ByteScales(1)", x)
    scales = documented("byte_scale")
    found = torch.tensor([scales(payload[0].item(), byte) for byte in payload[1:501].tolist()])
    assert (found >= x[:, 0]).all() and (found <= x[:, 0] * 1.134).all()  # bf16 rounds up first


def test_scales_far_below_the_largest_hold_their_values_and_zeros_stay_zeros():
    x = torch.tensor([[1e20, -1e20], [1.0, -1.0], [0.0, 0.0]])
    y = roundtrip("short_scales.ByteScales(8)", x)
    assert y[0].abs().min() > 9e19 and not y[2].any()
    assert (y[1].abs() <= 1e20 * 2.0**-30).all() and y[1].any()


@pytest.mark.parametrize("expression", ["short_scales.ByteScales(4)", "short_scales.ShortRanges(4)"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_block_that_is_not_finite_changes_no_other(expression, value):
    x = gaussian(4, 16)
    broken = x.clone()
    broken[2, 3] = value
    y = roundtrip(expression, broken)
    assert not y[2].isfinite().any()
    assert_identical(y[[0, 1, 3]], roundtrip(expression, x)[[0, 1, 3]])


def test_a_short_minmax_holds_every_value_between_its_ends():
    x = 1000 + gaussian(64, 32)
    payload = encode("short_scales.ShortRanges(8)", x)
    for row, (low, extent) in zip(x, payload[: 4 * 64].view(64, 4).view(torch.bfloat16).tolist(), strict=True):
        assert low <= row.min() and row.max() <= low + extent


@pytest.mark.parametrize("expression", SHORT)
def test_the_decoder_in_the_documentation_gets_the_same_bits(expression):
    x, codec = gaussian(3, 40), parse(expression)
    scale = "minmax" if "Ranges" in expression else "absmax"
    values = documented("decode_short")(bytes(encode(codec, x).tolist()), 4, scale, 120, 4, 32)
    assert_identical(roundtrip(codec, x), torch.tensor(values).view(3, 40))


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("ByteScales(9)", "ByteScales's bits must be an integer from 1 to 8, got 9"),
        ("ShortRanges(0)", "ShortRanges's bits must be an integer from 1 to 8, got 0"),
    ],
)
def test_every_mistake_has_its_sentence(expression, sentence):
    assert said_by(f"short_scales.{expression}") == f"short_scales.{sentence}"
