"""q's option allocate: which groups get how many bits, what that gains, and that no payload grows by it."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.codec_contract import assert_contract, documented
from support.codec_helpers import FLOATING, assert_identical, encode, few, gaussian, roundtrip, shapes, snr_db
from thinwire.compress import CodecError, parse
from thinwire.compress.codecs.allocation import allocated_bits
from thinwire.compress.codecs.quantize import Quantize

allocating = st.builds(
    Quantize,
    st.integers(2, 7),
    group=st.sampled_from([8, 16, 64]),
    allocate=st.just("scale"),
    grid=st.sampled_from(["midrise", "midtread", "auto"]),
    rotate=st.sampled_from([None, "hadamard"]),
    outliers=st.sampled_from([None, 0.1]),
) | st.builds(Quantize, st.integers(2, 7), group=st.just(8), allocate=st.just("scale"), scale_bits=st.just(8))


def uneven(*shape):
    """Gaussian rows, each of another magnitude."""
    return gaussian(*shape) * 2 ** (2 * gaussian(*shape[:-1], 1, seed=1))


@settings(few, max_examples=100)
@given(codec=allocating, shape=shapes, dtype=st.sampled_from(FLOATING), offset=st.integers(0, 7))
def test_contract(codec, shape, dtype, offset):
    assert parse(str(codec)) == codec
    assert_contract(codec, gaussian(*shape, dtype=dtype), offset)
    if torch.Size(shape).numel() % 64 == 0:
        plain = parse(str(codec).replace(', allocate="scale"', ""))
        assert codec.nbytes(shape, dtype) == plain.nbytes(shape, dtype)


def test_a_group_may_be_larger_than_what_is_measured_at_a_time():
    """A group of more than 2^20 elements was measured in parts, which gave more scales than groups."""
    x = torch.cat([gaussian(1 << 21), 100 * gaussian(1 << 21, seed=1)])
    y = roundtrip('q(4, group=2097152, allocate="scale", grid="midrise")', x)
    assert snr_db(x, y) > snr_db(x, roundtrip('q(4, group=2097152, grid="midrise")', x)) > 14
    alone = roundtrip('q(4, group=4194304, allocate="scale", grid="midrise")', x[: 1 << 21])
    assert_identical(alone, roundtrip('q(4, group=4194304, grid="midrise")', x[: 1 << 21]))


@pytest.mark.parametrize(
    ("scales", "bits", "expected"),
    [
        ([1.0, 1.0, 1.0], 4, [4, 4, 4]),
        ([2.0, 1.0, 1.0], 4, [5, 4, 3]),  # the second group's last bit is worth as much as the third's, and it is first
        ([4.0, 1.0], 4, [5, 3]),
        ([4.0, 1.0], 5, [6, 4]),
        ([1.0, 4.0, 0.0, 4.0], 2, [1, 3, 1, 3]),
        ([1024.0, 1.0], 7, [8, 6]),
        ([1e30, 1.0, 1.0], 3, [7, 1, 1]),
        ([torch.nan, 1.0, torch.inf, 1.0], 3, [1, 5, 1, 5]),
        ([-4.0, 1.0], 4, [5, 3]),
    ],
)
def test_twice_the_scale_is_worth_a_bit(scales, bits, expected):
    assert allocated_bits(torch.tensor(scales).bfloat16().unsqueeze(1), bits).tolist() == expected


@pytest.mark.parametrize("bits", range(2, 8))
@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_all_bits_are_given_and_larger_scales_get_no_fewer(bits, count):
    scales = (2 ** (3 * gaussian(count, 1))).bfloat16()
    allocated = allocated_bits(scales, bits)
    assert allocated.sum() == bits * count
    by_scale = [allocated[scales.view(-1) == scale] for scale in scales.unique()]
    for smaller, larger in pairwise(by_scale):
        assert smaller.max() <= larger.min()
    assert allocated.min() >= 1 and allocated.max() <= 8


def test_groups_of_one_scale_are_sent_as_without_the_option():
    x = gaussian(64, 64)
    x[:, 0] = 4.0
    assert_identical(
        encode('q(4, group=64, allocate="scale", grid="midrise")', x), encode('q(4, group=64, grid="midrise")', x)
    )


@pytest.mark.parametrize(("bits", "gain"), [(2, 5), (4, 7), (6, 5)])
def test_rows_of_unlike_magnitude_gain_and_like_ones_lose_nothing(bits, gain):
    for x, least, most in ((uneven(512, 64), gain, 16), (gaussian(512, 64), -0.1, 0.5)):
        plain, allocated = (Quantize(bits, group=64, allocate=allocate, grid="midrise") for allocate in (None, "scale"))
        gained = snr_db(x, roundtrip(allocated, x)) - snr_db(x, roundtrip(plain, x))
        assert least < gained < most, f"{gained:.2f} dB"


@pytest.mark.parametrize("bits", [2, 3, 5, 7])
@pytest.mark.parametrize("shape", [(8,), (3, 16), (4, 5, 8), (2, 3, 4, 4), (100,)])
def test_the_decoder_in_the_documentation_gets_the_same_bits(bits, shape):
    x, group = uneven(*shape), 8
    payload = bytes(encode(Quantize(bits, group=group, allocate="scale", grid="midrise"), x).tolist())
    values = documented("decode_allocated")(payload, bits, x.numel(), group)
    assert_identical(
        roundtrip(Quantize(bits, group=group, allocate="scale", grid="midrise"), x), torch.tensor(values).view(shape)
    )


def test_groups_are_coded_alike_whatever_part_they_lie_in(monkeypatch):
    x, codec = uneven(100, 64), 'q(3, group=16, allocate="scale", grid="midrise")'
    payload, decoded = encode(codec, x), roundtrip(codec, x)
    monkeypatch.setattr("thinwire.compress.codecs.allocation._PART", 100)
    assert_identical(encode(codec, x), payload)
    assert_identical(roundtrip(codec, x), decoded)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_spoils_its_group_and_no_other(value):
    x, codec = uneven(4, 32), parse('q(4, group=8, allocate="scale", grid="midrise")')
    x[1, 9] = value
    y = roundtrip(codec, x)
    spoiled = torch.zeros(4, 32, dtype=torch.bool)
    spoiled[1, 8:16] = True
    assert_identical(y.isfinite(), ~spoiled)
    assert ((y - x).abs() <= codec.error_bound(x))[~spoiled].all()


def test_zeros_come_back_as_zeros():
    assert_identical(roundtrip('q(4, group=8, allocate="scale", grid="midrise")', torch.zeros(3, 7)), torch.zeros(3, 7))


def test_strides_do_not_matter():
    x, codec = gaussian(6, 4, 5, 3), 'q(4, group=8, allocate="scale", grid="midrise")'
    for view in (x.transpose(0, 2), x[::2], x[..., 1], x.flip(0), x[:, :1].expand(6, 4, 5, 3)):
        assert_identical(encode(codec, view), encode(codec, view.contiguous()))


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ('q(4, group=8, allocate="all", grid="midrise")', 'q\'s allocate must be one of "scale", got "all"'),
        (
            'q(4, allocate="scale")',
            'q\'s allocate needs a group of a multiple of 8 elements, and 2 to 7 bits, got q(4, allocate="scale")',
        ),
        (
            'q(8, group=12, allocate="scale")',
            "q's allocate needs a group of a multiple of 8 elements, and 2 to 7 bits, "
            'got q(8, group=12, allocate="scale")',
        ),
        (
            'q(4, group=8, round="stochastic", allocate="scale")',
            'q\'s allocate is for scale="absmax" and round="nearest" without clip and code, '
            'got q(4, group=8, round="stochastic", allocate="scale")',
        ),
    ],
)
def test_a_mistake_has_its_sentence(expression, sentence):
    with pytest.raises(CodecError) as error:
        parse(expression)
    assert str(error.value) == sentence
