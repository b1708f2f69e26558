"""dither: exact payloads, the chance of each point, natural compression's bound, and the ends of its range."""

import dataclasses
import math

import pytest
import torch

from support.codec_contract import documented
from support.codec_helpers import KEY, assert_identical, encode, gaussian, roundtrip, said_by, snr_db
from thinwire.compress.codecs.dither import Dither
from thinwire.compress.codecs.granularity import blocks_for
from thinwire.compress.contraction import contraction

WIDTHS = range(2, 9)


def neighbours(magnitude, bits):
    """The two points around each magnitude of at most 1, for s = 1."""
    least = 2.0 ** (2 - 2 ** (bits - 1))
    power = torch.exp2(torch.floor(torch.log2(magnitude.double())))
    lower = torch.where(magnitude < least, 0.0, power)
    return lower, torch.where(magnitude < least, least, 2 * power)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("scale", [1.0, 1.9921875 * 2.0**126, 1.5 * 2.0**-30, 2.0**-118])
def test_points_come_back_exactly_whatever_the_chance(bits, scale):
    points = torch.exp2(torch.arange(2 - 2 ** (bits - 1), 1).clamp(min=-126)) * scale
    points = points[points >= 2.0**-126]
    x = torch.cat([points, -points, torch.zeros(1)])
    assert_identical(roundtrip(Dither(bits), x), x)


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_value_becomes_either_neighbour_and_is_itself_on_average(bits):
    repeats = 40_000
    values = gaussian(24).abs().clamp(max=1)
    values[0], values[1], values[2] = 1.0, 2.0 ** (1 - 2 ** (bits - 1)), 1e-3
    x = values.expand(repeats, 24)
    y = roundtrip(Dither(bits, per="tensor"), x).double()
    lower, upper = neighbours(values, bits)
    assert ((y == lower) | (y == upper)).all()
    variance = (upper - values.double()) * (values.double() - lower)
    deviation = (y.mean(0) - values).abs() / (variance / repeats).sqrt().clamp(min=1e-12 * values)
    assert deviation.max() < 4.5, f"{deviation.max():.1f} standard errors"
    nearest = torch.where(values > (lower + upper) / 2, upper, lower)
    assert ((nearest - values).abs() / (variance / repeats).sqrt().clamp(min=1e-12)).max() > 50


def test_rare_events_have_their_chance_too():
    """Coarser noise than 23 bits would never send these."""
    x = torch.full((2**20,), 2.0**-16)
    x[0] = 1.0
    sent = (roundtrip("dither(2)", x)[1:] != 0).sum().item()
    assert 1 <= sent <= 40, f"{sent} of 2**20 sent, 16 expected"


@pytest.mark.parametrize("bits", WIDTHS)
def test_mean_squared_error_is_within_natural_compressions_bound_and_reaches_it(bits):
    """It is (upper - x) * (x - lower): x**2 / 8 at 4/3 of a point, and a quarter of the least point's square below."""
    least = 2.0 ** (2 - 2 ** (bits - 1))
    for value, bound in ((2 / 3, (2 / 3) ** 2 / 8), (least / 2, least**2 / 4)):
        if value < least and bound == (2 / 3) ** 2 / 8:
            continue
        x = torch.full((200_000,), value)
        x[0] = 1.0
        error = (roundtrip(Dither(bits), x) - x)[1:].double().square().mean().item()
        assert 0.98 * bound < error < 1.02 * bound, error / bound
    x = torch.linspace(max(least, 2.0**-20), 1, 200_001)
    error = (roundtrip(Dither(bits), x) - x).double().square().sum() / x.double().square().sum()
    assert error < 1 / 8


@pytest.mark.parametrize(
    ("expression", "floor", "ceiling"),
    [("dither(2)", -3.5, -1.5), ("dither(3)", 7.8, 8.7), ("dither(4)", 10.6, 11.1), ("dither(8)", 10.6, 11.1)],
)
def test_signal_to_noise_of_gaussian_rows_of_1024(expression, floor, ceiling):
    x = gaussian(512, 1024)
    snr = snr_db(x, roundtrip(expression, x))
    assert floor < snr < ceiling, f"{snr:.2f} dB"


