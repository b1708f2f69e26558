"""q's option scale_bits: what scales of half the size save, what they lose, and what a byte can say."""

import pytest
import torch

from support.codec_contract import assert_contract, documented
from support.codec_helpers import assert_identical, encode, gaussian, roundtrip, snr_db
from thinwire.compress import CodecError, parse
from thinwire.compress.codecs.quantize import Quantize

SHORT = ["q(4, group=32, scale_bits=8)", 'q(4, scale="minmax", group=32, scale_bits=32)']


@pytest.mark.parametrize(("expression", "plain", "short"), [(SHORT[0], 4.5, 4.25), (SHORT[1], 6, 5)])
def test_a_scale_takes_half_the_bits_and_costs_less_than_they_give(expression, plain, short):
    x, codec = gaussian(64, 1024), parse(expression)
    long = parse(expression.replace(", scale_bits=8", "").replace(", scale_bits=32", ""))
    assert 8 * codec.nbytes(x.shape, x.dtype) / x.numel() == pytest.approx(short, abs=0.001)
    assert 8 * long.nbytes(x.shape, x.dtype) / x.numel() == plain
    lost = snr_db(x, roundtrip(long, x)) - snr_db(x, roundtrip(codec, x))
    assert 0 < lost < 6 * (plain - short), f"{lost:.2f} dB"


@pytest.mark.parametrize("expression", [*SHORT, "q(1, scale_bits=8)", 'q(3, clip="mse", scale_bits=8)'])
@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 5, 64), (2, 3, 4, 5)])
@pytest.mark.parametrize("factor", [1.0, 1e-30, 1e30])
def test_the_error_is_within_the_bound(expression, shape, factor):
    assert_contract(parse(expression), gaussian(*shape) * factor, offset=1)


def test_a_byte_is_rounded_up_by_at_most_an_eighth():
    x = torch.logspace(0, 9, 500)[:, None].repeat(1, 2)
    payload = encode("q(1, scale_bits=8)", x)
    scales = documented("byte_scale")
    found = torch.tensor([scales(payload[0].item(), byte) for byte in payload[1:501].tolist()])
    assert (found >= x[:, 0]).all() and (found <= x[:, 0] * 1.134).all()  # bf16 rounds up first


def test_scales_far_below_the_largest_hold_their_values_and_zeros_stay_zeros():
    x = torch.tensor([[1e20, -1e20], [1.0, -1.0], [0.0, 0.0]])
    y = roundtrip("q(8, scale_bits=8)", x)
    assert y[0].abs().min() > 9e19 and not y[2].any()
    assert (y[1].abs() <= 1e20 * 2.0**-30).all() and y[1].any()


@pytest.mark.parametrize("expression", ["q(4, scale_bits=8)", 'q(4, scale="minmax", scale_bits=32)'])
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
    payload = encode('q(8, scale="minmax", scale_bits=32)', x)
    for row, (low, extent) in zip(x, payload[: 4 * 64].view(64, 4).view(torch.bfloat16).tolist(), strict=True):
        assert low <= row.min() and row.max() <= low + extent


@pytest.mark.parametrize("expression", SHORT)
def test_the_decoder_in_the_documentation_gets_the_same_bits(expression):
    x, codec = gaussian(3, 40), parse(expression)
    decode = documented("decode_short")
    values = decode(bytes(encode(codec, x).tolist()), 4, codec.scale, 120, 4, 32)
    assert_identical(roundtrip(codec, x), torch.tensor(values).view(3, 40))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"scale_bits": 32}, 'q\'s scale_bits must be 16 or 8 for scale="absmax", got 32'),
        ({"scale": "minmax", "scale_bits": 8}, 'q\'s scale_bits must be 64 or 32 for scale="minmax", got 8'),
        ({"scale_bits": 8, "grid": "midtread"}, 'q\'s scale_bits=8 is for grid="midrise", got grid="midtread"'),
        ({"scale_bits": True}, 'q\'s scale_bits must be 16 or 8 for scale="absmax", got True'),
    ],
)
def test_every_mistake_has_its_sentence(arguments, sentence):
    with pytest.raises(CodecError) as error:
        Quantize(4, **arguments)
    assert str(error.value) == sentence
