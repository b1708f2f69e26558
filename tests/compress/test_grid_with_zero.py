"""q's option grid: the points, which side is longer, and what zeros gain."""

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


@pytest.mark.parametrize(("bits", "midrise", "midtread"), [(2, 0.4, 6.5), (3, 6.4, 12.5), (4, 12.5, 18.5)])
def test_what_rows_after_a_relu_gain(bits, midrise, midtread):
    x = gaussian(512, 1024).relu()
    for codec, expected in ((Quantize(bits, grid="midrise"), midrise), (Quantize(bits, grid="midtread"), midtread)):
        assert snr_db(x, roundtrip(codec, x)) == pytest.approx(expected, abs=0.15)
    y = roundtrip(Quantize(bits, grid="midtread"), x)
    assert not y[x == 0].any()


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_decoder_in_the_documentation_gets_the_same_bits(bits):
    decode = documented("decode_with_zero")
    for shape in ((), (9,), (4, 5), (2, 3, 5), (2, 3, 2, 2)):
        x, codec, blocks = gaussian(*shape), Quantize(bits, grid="midtread"), blocks_per("row", shape)
        x = torch.where(x.abs() < 0.6, 0.0, x)
        values = decode(bytes(encode(codec, x).tolist()), bits, False, x.numel(), blocks.count, blocks.inner)
        assert_identical(roundtrip(codec, x), torch.tensor(values).view(shape))