def test_it_is_contractive_however_small_the_values():
    """From 5 bits on, all but nothing lies below the least point."""
    wide = gaussian(64, 1024) * torch.exp2(4 * gaussian(64, 1024, seed=1))
    for x in (gaussian(64, 1024), wide):
        for bits in (5, 6, 7, 8):
            assert 0.2 < contraction(Dither(bits, per="tensor"), x) < math.sqrt(1 / 8)


def test_noise_depends_on_the_key_and_differs_everywhere():
    x = torch.full((64, 65), 0.7)
    x[:, 0] = 1.0
    y = roundtrip("dither(4)", x)
    assert len({tuple(row.tolist()) for row in y}) == 64
    assert not torch.equal(roundtrip("dither(4)", x, dataclasses.replace(KEY, step=3)), y)


@pytest.mark.parametrize("scale", [2.0**-118, 1.7 * 2.0**-60, 1.9 * 2.0**-3])
def test_nothing_decoded_is_denormal(scale):
    x = torch.exp2(torch.linspace(0, -140, 5001)).repeat(20) * scale
    for bits in WIDTHS:
        codec = Dither(bits)
        y = roundtrip(codec, x)
        assert (y[y != 0] >= 2.0**-126).all() and (y == 0).any()
        assert ((y - x).abs() <= codec.error_bound(x)).all()
    assert y[y != 0].min() < 2.0**-124


def test_a_row_below_the_smallest_scale_is_sent_as_zeros():
    x = torch.tensor([[2.0**-119, -(2.0**-126)], [2.0**-118, -(2.0**-118)]])
    assert_identical(roundtrip("dither(4)", x), torch.stack([torch.zeros(2), x[1]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_largest_values_of_a_16_bit_type_stay_finite(dtype):
    x = torch.tensor([[torch.finfo(dtype).max, -torch.finfo(dtype).max, 1.0]], dtype=dtype)
    for bits in WIDTHS:
        y = roundtrip(Dither(bits), x)
        assert ((y.double() - x.double()).abs() <= Dither(bits).error_bound(x)).all(), (bits, y)
        assert_identical(y[:, :2], x[:, :2])


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("dither", "'dither': missing a required argument: 'bits'; write dither(bits, per, group, code)"),
        ("dither(1)", "dither's bits must be an integer from 2 to 8, got 1"),
        ("dither(9)", "dither's bits must be an integer from 2 to 8, got 9"),
        ("dither(4.0)", "dither's bits must be an integer from 2 to 8, got 4.0"),
        ('dither(4, per="row", group=4)', "dither takes per or group, not both, got per='row' and group=4"),
    ],
)
def test_every_mistake_has_its_sentence(expression, sentence):
    assert said_by(expression) == sentence


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"per": per} for per in ("tensor", "sample", "row", "channel")] + [{"group": 7}])
@pytest.mark.parametrize("exponent", [-110, -70, 0, 100])
def test_the_decoder_in_the_documentation_gets_the_same_bits(options, exponent):
    for bits in WIDTHS:
        for shape in ((), (9,), (4, 5), (2, 3, 5), (2, 3, 2, 2)):
            x, codec = gaussian(*shape, scale=2.0**exponent), Dither(bits, **options)
            blocks = blocks_for(codec.per, codec.group, shape)
            values = documented("decode_dither")(
                bytes(encode(codec, x).tolist()), bits, x.numel(), blocks.count, blocks.inner
            )
            assert_identical(roundtrip(codec, x), torch.tensor(values).view(shape))


def test_a_payload_is_its_scales_and_its_bits():
    for bits in WIDTHS:
        assert Dither(bits).nbytes((4, 3, 5, 2), torch.bfloat16) == 2 * 12 + 15 * bits
