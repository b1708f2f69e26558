"""q's option grid: the points, which side is longer, what zeros gain, and which grid a block chooses."""

import pytest
import torch

from support.codec_contract import documented
from support.codec_helpers import assert_identical, encode, gaussian, roundtrip, snr_db
from thinwire.compress.codecs.granularity import blocks_per
from thinwire.compress.codecs.quantize import Quantize


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_points_are_multiples_of_a_step_from_the_largest_to_one_short_of_it(bits, sign):
    half = 2 ** (bits - 1)
    points = sign * torch.arange(half, -half, -1) / half
    assert_identical(roundtrip(Quantize(bits, grid="midtread"), points), points)


def test_the_grid_is_the_published_one_where_the_largest_is_negative():
    """AC-SGD's code: multiples of s/2**(b-1), none of which is +s, so that s must be no positive value's."""
    x = gaussian(64, 300)
    x[:, 0] = -8.0
    theirs = torch.round(x / 8.0 * 4).clip(-4, 3) / 4 * 8.0
    assert_identical(roundtrip('q(3, grid="midtread")', x), theirs)


@pytest.mark.parametrize(
    ("bits", "midrise", "midtread", "clipped"), [(2, 0.4, 6.5, 10.5), (3, 6.4, 12.5, 14.9), (4, 12.5, 18.5, 19.7)]
)
def test_what_rows_after_a_relu_gain(bits, midrise, midtread, clipped):
    x = gaussian(512, 1024).relu()
    for codec, expected in (
        (Quantize(bits, grid="midrise"), midrise),
        (Quantize(bits, grid="midtread"), midtread),
        (Quantize(bits, grid="midtread", clip="mse"), clipped),
    ):
        assert snr_db(x, roundtrip(codec, x)) == pytest.approx(expected, abs=0.15)
    y = roundtrip(Quantize(bits, grid="midtread"), x)
    assert not y[x == 0].any()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("tensor", ["gaussian", "relu", "spikes", "uniform"])
def test_auto_is_as_good_as_the_better_grid(tensor, bits):
    x = gaussian(64, 1000)
    x = {
        "gaussian": x,
        "relu": x.relu(),
        "spikes": torch.where(gaussian(64, 1000, seed=1).abs() > 2.576, 20 * x, x),
        "uniform": torch.erf(x / 2**0.5),
    }[tensor]
    snr = {grid: snr_db(x, roundtrip(Quantize(bits, grid=grid), x)) for grid in ("midrise", "midtread", "auto")}
    assert snr["auto"] > max(snr["midrise"], snr["midtread"]) - 0.1, snr


def test_auto_chooses_for_each_block():
    x = torch.stack([gaussian(256).relu(), torch.tensor([-0.25, 0.75, -0.75, 0.25]).repeat(64)])
    scales = encode('q(2, grid="auto")', x)[:4].view(torch.int16)
    assert (scales & 1).tolist() == [0, 1]
    assert (
        snr_db(x[1], roundtrip('q(2, grid="auto")', x)[1]) > snr_db(x[1], roundtrip('q(2, grid="midtread")', x)[1]) + 3
    )


@pytest.mark.parametrize("grid", ["midtread", "auto"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_the_decoder_in_the_documentation_gets_the_same_bits(grid, bits):
    decode = documented("decode_with_zero")
    for shape in ((), (9,), (4, 5), (2, 3, 5), (2, 3, 2, 2)):
        x, codec, blocks = gaussian(*shape), Quantize(bits, grid=grid), blocks_per("row", shape)
        x = torch.where(x.abs() < 0.6, 0.0, x)
        values = decode(bytes(encode(codec, x).tolist()), bits, grid == "auto", x.numel(), blocks.count, blocks.inner)
        assert_identical(roundtrip(codec, x), torch.tensor(values).view(shape))


@pytest.mark.parametrize("grid", ["midtread", "auto"])
def test_with_outliers(grid):
    x = gaussian(32, 512).relu()
    plain = snr_db(x, roundtrip(Quantize(3, grid=grid), x))
    assert snr_db(x, roundtrip(Quantize(3, grid=grid, outliers=0.01), x)) > plain + 1
