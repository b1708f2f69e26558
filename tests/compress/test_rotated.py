"""Rotated rows, of examples: the transform against its matrix, its arithmetic bit by bit, what it buys and costs."""

import pytest
import rotated as module
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rotated import Rotated, pieces, signs, turn, turn_back_

from support.codec_contract import assert_contract, documented
from support.codec_helpers import FLOATING, KEY, assert_identical, encode, few, gaussian, roundtrip, shapes, snr_db
from thinwire.compress import CodecError, parse
from thinwire.compress.codecs.quantize import Quantize

plain = st.builds(
    Quantize,
    st.integers(1, 8),
    scale=st.sampled_from(["absmax", "minmax"]),
    per=st.sampled_from(["tensor", "sample", "row", "channel"]),
    round=st.sampled_from(["nearest", "stochastic"]),
) | st.builds(Quantize, st.integers(1, 8), group=st.integers(1, 40))
Q4 = Rotated('q(4, grid="midrise")')


def hadamard(size):
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def with_outliers(rows, n):
    """Return Gaussian rows with twenty times as much in one element of a hundred."""
    x = gaussian(rows, n)
    x[torch.rand(rows, n, generator=torch.Generator().manual_seed(1)) < 0.01] *= 20
    return x


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (1, [(0, 1)]),
        (2, [(0, 2)]),
        (7, [(0, 4), (4, 2), (6, 1)]),
        (768, [(0, 512), (512, 256)]),
        (1024, [(0, 1024)]),
        (1025, [(0, 1024), (1024, 1)]),
    ],
)
def test_pieces(n, expected):
    assert list(pieces(n)) == expected


