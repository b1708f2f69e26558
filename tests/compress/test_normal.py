"""Levels of examples that fit a Gaussian, near what theory allows, and the decoder in the documentation."""

import pytest
import torch
from normal import LEVELS, Normal
from rotated import Rotated

from support.codec_contract import assert_within_bound, documented
from support.codec_helpers import KEY, assert_identical, encode, gaussian, roundtrip, said_by, snr_db
from thinwire.compress.codecs.granularity import blocks_per


@pytest.mark.parametrize(("bits", "snr"), [(1, 4.40), (2, 9.30), (3, 14.62), (4, 20.22)])
def test_gaussian_rows_have_the_signal_to_noise_that_theory_allows(bits, snr):
    x = gaussian(1024, 1024)
    assert snr_db(x, roundtrip(Normal(bits), x)) == pytest.approx(snr, abs=0.03)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_rotated_rows_of_any_kind_have_it_too(bits):
    theory = (4.40, 9.30, 14.62, 20.22)[bits - 1]
    spiked = torch.where(gaussian(256, 1024, seed=1).abs() > 2.576, 20 * gaussian(256, 1024), gaussian(256, 1024))
    for x in (spiked, gaussian(256, 1024).relu()):
        assert snr_db(x, roundtrip(Rotated(f"normal.Normal({bits})"), x)) > theory - 0.1


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_levels_are_the_means_of_what_becomes_them(bits):
    """Lloyd's condition; Max's, that parts end halfway between levels, is met within 1 % of a level's distance."""
    x = gaussian(1, 2**21)
    codec = Normal(bits)
    y = roundtrip(codec, x)
    for level in LEVELS[bits]:
        scale = encode(codec, x)[:2].view(torch.bfloat16).float()
        mine = x[(y / (level * scale) - 1).abs() < 1e-5]
        assert mine.mean().item() == pytest.approx(level, rel=0.015)
        assert len(mine) > 1000
    halfway = [(low + high) / 2 for low, high in zip(LEVELS[bits], LEVELS[bits][1:], strict=False)]
    for end in halfway:
        decoded = roundtrip(codec, torch.cat([x, torch.tensor([[0.985 * end, 1.015 * end]])], 1))[0, -2:]
        assert decoded[0] < decoded[1], f"no part ends within 1.5 % of {end}"


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_the_decoder_in_the_documentation_gets_the_same_bits(bits):
    decode = documented("decode_nf")
    for shape in ((), (9,), (4, 5), (2, 3, 5), (2, 3, 2, 2)):
        x, blocks = gaussian(*shape), blocks_per("row", shape)
        values = decode(bytes(encode(Normal(bits), x).tolist()), bits, x.numel(), blocks.count, blocks.inner)
        assert_identical(roundtrip(Normal(bits), x), torch.tensor(values).view(shape))


@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1e20, 1e38])
def test_any_magnitude(magnitude):
    x = gaussian(16, 512).clamp(-3, 3)
    assert 19 < snr_db(x * magnitude, roundtrip(Normal(4), x * magnitude)) < 22


def test_a_row_below_the_smallest_scale_is_sent_as_zeros():
    x = torch.tensor([[2.0**-120, -(2.0**-126)], [2.0**-117, -(2.0**-117)]])
    y = roundtrip(Normal(2), x)
    assert not y[0].any() and y[1].all()
    assert ((y - x).abs() <= Normal(2).error_bound(x)).all()


def test_the_bound_is_reached_inside_and_outside():
    x = torch.cat([gaussian(1, 4001), torch.full((1, 1), 30.0)], 1)
    for bits in LEVELS:
        codec = Normal(bits)
        reached = (roundtrip(codec, x, KEY) - x).abs() / codec.error_bound(x)
        assert (
            reached.max() <= 1
            and reached[:, :-1][x[:, :-1].abs() < LEVELS[bits][-1]].max() > 0.95
            and reached[:, -1].max() > 0.99
        )


@pytest.mark.parametrize("bits", LEVELS)
def test_the_bound_of_a_value_far_beyond_the_last_level_counts_its_own_rounding(bits):
    """It was 0.01 too small for 1e6 in a row of 66,000 that are about 1."""
    for seed in range(20):
        x = torch.cat([gaussian(1, 66_000), 1e6 * (1 + gaussian(1, 1, seed=seed).abs())], 1)
        assert_within_bound(Normal(bits), x, roundtrip(Normal(bits), x, KEY))


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("normal.Normal(5)", "normal.Normal's bits must be an integer from 1 to 4, got 5"),
        (
            'normal.Normal(4, per="row", group=8)',
            "normal.Normal takes per or group, not both, got per='row' and group=8",
        ),
    ],
)
def test_every_mistake_has_its_sentence(expression, sentence):
    assert said_by(expression) == sentence
