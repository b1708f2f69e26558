"""Sums of codecs: each codec sends what those before it have lost."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.codec_contract import assert_contract
from support.codec_helpers import (
    FLOATING,
    KEY,
    assert_identical,
    decode,
    encode,
    few,
    gaussian,
    roundtrip,
    said_by,
    shapes,
    snr_db,
)
from thinwire.compress import CodecError, Key, check, parse

SUMS = [
    "q(2) + q(1)",
    "lowrank(3) + q(1)",
    "q(1) + lowrank(2)",
    'topk(0.1, values="q(4)") + q(2, clip="mse")',
    "randk(0.3) + randk(0.2)",
    'q(3, scale="minmax") + dither(3) + fp16',
    'lowrank(2, values="q(4)", per="sample") + nf(2, rotate="hadamard")',
]
CODED = [
    'lowrank(2) + q(2, code="entropy")',
    'topk(0.1, code="entropy") + q(1)',
    'q(2, code="entropy") + bf16(code="entropy") + q(3)',
]
sums = pytest.mark.parametrize("expression", [*SUMS, *CODED])


@sums
def test_a_sum_keeps_every_rule_of_codecs(expression):
    codec = parse(expression)
    assert str(codec) == repr(codec) == expression
    assert parse(str(codec)) == codec and hash(parse(str(codec))) == hash(codec)
    check(codec)


@few
@given(
    expression=st.sampled_from(SUMS),
    shape=shapes,
    dtype=st.sampled_from(FLOATING),
    offset=st.integers(0, 7),
    exponent=st.sampled_from([-30, 0, 12]),
)
def test_contract(expression, shape, dtype, offset, exponent):
    assert_contract(parse(expression), gaussian(*shape, dtype=dtype, scale=2.0**exponent), offset)


@pytest.mark.parametrize("dtype", FLOATING)
def test_a_payload_is_those_of_the_codecs_and_the_values_add_up(dtype):
    first, second = parse("q(3)"), parse("topk(0.2)")
    x = gaussian(6, 50, dtype=dtype)
    one = roundtrip(first, x)
    rest = x.float() - one.float()
    assert_identical(encode("q(3) + topk(0.2)", x), torch.cat([encode(first, x), encode(second, rest)]))
    expected = (one.float() + roundtrip(second, rest)).to(dtype)
    assert_identical(roundtrip("q(3) + topk(0.2)", x), expected)


def test_the_bound_is_reached():
    x = gaussian(8, 16, 8, 8)
    codec = parse('q(2, grid="midrise") + q(2, grid="midrise")')
    error = (roundtrip(codec, x) - x).abs()
    assert 0.9 < (error / codec.error_bound(x)).max() <= 1
    assert abs(snr_db(x, roundtrip(codec, x)) - snr_db(x, roundtrip('q(4, grid="midrise")', x))) < 0.3, (
        "two bits and two make four"
    )


def test_each_codec_draws_numbers_of_its_own():
    """With the same numbers the second randk would send zeros."""
    x = gaussian(4, 100)
    sent = roundtrip("randk(0.3) + randk(0.2)", x).count_nonzero()
    assert sent > 4 * 30
    keys = [dataclasses.replace(KEY, step=step) for step in range(400)]
    mean = torch.stack([roundtrip('q(1) + q(2, round="stochastic")', x, key=key) for key in keys]).mean(0)
    assert (mean - x).abs().max() < 0.35 * (roundtrip("q(1)", x) - x).abs().max()


def test_factors_and_the_rest_draw_different_numbers():
    """Both had those of part 1, so the rest was rounded with the numbers that had rounded Q."""
    drawn = []

    class Spied(Key):
        def words(self, device):
            drawn.append(self.number)
            return super().words(device)

    codec = parse('lowrank(2, values="q(4, round=\\"stochastic\\")") + q(1, round="stochastic")')
    encode(codec, gaussian(4, 100), key=Spied(*dataclasses.astuple(KEY)))
    assert len(drawn) == len(set(drawn)) == 3


def test_a_lowrank_inside_starts_from_its_last_message():
    codec, plain = parse("q(1) + lowrank(2)"), parse("lowrank(2)")
    x = gaussian(20, 10)
    payload = encode(codec, x)
    shared = codec.next_shared(payload, x.shape, x.dtype)
    size = parse("q(1)").nbytes(x.shape, x.dtype)
    assert_identical(shared, plain.next_shared(payload[size:], x.shape, torch.float32))
    again = torch.empty_like(payload)
    codec.encode(x, again, KEY, shared)
    assert not torch.equal(again, payload)
    better = snr_db(x, decode(codec, again, x.shape, x.dtype)) - snr_db(x, decode(codec, payload, x.shape, x.dtype))
    assert better > 0.1, "a step of the power iteration"


def test_what_varies_is_sent_without_gaps():
    codec, x = parse('q(4, code="entropy") + q(2)'), gaussian(64, 512)
    payload = encode(codec, x)
    used = codec.used(payload)
    first = encode('q(4, code="entropy")', x)
    assert used == 4 + parse('q(4, code="entropy")').used(first) + parse("q(2)").nbytes(x.shape, x.dtype)
    assert used < len(payload) - 1000 and not payload[used:].any()
    payload[0] += 1
    with pytest.raises(CodecError, match="must end where it says"):
        decode(codec, payload, x.shape, x.dtype)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_spoils_its_block_and_no_other(value):
    codec, x = parse("q(2) + q(1)"), gaussian(3, 4, 30)
    clean = roundtrip(codec, x)
    x[1, 2, 29] = value
    y = roundtrip(codec, x)
    assert not y[1, 2].isfinite().any() and not codec.error_bound(x)[1, 2].isfinite().any()
    y[1, 2] = clean[1, 2]
    assert_identical(y, clean)


@pytest.mark.parametrize("first", ['q(3, clip="mse")', 'q(2, grid="auto")', 'nf(3, rotate="hadamard")', "fp8"])
@pytest.mark.parametrize("second", ["topk(0.2)", 'topk(0.2, values="q(4)")', "q(4, outliers=0.1)", "lowrank(2)"])
def test_a_bound_for_smaller_tensors_holds_for_all_of_them(first, second):
    """What a sum relies on: the bound of a second codec, from no more than magnitudes."""
    for expression in (first, second):
        codec = parse(expression)
        x = gaussian(6, 40)
        x[0, :3] = torch.tensor([30.0, -20.0, 0.0])
        bound = codec.error_bound_within(x.abs()).expand(x.shape)
        for smaller in (x, -x, x * 0.5, x * (gaussian(6, 40, seed=1) > 1), x.abs(), x.clamp(-1, 1)):
            assert ((roundtrip(codec, smaller) - smaller).abs() <= bound).all(), expression


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("none + q(1)", "none loses nothing, so write none alone, not none + q(1)"),
        ("q(1) + reuse", "reuse cannot be part of a sum, got q(1) + reuse"),
        ("lowrank(1) + lowrank(2)", "only one codec of a sum may be a lowrank, got lowrank(1) + lowrank(2)"),
        (
            "q(4) + ef(q(1))",
            "'q(4) + ef(q(1))': ef cannot be part of a sum; write it around the sum, such as ef(lowrank(16) + q(1))",
        ),
        (
            "efmixed(topk(0.1) + q(1))",
            "efmixed chooses the indices itself, so it goes around topk only, got topk(0.1) + q(1)",
        ),
        ("q(4) - q(1)", "'q(4) - q(1)' is not a codec: write a name or a call, such as none or q(4)"),
    ],
)
def test_every_mistake_has_its_sentence(expression, sentence):
    assert said_by(expression) == sentence


def test_a_sum_is_flat_and_goes_into_feedback():
    assert parse("q(2) + (q(1) + fp8)") == parse("(q(2) + q(1)) + fp8") == parse("q(2)+q(1)+fp8")
    assert str(parse("ef(lowrank(16)+q(1), slot='sample')")) == 'ef(lowrank(16) + q(1), slot="sample")'
    with pytest.raises(CodecError, match="reuse needs topk or randk"):
        parse("reuse").bound_to(parse("topk(0.1) + q(1)"))
