"""How much codecs lose, against what is known of them."""

import math

import pytest
import torch

from support.codec_helpers import gaussian
from thinwire.compress import parse
from thinwire.compress.measured import contraction, swamped


@pytest.mark.parametrize("fraction", [0.5, 0.1, 0.02])
def test_topk_loses_sqrt_of_one_minus_k_over_n_of_a_constant_and_less_of_anything_else(fraction):
    codec = parse(f"topk({fraction})")
    expected = math.sqrt(1 - fraction)
    assert contraction(codec, torch.full((4, 100), -3.0)) == pytest.approx(expected, rel=1e-12)
    assert 0.3 * expected < contraction(codec, gaussian(4, 100)) < expected


def test_one_bit_with_minmax_is_not_contractive():
    """EF21 and AQ-SGD around it never converge."""
    assert contraction(parse('q(1, scale="minmax", per="tensor")'), gaussian(64, 1024)) > 2
    assert contraction(parse('q(1, scale="minmax")'), gaussian(64, 1024)) > 1


@pytest.mark.parametrize(
    ("expression", "least", "most"),
    [
        ("none", 0.0, 0.0),
        ("fp16", 1e-5, 2**-11),
        ("fp8", 0.02, 0.03),
        ('q(8, grid="midrise")', 0.007, 0.009),
        ('q(4, grid="midrise")', 0.12, 0.13),
        ('q(2, grid="midrise")', 0.49, 0.52),
        ("randk(0.25, scaled=False)", 0.85, 0.88),
        ("randk(0.25)", 1.7, 1.77),
    ],
)
def test_contraction_of_gaussian_rows_of_1024(expression, least, most):
    for dtype in (torch.float32, torch.bfloat16):
        x = gaussian(64, 1024, dtype=dtype)
        if dtype == torch.float32 or expression != "fp16":  # which returns bf16 numbers of this size as they are
            assert least <= contraction(parse(expression), x) <= most


def test_zeros_and_nothing_lose_nothing():
    for shape in ((3, 4), (0, 4), ()):
        assert contraction(parse("q(1)"), torch.zeros(shape)) == 0


def test_what_is_not_finite_has_no_contraction():
    assert math.isnan(contraction(parse('q(4, grid="midrise")'), torch.tensor([1.0, torch.nan])))


def test_the_tensor_is_left_as_it_is():
    x = gaussian(4, 6).t().requires_grad_()
    before = x.detach().clone()
    assert isinstance(contraction(parse('q(4, grid="midrise")'), x), float)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("expression", "least", "most"),
    [
        ('q(8, per="channel", grid="midrise")', 0.95, 0.98),
        ('q(8, per="channel", round="stochastic")', 0.95, 0.98),
        ('q(8, per="channel", grid="midtread")', 0.0, 0.01),
        ('q(8, grid="midrise")', 0.0, 0.01),
        ("topk(0.1)", 0.0, 0.0),
        ("fp8", 0.0, 0.0),
        ("none", 0.0, 0.0),
    ],
)
def test_elements_that_a_codec_changes_beyond_their_size_are_counted(expression, least, most):
    """One row of 64 has nearly all of the norm, as the token that a classifier reads."""
    x = gaussian(64, 256)
    x[1:] *= 1e-4
    codec = parse(expression)
    assert least <= swamped(codec, x) <= most
    assert contraction(codec, x) < 1
