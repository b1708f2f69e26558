"""The contract that every codec keeps, whatever it does inside, and the key that messages draw randomness from."""

import dataclasses
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.codec_contract import assert_exact_encoding, assert_within_bound
from support.codec_helpers import (
    EXPRESSIONS,
    FLOATING,
    KEY,
    SHAPES,
    assert_identical,
    encode,
    few,
    gaussian,
    roundtrip,
    shapes,
)
from thinwire.compress import Key, parse
from thinwire.compress.codecs.fused import cpu
from thinwire.compress.expression import CODECS

# They keep a part only, and some need a shared tensor: tests named after them hold them to a contract of their own.
PARTS = (
    'short_scales.ByteScales(4, group=16, code="entropy")',
    'topk(0.1, values="q(4)")',
    'randk(0.3, values="means(2)")',
)
"""Codecs with parts that no codec of EXPRESSIONS has."""
TESTED_ELSEWHERE = {"topk", "randk", "reuse"}
codecs = st.sampled_from(EXPRESSIONS).map(parse)
dtypes = st.sampled_from(FLOATING)


def test_every_codec_is_under_contract():
    names = {parse(expression).name for expression in EXPRESSIONS}
    assert names | TESTED_ELSEWHERE == set(CODECS), "an example of the new codec belongs into EXPRESSIONS"
    assert not names & TESTED_ELSEWHERE


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_codec_is_its_expression(expression):
    codec = parse(expression)
    assert str(codec) == repr(codec) == expression
    assert parse(str(codec)) == codec
    assert hash(parse(str(codec))) == hash(codec)
    with pytest.raises(dataclasses.FrozenInstanceError):
        codec.name = "other"


@few
@given(codec=codecs, shape=shapes, dtype=dtypes, offset=st.integers(0, 7))
def test_encode_fills_nbytes_at_any_alignment_and_nothing_else(codec, shape, dtype, offset):
    assert_exact_encoding(codec, gaussian(*shape, dtype=dtype), offset)


@few
@given(codec=codecs, shape=shapes, dtype=dtypes, seed=st.integers(0, 9), exponent=st.sampled_from([-30, -3, 0, 3, 14]))
def test_error_is_within_the_bound(codec, shape, dtype, seed, exponent):
    # fp16 holds nothing beyond 65504, and a bound is for finite values
    x = gaussian(*shape, dtype=dtype, seed=seed, scale=2.0**exponent).nan_to_num()
    assert_within_bound(codec, x, roundtrip(codec, x))


@pytest.mark.parametrize("expression", [expression for expression in EXPRESSIONS if expression != "none"])
def test_error_is_not_far_below_the_bound(expression):
    """A codec that was bypassed, or a bound that says nothing, fails here."""
    x = gaussian(8, 16, 8, 8)
    codec = parse(expression)
    error = (roundtrip(codec, x) - x).abs()
    reached = (error / codec.error_bound(x)).max().item()
    assert 0.9 < reached <= 1, f"the largest error is {reached} of the bound"
    assert error.mean() > 0


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_strides_do_not_matter(expression):
    x = gaussian(6, 4, 5, 3)
    views = (x.transpose(0, 2), x[::2], x[..., 1], x.flip(0), x[:, :1].expand(6, 4, 5, 3))
    for view in views:
        before = x.clone()
        assert_identical(encode(expression, view), encode(expression, view.contiguous()))
        assert_identical(x, before)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("default", [pytest.param(torch.float64, marks=pytest.mark.slow), torch.bfloat16])
def test_torchs_default_dtype_does_not_matter(monkeypatch, default, kernels):
    if kernels:
        monkeypatch.setattr(cpu, "LEAST_ELEMENTS", 1)
    for expression, dtype in product((*EXPRESSIONS, *PARTS), (torch.float32, torch.bfloat16)):
        x = gaussian(3, 33, 32, dtype=dtype)
        payload, decoded, bound = encode(expression, x), roundtrip(expression, x), parse(expression).error_bound(x)
        try:
            torch.set_default_dtype(default)
            assert_identical(encode(expression, x), payload)
            assert_identical(roundtrip(expression, x), decoded)
            assert_identical(parse(expression).error_bound(x), bound)
        finally:
            torch.set_default_dtype(torch.float32)


