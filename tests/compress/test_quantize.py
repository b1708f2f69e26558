"""q: exact payloads, the formulas it comes from, how much it distorts, and the ends of its range."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.codec_helpers import KEY, assert_identical, encode, few, gaussian, roundtrip, snr_db
from support.pages import defined
from thinwire.compress import CodecError, parse
from thinwire.compress.codecs import quantizer
from thinwire.compress.codecs.fused import cpu
from thinwire.compress.codecs.granularity import Blocks, blocks_for, blocks_per
from thinwire.compress.codecs.grid import AbsMaxGrid, MinMaxGrid
from thinwire.compress.codecs.quantize import Quantize

WIDTHS = range(1, 9)


def hexed(payload):
    return bytes(payload.tolist()).hex()


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("shape", [(7, 33), (2, 3, 8, 8), (64 * 1024 + 1,)])
def test_minmax_is_its_formula(bits, shape):
    x = gaussian(*shape, scale=3)
    lowest, highest = x.min(), x.max()
    code = torch.round((x - lowest) / (highest - lowest) * (2**bits - 1))
    expected = code / (2**bits - 1) * (highest - lowest) + lowest
    assert_identical(roundtrip(Quantize(bits, scale="minmax", per="tensor"), x), expected)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("shape", [(7, 33), (2, 3, 8, 8), (64 * 1024 + 1,)])
def test_minmax_is_the_code_of_2401_07788_but_for_a_rounding(bits, shape):
    """Its notebook multiplies by 1/(2**b-1), where we divide: the same to 2 bits, another last bit beyond."""
    x = gaussian(*shape, scale=3)
    lowest, extent = x.min(), x.max() - x.min()
    theirs = torch.round((x - lowest) / extent * (2**bits - 1)) * (1 / (2**bits - 1)) * extent + lowest
    ours = roundtrip(Quantize(bits, scale="minmax", per="tensor"), x)
    assert (ours - theirs).abs().max() <= 1.2e-7 * extent
    assert torch.equal(ours, theirs) == (bits <= 2)


@pytest.mark.parametrize("bits", WIDTHS)
def test_minmax_per_row_is_its_formula_on_each_row(bits):
    x = gaussian(50, 37)
    rows = [roundtrip(Quantize(bits, scale="minmax", per="tensor"), row) for row in x]
    assert_identical(roundtrip(Quantize(bits, scale="minmax"), x), torch.stack(rows))


@pytest.mark.parametrize("bits", WIDTHS)
def test_absmax_is_the_mid_points_of_equal_intervals(bits):
    """2206.01299: x/s in [-1, 1] cut into 2**b equal intervals, one s a channel; here s is bf16 and rounded up."""
    x = gaussian(4, 33, 48)
    largest = x.abs().amax((0, 1))
    scale = encode(Quantize(bits, per="channel", grid="midrise"), x)[: 2 * 48].view(torch.bfloat16).float()
    assert (scale >= largest).all() and (scale <= largest * (1 + 2**-7)).all()
    interval = torch.floor(x.double() / scale * 2 ** (bits - 1)).clamp(max=2 ** (bits - 1) - 1)
    mid_point = (interval + 0.5) / 2 ** (bits - 1) * scale
    assert_identical(roundtrip(Quantize(bits, per="channel", grid="midrise"), x), mid_point.float())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_on_gaussian_values_absmax_is_better_than_the_code_published_with_it(bits):
    """AC-SGD's code rounds to multiples of s/2**(b-1). None of them is +s, so it clips the largest values."""
    x = gaussian(4, 64, 48)
    theirs, ours = published_absmax(x, bits), roundtrip(Quantize(bits, per="channel", grid="midrise"), x)
    assert (ours - x).abs().max() < 0.6 * (theirs - x).abs().max()
    assert snr_db(x, theirs) < snr_db(x, ours) < snr_db(x, theirs) + 6, (snr_db(x, theirs), snr_db(x, ours))


def published_absmax(x, bits):
    """AC-SGD's code, for one scale an index of the last dimension."""
    half, scale = 2 ** (bits - 1), x.abs().amax((0, 1)).half()
    return torch.round(x / (scale + 1e-6) * half).clip(-half, half - 1) / half * scale