def test_signs_are_one_constant_stream():
    assert "".join("+-"[sign < 0] for sign in signs(32).tolist()) == "--+-+++-++---+-+++-+-++-+-+-++++"
    for n in (1, 7, 8, 9, 1000):
        assert_identical(signs(n), signs(4096)[:n])
    assert 1900 < (signs(4096) < 0).sum() < 2200
    assert set(signs(4096).tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize("n", [1, 4, 16, 64, 256, 1024])
def test_a_row_is_turned_by_the_walsh_hadamard_matrix(n):
    """These roots are powers of two, and these numbers small integers: nothing is rounded."""
    x = torch.randint(-50, 50, (5, n), generator=torch.Generator().manual_seed(0)).float()
    expected = (x.double() * signs(n)) @ hadamard(n) / n**0.5
    turned = turn(x)
    assert_identical(turned, expected.float())
    turn_back_(turned)
    assert_identical(turned, x)


@pytest.mark.parametrize("n", [7, 768, 1000])
def test_pieces_are_turned_one_by_one(n):
    x = gaussian(3, n)
    for start, size in pieces(n):
        part = (x[:, start : start + size].double() * signs(n)[start : start + size]) @ hadamard(size) / size**0.5
        torch.testing.assert_close(turn(x)[:, start : start + size], part.float(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("n", [1, 3, 64, 768, 1023, 4096])
def test_turning_keeps_lengths_and_turning_back_undoes_it(n):
    x = gaussian(50, n)
    turned = turn(x)
    torch.testing.assert_close(turned.norm(dim=1), x.norm(dim=1), rtol=1e-6, atol=0)
    turn_back_(turned)
    torch.testing.assert_close(turned, x, rtol=0, atol=4e-6)


@pytest.mark.parametrize("n", [1, 2, 7, 32, 128, 96, 512])
def test_the_decoder_in_the_documentation_gets_the_same_bits(n):
    """It is sums and differences in float32 and one product, nothing that a machine could do otherwise."""
    x = gaussian(6, n)
    x[::2] *= 2.0**104
    expected = [documented("turn_back")(row) for row in x.tolist()]
    turn_back_(x)
    assert_identical(x, torch.tensor(expected))


def test_rows_are_decoded_alike_alone_and_among_others(monkeypatch):
    codec = Q4
    x = gaussian(300, 768)
    y = roundtrip(codec, x)
    assert_identical(y[200:203], roundtrip(codec, x[200:203]))
    monkeypatch.setattr(module, "_CHUNK", 1000)
    assert_identical(roundtrip(codec, x), y)


@pytest.mark.slow
@settings(few, max_examples=60)
@given(plain=plain, shape=shapes, dtype=st.sampled_from(FLOATING), offset=st.integers(0, 7))
def test_contract(plain, shape, dtype, offset):
    codec = Rotated(str(plain))
    assert parse(str(codec)) == codec
    assert_contract(codec, gaussian(*shape, dtype=dtype), offset)
    assert codec.nbytes(shape, dtype) == plain.nbytes(shape, dtype)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_errors_that_conspire_reach_the_bound(bits):
    """Turned, all elements but one are 0, where two intervals meet: every error is half an interval up."""
    codec, x = Rotated(f'q({bits}, grid="midrise")'), torch.eye(1, 1024)
    turn_back_(x)
    reached = ((roundtrip(codec, x) - x).abs() / codec.error_bound(x)).max().item()
    assert 0.95 < reached <= 1, reached


@pytest.mark.parametrize("n", [1024, 768, 196])
def test_rows_with_outliers_gain_and_even_rows_lose_nothing(n):
    outliers, even, positive = with_outliers(256, n), gaussian(256, n), gaussian(256, n).relu()
    for x, least, most in ((outliers, 12, 20), (even, -0.3, 0.3), (positive, 4, 7)):
        gain = snr_db(x, roundtrip(Q4, x)) - snr_db(x, roundtrip('q(4, grid="midrise")', x))
        assert least < gain < most, f"{gain:.2f} dB"
    assert snr_db(outliers, roundtrip(Q4, outliers)) > 18


def test_an_outlier_in_a_piece_of_its_own_stays_where_it_is():
    """The price of changing no size: 1025 = 1024 + 1."""
    x = gaussian(64, 1025)
    x[:, -1] *= 50
    snr = [snr_db(x[:, :-1], roundtrip(codec, x)[:, :-1]) for codec in (Quantize(4, grid="midrise"), Q4)]
    assert snr[1] < snr[0] + 1


def test_constant_and_periodic_rows_are_not_gathered_into_one_element():
    """Without random signs the first row would turn into a single spike."""
    for x in (torch.ones(4, 1024), torch.tensor([1.0, -1.0]).repeat(4, 512)):
        assert turn(x).abs().max() < 5


def test_stochastic_rounding_stays_unbiased():
    repeats = 20_000
    values = gaussian(16)
    mean = roundtrip(Rotated('q(2, round="stochastic")'), values.expand(repeats, 16)).double().mean(0)
    step = Quantize(2, round="stochastic").error_bound(turn(values.view(1, 16)))[0]
    deviation = (mean - values).abs() / (step / 2 / repeats**0.5)
    assert deviation.max() < 4.5, f"{deviation.max():.1f} standard errors"


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_spoils_its_row_and_no_other(value):
    x = gaussian(3, 4, 32)
    clean = roundtrip(Q4, x)
    x[1, 2, 31] = value
    y = roundtrip(Q4, x)
    spoiled = torch.zeros(3, 4, 32, dtype=torch.bool)
    spoiled[1, 2] = True
    assert_identical(y.isfinite(), ~spoiled)
    assert_identical(y[~spoiled], clean[~spoiled])
    assert_identical(Q4.error_bound(x).isfinite(), ~spoiled)


@pytest.mark.parametrize("magnitude", [1e-34, 1e-10, 1e6, 1e30, 1.2e37, 5e37])
def test_any_magnitude(magnitude):
    """On the way back, sums of 1024 elements are 32 times as large as the result, and beyond float32 from 1e37 on."""
    x = gaussian(16, 1024, scale=magnitude)
    assert 17 < snr_db(x, roundtrip(Q4, x)) < 19


def test_strides_do_not_matter():
    x = gaussian(6, 4, 5, 3)
    for view in (x.transpose(0, 2), x[::2], x[..., 1], x.flip(0), x[:, :1].expand(6, 4, 5, 3)):
        codec = Q4
        assert_identical(encode(codec, view), encode(codec, view.contiguous()))


def test_zeros_come_back_as_zeros():
    assert_identical(roundtrip(Q4, torch.zeros(3, 7)), torch.zeros(3, 7))


def test_what_cannot_be_rotated_has_its_sentence():
    with pytest.raises(CodecError) as error:
        Rotated("ef(q(4))")
    assert str(error.value) == "rotated.Rotated takes a codec without feedback or reuse, got ef(q(4))"


def test_tensors_in_a_graph():
    x = gaussian(3, 8).requires_grad_()
    codec = Q4
    assert not codec.error_bound(x * 2).requires_grad
    assert_identical(encode(codec, x * 2, KEY), encode(codec, x.detach() * 2, KEY))