def test_the_callers_autocast_does_not_matter():
    x = gaussian(3, 33, 32)
    payloads = {expression: encode(expression, x) for expression in (*EXPRESSIONS, *PARTS)}
    with torch.autocast("cpu", torch.bfloat16):
        for expression, payload in payloads.items():
            assert_identical(encode(expression, x), payload)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_single_element_may_have_any_stride(expression):
    """torch counts it as contiguous, whatever its stride."""
    x, out = torch.arange(1.0, 3.0)[::2], torch.full((2,), 77.0)[::2]
    payload = encode(expression, x)
    assert_identical(payload, encode(expression, x.clone()))
    parse(expression).decode(payload, out, KEY)
    assert_identical(out, roundtrip(expression, x.clone()))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_tensors_in_a_graph_are_taken_and_left_as_they_are(expression):
    x = gaussian(3, 4).requires_grad_()
    hidden = x * 2
    with torch.autograd.graph.saved_tensors_hooks(pytest.fail, pytest.fail):
        payload = encode(expression, hidden)
    assert_identical(payload, encode(expression, hidden.detach()))
    assert hidden.grad_fn is not None and not parse(expression).error_bound(hidden).requires_grad
    out = torch.empty(3, 4, requires_grad=True)
    parse(expression).decode(payload, out, KEY)
    assert_identical(out.detach(), roundtrip(expression, hidden.detach()))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_only_the_key_makes_payloads_differ(expression):
    x = gaussian(40, 50)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    payload = encode(expression, x)
    assert_identical(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert_identical(encode(expression, x), payload)
    other = encode(expression, x, KEY._replace(microbatch=4))
    assert torch.equal(other, payload) == ("stochastic" not in expression)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_what_is_not_finite_spoils_its_block_and_no_other(expression):
    codec = parse(expression)
    for dtype, value in product(FLOATING, [torch.nan, torch.inf, -torch.inf]):
        x = gaussian(3, 4, 30, dtype=dtype)
        clean = roundtrip(codec, x)
        x[1, 2, 29] = value
        y = roundtrip(codec, x)
        spared = x.isfinite() & codec.error_bound(x).isfinite()
        assert 'per="tensor"' in expression or spared.sum() >= 2 * 4 * 30, (dtype, value)
        assert_identical(y.isfinite(), spared)
        assert_identical(y[spared], clean[spared])


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_zeros_come_back_as_zeros(expression):
    for shape in SHAPES:
        assert_identical(roundtrip(expression, torch.zeros(shape)), torch.zeros(shape))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_payload_or_a_tensor_of_the_wrong_kind_is_our_own_error(expression):
    codec, x = parse(expression), gaussian(3, 4)
    payload = encode(codec, x)
    with pytest.raises(AssertionError, match="needs"):
        codec.encode(x, torch.empty(len(payload) + 1, dtype=torch.uint8), KEY)
    with pytest.raises(AssertionError, match="needs"):
        codec.decode(payload[:-1], torch.empty(3, 4), KEY)
    with pytest.raises(AssertionError, match="bytes"):
        codec.decode(payload.int(), torch.empty(3, 4), KEY)
    with pytest.raises(AssertionError, match="contiguous"):
        codec.decode(payload, torch.empty(4, 3).T, KEY)


def test_a_key_seeds_alike_in_every_process():
    cpu = torch.device("cpu")
    assert KEY.number == KEY.generator().initial_seed() == 14401802116347193703
    assert_identical(torch.rand(4, generator=KEY.generator()), torch.rand(4, generator=KEY.generator()))
    words = KEY.words(cpu)
    assert_identical(torch.cat([words(3), words(2)]), KEY.words(cpu)(5))


def test_every_field_of_a_key_matters():
    others = [KEY._replace(**{name: "x" if kind is str else 9}) for name, kind in Key.__annotations__.items()]
    numbers = {key.number for key in [KEY, *others]}
    assert len(numbers) == 1 + len(Key._fields)