@pytest.mark.parametrize(
    ("bits", "tensor", "floor", "ceiling"),
    [(2, "relu", 5.4, 6.0), (4, "relu", 5.5, 6.3), (2, "outliers", 20, 24), (4, "outliers", 16, 21)],
)
def test_where_most_values_are_small_the_published_grid_is_better(bits, tensor, floor, ceiling):
    """It holds zero, and mid-rise does not."""
    x = gaussian(4, 1024, 48)
    x = x.relu() if tensor == "relu" else torch.where(gaussian(*x.shape, seed=1).abs() > 2.576, 100 * x, x)
    gain = snr_db(x, published_absmax(x, bits)) - snr_db(x, roundtrip(Quantize(bits, per="channel", grid="midrise"), x))
    assert floor < gain < ceiling, f"{gain:.2f} dB"


@pytest.mark.parametrize(
    ("expression", "floor", "ceiling"),
    [
        ("q(1)", -1.4, -0.6),
        ('q(2, grid="midrise")', 5.8, 6.2),
        ('q(3, grid="midrise")', 11.8, 12.2),
        ('q(4, grid="midrise")', 17.8, 18.2),
        ('q(8, grid="midrise")', 41.8, 42.2),
        ('q(4, group=64, grid="midrise")', 20.1, 20.5),
        ('q(2, scale="minmax")', 3.8, 4.3),
        ('q(4, scale="minmax")', 17.9, 18.4),
        ('q(2, scale="minmax", per="tensor")', -0.5, 0.5),
    ],
)
def test_signal_to_noise_of_gaussian_rows_of_1024(expression, floor, ceiling):
    x = gaussian(512, 1024)
    snr = snr_db(x, roundtrip(expression, x))
    assert floor < snr < ceiling, f"{snr:.2f} dB"


@pytest.mark.parametrize("scale", ["absmax", "minmax"])
@pytest.mark.parametrize("bits", [1, 2, 3, 8])
def test_stochastic_rounding_is_unbiased_and_nearest_is_not(scale, bits):
    repeats = 40_000
    values = gaussian(32)
    x = values.expand(repeats, 32)
    mean = roundtrip(Quantize(bits, scale=scale, round="stochastic"), x).double().mean(0)
    step = Quantize(bits, scale=scale, round="stochastic").error_bound(values)
    deviation = (mean - values).abs() / (step / 2 / math.sqrt(repeats))  # in standard errors, at most
    assert deviation.max() < 4.5, f"{deviation.max():.1f} standard errors"
    nearest = (roundtrip(Quantize(bits, scale=scale, grid="midrise"), values) - values).abs() / (
        step / 2 / math.sqrt(repeats)
    )
    assert nearest.max() > 50, f"{nearest.max():.1f} standard errors"


def test_stochastic_noise_is_different_everywhere_and_depends_on_the_key():
    x = torch.full((64, 64), 0.4)
    x[:, 0] = 1.0
    y = roundtrip('q(2, round="stochastic")', x)
    assert 0.1 < y[:, 1:].std().item() < 1
    assert len({tuple(row.tolist()) for row in y[:, 1:]}) == 64


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_the_largest_values_never_wrap_around(bits, rounding):
    """With x = s exactly, one unit too much in the last place would turn the largest value into the smallest."""
    mantissas = 1 + torch.arange(128) / 128
    exponents = torch.tensor([-117, -40, -8, -1, 0, 1, 15, 16, 100, 125, 126])
    largest = (mantissas[:, None] * torch.exp2(exponents.float())).reshape(-1, 1)
    x = torch.cat([largest, -largest, torch.nextafter(largest, torch.zeros(()))], 1)
    for scale in ("absmax", "minmax"):
        codec = Quantize(bits, scale=scale, round=rounding)
        y = roundtrip(codec, x)
        assert (y.sign() == x.sign()).all()
        assert ((y - x).abs() <= codec.error_bound(x)).all()


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("grid", [AbsMaxGrid, MinMaxGrid])
def test_codes_fit_their_width_whatever_the_values_and_the_noise(grid, bits):
    """Packing puts codes side by side: a bit too many would spoil a neighbour, in another block perhaps."""
    outside = torch.tensor([[[1e9, -1e9, 300.0, -300.0, torch.nan, torch.inf, -torch.inf]]])
    ends = torch.tensor([[[-1.0, 1.0], [0.0, 0.0]]])
    for stochastic, noise in ((False, None), (True, 0.5 - 2.0**-17), (True, 2.0**-17 - 0.5)):
        rule = grid(bits, stochastic)
        scales = rule.measure(ends)
        all_outside = rule.codes(outside, scales[:1], None if noise is None else torch.full_like(outside, noise))
        assert all_outside.max().item() <= rule.last == 2**bits - 1
        codes = rule.codes(ends, scales, None if noise is None else torch.full_like(ends, noise)).tolist()[0]
        assert codes[0][0] <= stochastic and codes[0][1] >= rule.last - stochastic, codes


@pytest.mark.parametrize("magnitude", [1e-34, 1e-10, 1e6, 1e30, 1e38])
@pytest.mark.parametrize("expression", ['q(4, grid="midrise")', 'q(4, scale="minmax")'])
def test_any_magnitude_that_float32_holds(magnitude, expression):
    x = gaussian(16, 64, scale=magnitude / 4)
    assert 14 < snr_db(x, roundtrip(expression, x)) < 26


def test_a_row_below_the_smallest_scale_is_sent_as_zeros():
    x = torch.tensor([[2.0**-119, -(2.0**-126)], [2.0**-118, -(2.0**-118)]])
    codec = parse('q(2, grid="midrise")')
    assert hexed(encode(codec, x)) == "000080043a"  # codes 2, 2 for nothing and 3, 0
    assert_identical(roundtrip(codec, x), torch.tensor([[0.0, 0.0], [0.75 * 2.0**-118, -0.75 * 2.0**-118]]))
    assert ((roundtrip(codec, x) - x).abs() <= codec.error_bound(x)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_the_largest_values_of_a_16_bit_type_stay_finite(dtype, rounding):
    largest = torch.finfo(dtype).max / (2 if dtype == torch.bfloat16 else 1)  # minmax needs max-min in float32
    x = torch.tensor([[largest, -largest, 1.0]], dtype=dtype)
    for bits in WIDTHS:
        for scale in ("absmax", "minmax"):
            codec = Quantize(bits, scale=scale, round=rounding)
            y = roundtrip(codec, x)
            assert ((y.double() - x.double()).abs() <= codec.error_bound(x)).all(), (codec, y)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.3, 1e30])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_minmax_returns_constant_rows_exactly(value, rounding):
    x = torch.full((3, 11), value)
    for bits in WIDTHS:
        assert_identical(roundtrip(Quantize(bits, scale="minmax", round=rounding), x), x)


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_narrow_range_far_from_zero_stays_within_the_bound(bits):
    """Here most of the error is float32's own rounding."""
    x = 1000 + gaussian(64, 64, scale=2.0**-9)
    codec = Quantize(bits, scale="minmax")
    assert ((roundtrip(codec, x) - x).abs() <= codec.error_bound(x)).all()
    assert (codec.error_bound(x) < (x.amax() - x.amin()) / (2**bits - 1) + 2**-12).all()


@pytest.mark.slow
@few
@given(bits=st.sampled_from(WIDTHS), data=st.data())
def test_minmax_hits_both_ends_of_each_row(bits, data):
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 40))
    x = gaussian(rows, columns, seed=data.draw(st.integers(0, 99)))
    y = roundtrip(Quantize(bits, scale="minmax"), x)
    torch.testing.assert_close(y.amin(1), x.amin(1), rtol=0, atol=0)
    torch.testing.assert_close(y.amax(1), x.amax(1), rtol=2**-22, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "tensor", "sample", "row", "channel"),
    [
        ((), (1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
        ((6,), (1, 1, 6), (1, 6, 1), (1, 1, 6), (1, 6, 1)),
        ((2, 6), (1, 1, 12), (1, 2, 6), (1, 2, 6), (2, 6, 1)),
        ((2, 3, 6), (1, 1, 36), (1, 2, 18), (1, 6, 6), (6, 6, 1)),
        ((2, 3, 4, 5), (1, 1, 120), (1, 2, 60), (1, 6, 20), (2, 3, 20)),
        ((2, 3, 4, 5, 6), (1, 1, 720), (1, 2, 360), (1, 6, 120), (2, 3, 120)),
    ],
)
def test_blocks_of_each_granularity(shape, tensor, sample, row, channel):
    expected = {"tensor": tensor, "sample": sample, "row": row, "channel": channel}
    actual = {per: blocks_per(per, shape) for per in expected}
    assert actual == {per: Blocks(math.prod(shape), *view) for per, view in expected.items()}


@pytest.mark.parametrize(
    ("shape", "group", "view"),
    [((), 4, (1, 1, 1)), ((3,), 4, (1, 1, 3)), ((8,), 4, (1, 2, 4)), ((3, 3), 4, (1, 3, 4)), ((2, 2), 1, (1, 4, 1))],
)
def test_blocks_of_groups(shape, group, view):
    assert blocks_for(None, group, shape) == Blocks(math.prod(shape), *view)


@pytest.mark.parametrize(
    "expression",
    ['q(4, group=7, grid="midrise")', 'q(4, scale="minmax", group=7)', 'q(4, group=7, round="stochastic")'],
)
def test_the_last_group_is_a_group_of_its_own(expression):
    """Filling it up must neither widen its range nor cost bytes."""
    x = gaussian(7 * 5 + 3)
    x[-3:] = torch.tensor([5.0, 5.25, 5.5])
    codec = parse(expression)
    assert codec.nbytes((38,), torch.float32) - codec.nbytes((35,), torch.float32) == (2, 8)["minmax" in expression] + 1
    alone, scale = encode(codec, x[-3:]), (2, 8)["minmax" in expression]
    assert_identical(encode(codec, x)[5 * scale : 6 * scale], alone[:scale])


@pytest.mark.slow
def test_the_scale_of_a_shorter_last_group_follows_from_its_own_elements(monkeypatch):
    """The copies of one element that fill it up counted in its root mean square, but not where a kernel measured."""
    expression, x = "q(8, step=0.2, group=64)", gaussian(2 * 64 + 40)
    x[-1] = 0
    for messages in (0, cpu.LEAST_MESSAGES):  # with the second, kernels if there are any
        monkeypatch.setattr(cpu, "_messages", messages)
        assert_identical(roundtrip(expression, x)[-40:], roundtrip(expression, x[-40:]))


@pytest.mark.parametrize("size", [8, 64, 1000])
@pytest.mark.parametrize("per", ["tensor", "sample", "row", "channel", 1, 7, 64, 100])
def test_parts_are_the_whole_tensor_in_order(per, size):
    for shape in [(), (7,), (3, 5), (100, 1), (9, 40), (3, 4, 50), (2, 3, 8, 8), (5, 2, 3, 3)]:
        assert_parts_in_order(shape, per, size)


def assert_parts_in_order(shape, per, size):
    blocks = blocks_for(None, per, shape) if isinstance(per, int) else blocks_per(per, shape)
    x = torch.arange(math.prod(shape))
    scales = torch.arange(blocks.count)[:, None].expand(blocks.outer, blocks.count, blocks.inner)
    expected, stop = blocks.spread(scales, shape).reshape(-1), 0
    for part in blocks.parts(size):
        assert part.start == stop and part.start % 8 == 0
        values, numel = part.padded(x[part.start : part.stop]), part.stop - part.start
        assert_identical(values.reshape(-1)[:numel], x[part.start : part.stop])
        assert (values.reshape(-1)[numel:] == x[-1]).all()
        of_part = torch.arange(blocks.count)[part.blocks, None].expand(part.shape)
        assert_identical(of_part.reshape(-1)[:numel], expected[part.start : part.stop])
        stop = part.stop
    assert stop == len(x)


@pytest.mark.parametrize("size", [8, 56])
@pytest.mark.parametrize("per", [{"per": per} for per in ("tensor", "sample", "row", "channel")] + [{"group": 60}])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_payloads_and_values_do_not_depend_on_the_parts(monkeypatch, rounding, per, size):
    for shape in ((3,), (7, 33), (2, 4, 20), (3, 2, 5, 9)):
        for dtype in (torch.float32, torch.bfloat16):
            for bits, scale in ((3, "absmax"), (8, "minmax"), (1, "absmax")):
                x, codec = gaussian(*shape, dtype=dtype), Quantize(bits, scale=scale, round=rounding, **per)
                payload, y = encode(codec, x), roundtrip(codec, x)
                with monkeypatch.context() as patch:
                    patch.setattr(quantizer, "_PART", size)
                    assert_identical(encode(codec, x), payload)
                    assert_identical(roundtrip(codec, x), y)


@pytest.mark.parametrize(
    ("expression", "scales", "scale_bytes"),
    [
        ('q(3, per="tensor", grid="midrise")', 1, 2),
        ('q(3, per="sample", grid="midrise")', 4, 2),
        ('q(3, grid="midrise")', 12, 2),
        ('q(3, per="channel", grid="midrise")', 3, 2),
        ('q(3, group=50, grid="midrise")', 3, 2),
        ('q(3, scale="minmax", per="tensor")', 1, 8),
        ('q(3, scale="minmax", group=50)', 3, 8),
    ],
)
def test_a_payload_is_its_scales_and_three_bits_an_element(expression, scales, scale_bytes):
    for dtype in (torch.float32, torch.bfloat16):
        assert parse(expression).nbytes((4, 3, 5, 2), dtype) == scales * scale_bytes + 45


@pytest.mark.parametrize(
    ("per", "absmax", "minmax"),
    [
        ('per="tensor"', (2.5e-6, 4.9e-6), (1.0e-5, 2.0e-5)),
        ('per="sample"', (2.0e-5, 4.9e-4), (8.1e-5, 2.0e-3)),
        ('per="row"', (0.0208, 0.0625), (0.0833, 0.25)),
        ('per="channel"', (1.95e-3, 6.25e-4), (7.81e-3, 2.5e-3)),
        ("group=256", (0.0625, 0.0625), (0.25, 0.25)),
        ("group=64", (0.25, 0.25), (1.0, 1.0)),
    ],
)
def test_bits_an_element_beyond_those_of_the_codes(per, absmax, minmax):
    for scale, expected in (("absmax", absmax), ("minmax", minmax)):
        for shape, bits in zip([(8, 1024, 768), (100, 128, 16, 16)], expected, strict=True):
            nbytes = parse(f'q(4, scale="{scale}", {per}, grid="midrise")').nbytes(shape, torch.float32)
            assert 8 * nbytes / math.prod(shape) - 4 == pytest.approx(bits, rel=0.03)


@pytest.mark.parametrize("scale", ["absmax", "minmax"])
@pytest.mark.parametrize("per", [{"per": per} for per in ("tensor", "sample", "row", "channel")] + [{"group": 7}])
def test_the_decoder_in_the_documentation_gets_the_same_bits(scale, per):
    documented = defined("decode")["decode"]
    for bits in WIDTHS:
        for shape in ((), (9,), (4, 5), (2, 3, 5), (2, 3, 2, 2)):
            x, codec = gaussian(*shape), Quantize(bits, scale=scale, **per, grid="midrise")
            blocks = blocks_for(None, 7, shape) if "group" in per else blocks_per(per["per"], shape)
            values = documented(bytes(encode(codec, x).tolist()), bits, scale, x.numel(), blocks.count, blocks.inner)
            assert_identical(roundtrip(codec, x), torch.tensor(values).view(shape))


def test_widths_differ():
    x = gaussian(100, 100)
    errors = [(roundtrip(Quantize(bits, grid="midrise"), x) - x).norm().item() for bits in WIDTHS]
    ratios = [coarse / fine for coarse, fine in pairwise(errors)]
    assert all(1.9 < ratio < 2.4 for ratio in ratios), ratios


def test_integers_are_refused():
    with pytest.raises(CodecError) as error:
        parse('q(4, per="tensor", grid="midrise")').encode(torch.arange(4), torch.empty(4, dtype=torch.uint8), KEY)
    assert str(error.value) == (
        'q(4, per="tensor", grid="midrise") compresses floating-point tensors of at least 16 bits, got torch.int64; '
        "send this tensor with none"
    )


@pytest.mark.parametrize(
    "expression", ["q(1)", "q(4)", "q(8)", "q(4, group=5)", "q(8, step=0.2)", 'q(3, per="tensor")']
)
def test_the_bound_within_magnitudes_holds_for_smaller_tensors_and_is_near(expression):
    """A bound of four times the largest magnitude said nothing about codecs that send factors through q."""
    codec, magnitudes = parse(expression), gaussian(6, 4, 10).abs()
    within, smaller = codec.error_bound_within(magnitudes), gaussian(6, 4, 10, seed=1).clamp(-1, 1) * magnitudes
    reached = [(codec.error_bound(x) / within).max() for x in (magnitudes, -magnitudes, smaller)]
    assert 0.4 < max(reached) <= 1
