"""topk and what it shares with randk: payloads, expressions, bounds from both sides, what feedback asks for."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.codec_contract import assert_exact_encoding, assert_within_bound
from support.codec_helpers import (
    FLOATING,
    KEY,
    SHAPES,
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
from support.sparse_cases import CODECS, FORMATS, key_of, sent_through
from thinwire.compress import CodecError, parse
from thinwire.compress.codecs import indices
from thinwire.compress.codecs.indices import indices_size, put_values, values_at
from thinwire.compress.codecs.reuse import BoundReuse, Reuse
from thinwire.compress.codecs.sparse import RandK, TopK, mixed_indices

codecs = st.sampled_from(CODECS)
dtypes = st.sampled_from(FLOATING)


@pytest.mark.parametrize("codec", CODECS)
def test_a_codec_is_its_expression(codec):
    assert str(codec) == repr(codec)
    assert parse(str(codec)) == codec and hash(parse(str(codec))) == hash(codec)


@pytest.mark.parametrize(
    ("codec", "written"),
    [
        (TopK(0.1), "topk(0.1)"),
        (TopK(1), "topk(1.0)"),
        (TopK(1e-5, values="fp16"), 'topk(1e-05, values="fp16")'),
        (RandK(0.1, values="q(8)"), 'randk(0.1, values="q(8)")'),
        (TopK(0.1, per="row"), 'topk(0.1, per="row")'),
        (RandK(0.1).unscaled(), "randk(0.1, scaled=False)"),
        (TopK(0.1).unscaled(), "topk(0.1)"),
        (Reuse(), "reuse"),
        (Reuse().bound_to(TopK(0.1)), "reuse"),
    ],
)
def test_writing(codec, written):
    assert str(codec) == repr(codec) == written


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("topk(0)", "topk's fraction must be above 0 and at most 1, got 0"),
        ("topk(-0.1)", "topk's fraction must be above 0 and at most 1, got -0.1"),
        ("topk(10)", "topk's fraction must be above 0 and at most 1, got 10"),
        ("topk(True)", "topk's fraction must be above 0 and at most 1, got True"),
        ("topk('10%')", "topk's fraction must be above 0 and at most 1, got '10%'"),
        ("topk(0.1, per='token')", 'topk\'s per must be one of "sample", "row", got "token"'),
        ("randk(1.5)", "randk's fraction must be above 0 and at most 1, got 1.5"),
        ("randk(0.1, scaled=1)", "randk's scaled must be True or False, got 1"),
        (
            "topk(0.1, values='q(2)')",
            'topk\'s values must be one of "fp32", "fp16", "bf16", "q(8)", "q(4)", "means(2)", got "q(2)"',
        ),
        ("topk", "'topk': missing a required argument: 'fraction'; write topk(fraction, values, per, code)"),
        ("reuse(0.1)", "'reuse(0.1)': too many positional arguments; write reuse"),
    ],
)
def test_every_mistake_has_its_sentence(expression, sentence):
    assert said_by(expression) == sentence


def test_not_a_number_is_no_fraction():
    with pytest.raises(CodecError, match="above 0"):
        TopK(math.nan)


@pytest.mark.parametrize("codec", [TopK(0.1), RandK(0.1), BoundReuse(TopK(0.1))])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e5m2])
def test_integers_and_8_bit_floats_are_refused(codec, dtype):
    with pytest.raises(CodecError) as error:
        codec.nbytes((3,), dtype)
    wanted = "floating-point tensors of at least 16 bits"
    assert str(error.value) == f"{codec} compresses {wanted}, got {dtype}; send this tensor with none"


@pytest.mark.parametrize(
    ("shape", "samples"),
    [((), (1, 1)), ((7,), (1, 7)), ((3, 5), (3, 5)), ((2, 3, 4, 5), (2, 60)), ((0,), (1, 0)), ((0, 4), (0, 4))],
)
def test_samples_are_the_first_dimension_of_two_or_more(shape, samples):
    assert TopK(0.1).samples_of(shape) == RandK(0.1).samples_of(shape) == samples


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((), (1, 1)), ((7,), (1, 7)), ((3, 5), (3, 5)), ((2, 3, 5), (6, 5)), ((2, 3, 4, 5), (6, 20)), ((2, 0, 4), (2, 0))],
)
def test_with_per_row_each_row_is_a_sample(shape, rows):
    codec, x = TopK(0.25, per="row"), gaussian(*shape)
    assert codec.samples_of(shape) == rows
    assert_identical(encode(codec, x), encode(TopK(0.25), x.reshape(rows)))
    assert_identical(roundtrip(codec, x), roundtrip(TopK(0.25), x.reshape(rows)).view(shape))


@pytest.mark.parametrize(
    ("fraction", "n", "k"),
    [(0.1, 100, 10), (0.1, 4, 1), (0.5, 5, 2), (0.5, 7, 4), (1.0, 9, 9), (0.999, 3, 3), (0.1, 0, 0)],
)
def test_how_many_are_sent(fraction, n, k):
    assert TopK(fraction).count(n) == RandK(fraction).count(n) == k


@pytest.mark.parametrize(
    ("values", "dtype", "size"),
    [
        ("fp32", torch.float32, 3 * 10 * 4),
        ("fp32", torch.float64, 3 * 10 * 4),
        ("fp32", torch.bfloat16, 3 * 10 * 2),
        ("fp16", torch.float32, 3 * 10 * 2),
        ("fp16", torch.bfloat16, 3 * 10 * 2),
        ("bf16", torch.float32, 3 * 10 * 2),
        ("q(8)", torch.float32, 3 * 2 + 3 * 10),
        ("q(4)", torch.bfloat16, 3 * 2 + 3 * 5),
    ],
)
def test_a_payload_is_its_indices_and_values(values, dtype, size):
    for shape in ((3, 100), (3, 5, 20)):
        assert TopK(0.1, values=values).nbytes(shape, dtype) == indices_size(3, 100, 10) + size
        assert RandK(0.1, values=values).nbytes(shape, dtype) == size
        assert Reuse().bound_to(TopK(0.1, values=values)).nbytes(shape, dtype) == size
    assert TopK(1.0, values=values).nbytes((3, 10), dtype) == size


@pytest.mark.parametrize("percent", [2, 5, 10, 20, 25, 30, 50])
@pytest.mark.parametrize("samples", [1, 8])
def test_indices_and_fp16_values_take_little_more_than_values_and_the_entropy_of_indices(percent, samples):
    n, share = 98304, percent / 100
    entropy = -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) / share
    bits = 8 * TopK(share, values="fp16").nbytes((samples, n), torch.float32) / (samples * TopK(share).count(n))
    assert 0.9999 <= bits / (16 + entropy) <= 1.05, f"{bits / (16 + entropy):.4f}"


@pytest.mark.slow
@few
@given(codec=codecs, shape=shapes, dtype=dtypes, offset=st.integers(0, 7))
def test_encode_fills_nbytes_at_any_alignment_and_nothing_else(codec, shape, dtype, offset):
    assert_exact_encoding(codec, gaussian(*shape, dtype=dtype), offset)


@pytest.mark.slow
@few
@given(codec=codecs, shape=shapes, dtype=dtypes, seed=st.integers(0, 9), exponent=st.sampled_from([-30, -3, 0, 3, 13]))
def test_error_is_within_the_bound(codec, shape, dtype, seed, exponent):
    x = gaussian(*shape, dtype=dtype, seed=seed, scale=2.0**exponent) * 0.9
    bound_reuse = Reuse().bound_to(codec)
    assert_within_bound(codec, x, roundtrip(codec, x))
    assert_within_bound(bound_reuse, x, sent_through(bound_reuse, x, codec.select(x, KEY)))


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec.fraction < 1])
def test_error_is_not_far_below_the_bound(codec):
    x = gaussian(8, 16, 8, 8)
    bound_reuse = Reuse().bound_to(codec)
    for used, y in ((codec, roundtrip(codec, x)), (bound_reuse, sent_through(bound_reuse, x, codec.select(x, KEY)))):
        error = (y - x).abs()
        reached = (error / used.error_bound(x)).max().item()
        assert 0.9 < reached <= 1, f"the largest error is {reached} of the bound"
        assert (error > 0).float().mean() > 0.1


@pytest.mark.slow
@few
@given(data=st.data(), fraction=st.floats(0.01, 1), shape=shapes, dtype=dtypes, levels=st.sampled_from([2, 9, 10**6]))
def test_topk_keeps_exactly_k_of_each_sample_and_its_first_among_equals(data, fraction, shape, dtype, levels):
    codec = TopK(fraction)
    x = gaussian(*shape, seed=data.draw(st.integers(0, 99))).mul(levels).round().to(dtype)
    samples, n = codec.samples_of(shape)
    expected = torch.zeros(samples, n, dtype=dtype)
    for sample, row in zip(expected, x.reshape(samples, n), strict=True):
        order = sorted(range(n), key=lambda i, row=row: (-abs(row[i].item()), i))
        kept = order[: codec.count(n)]
        sample[kept] = row[kept].float().to(dtype)
    assert_identical(roundtrip(codec, x), expected.view(shape))


@pytest.mark.parametrize("percent", [50, 30, 20, 10, 5, 2])
@pytest.mark.parametrize("shape", [(1, 9999), (1, 3, 32, 32), (5, 3, 32, 32)])
def test_topk_of_their_count_is_the_code_of_2401_07788(percent, shape):
    x = gaussian(*shape)
    samples, n = TopK(0.1).samples_of(shape)
    theirs = peers(x, percent / 100)
    kept = n - int(n * (1 - percent / 100))
    assert (theirs != 0).sum() == samples * kept and TopK(percent / 100).count(n) in (kept, kept - 1)
    assert_identical(roundtrip(TopK(kept / n), x), theirs)


def peers(x, fraction):
    """The notebooks of 2401.07788: int(n(1-K)) elements of a sample become 0, and all ties with the largest of them."""
    magnitudes = x.abs().flatten(1)
    pivot = magnitudes.kthvalue(int(magnitudes.shape[1] * (1 - fraction)), dim=1, keepdim=True).values
    return torch.where(magnitudes > pivot, x.flatten(1), 0).view(x.shape)


def test_topk_differs_from_the_code_of_2401_07788_in_ties_and_in_the_count():
    ties = torch.tensor([[2.0, 1.0, 1.0, 1.0]])
    assert_identical(peers(ties, 0.5), torch.tensor([[2.0, 0.0, 0.0, 0.0]]))
    assert_identical(roundtrip(TopK(0.5), ties), torch.tensor([[2.0, 1.0, 0.0, 0.0]]))
    five = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0]])
    assert_identical(peers(five, 0.25), torch.tensor([[5.0, 4.0, 0.0, 0.0, 0.0]]))
    assert_identical(roundtrip(TopK(0.25), five), torch.tensor([[5.0, 0.0, 0.0, 0.0, 0.0]]))


def test_topk_chooses_in_each_sample():
    loud_and_quiet = torch.tensor([[9.0, 8.0, 7.0, 6.0], [1.0, 2.0, 3.0, 4.0]])
    chosen = torch.tensor([[9.0, 8.0, 0.0, 0.0], [0.0, 0.0, 3.0, 4.0]])
    assert_identical(roundtrip(TopK(0.5), loud_and_quiet), chosen)
    assert_identical(peers(loud_and_quiet, 0.5), chosen)


@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.5])
def test_topk_is_contractive_and_better_than_chance(fraction):
    """|x-C(x)|**2 is at most (1-k/n) |x|**2, reached by a constant tensor; randk reaches it on average."""
    noise, constant = gaussian(4, 1000), torch.full((4, 1000), -3.0)
    k = TopK(fraction).count(1000)

    def lost(codec, x, key=KEY):
        return ((x - roundtrip(codec, x, key)).square().sum() / x.square().sum()).item()

    assert lost(TopK(fraction), constant) == pytest.approx(1 - k / 1000, rel=1e-5)
    assert lost(TopK(fraction), noise) < (1 - k / 1000) * 0.95
    chance = [lost(RandK(fraction).unscaled(), noise, key_of(i)) for i in range(50)]
    assert sum(chance) / 50 == pytest.approx(1 - k / 1000, rel=0.02)


@pytest.mark.parametrize(
    ("values", "floor", "ceiling"), [("fp16", 70, 80), ("bf16", 50, 60), ("q(8)", 47, 48), ("q(4)", 23, 24)]
)
def test_what_the_format_of_values_costs(values, floor, ceiling):
    x = gaussian(16, 4096)
    exact = roundtrip(TopK(0.1), x)
    snr = snr_db(exact, roundtrip(TopK(0.1, values=values), x))
    assert floor < snr < ceiling, f"{snr:.2f} dB"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16"])
def test_values_are_sent_as_they_are_where_the_tensor_is_no_wider(dtype, values):
    x = gaussian(4, 100, dtype=dtype)
    y = roundtrip(TopK(0.2, values=values), x)
    assert_identical(y, torch.where(y != 0, x, 0))
    assert (y != 0).sum() == 4 * 20


@pytest.mark.parametrize("values", FORMATS)
def test_quantized_values_are_those_of_q_on_the_kept_values(values):
    x = gaussian(5, 6, 50)
    codec = TopK(0.1, values=values)
    kept = codec.select(x, KEY)
    expected = values_at(kept, x)
    spelled = {"fp32": "none", "q(8)": 'q(8, grid="midrise")', "q(4)": 'q(4, grid="midrise")'}
    expected = roundtrip(spelled.get(values, values), expected)
    assert_identical(values_at(kept, roundtrip(codec, x)), expected)


def test_topk_ignores_the_key():
    x = gaussian(4, 200)
    assert_identical(encode(TopK(0.1), x, KEY), encode(TopK(0.1), x, key_of(9)))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", SHAPES)
def test_zeros_come_back_as_zeros(codec, shape):
    assert_identical(roundtrip(codec, torch.zeros(shape)), torch.zeros(shape))


@pytest.mark.parametrize("codec", CODECS)
def test_strides_and_graphs_do_not_matter(codec):
    x = gaussian(6, 4, 5, 3)
    for view in (x.transpose(0, 2), x[::2], x[..., 1], x.flip(0), x[:, :1].expand(6, 4, 5, 3)):
        assert_identical(encode(codec, view), encode(codec, view.contiguous()))
        assert_identical(codec.error_bound(view), codec.error_bound(view.contiguous()))
    hidden = x.clone().requires_grad_() * 2
    with torch.autograd.graph.saved_tensors_hooks(pytest.fail, pytest.fail):
        payload = encode(codec, hidden)
    assert_identical(payload, encode(codec, x * 2))
    assert not codec.error_bound(hidden).requires_grad
    rows = x.flatten(1)
    assert_identical(mixed_indices(hidden.flatten(1), hidden.flatten(1), 7), mixed_indices(rows, rows, 7))


@pytest.mark.parametrize("values", FORMATS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", FLOATING)
def test_what_is_not_finite_is_sent_first_and_spoils_no_more_than_its_sample(values, value, dtype):
    codec = TopK(0.1, values=values)
    x = gaussian(3, 4, 30, dtype=dtype)
    clean = roundtrip(codec, x).view(3, 120)
    least = x.view(3, 120)[1].float().abs().masked_fill(clean[1] == 0, torch.inf).argmin()
    x[1, 2, 29] = value
    y = roundtrip(codec, x).view(3, 120)
    assert_identical(y[::2], clean[::2])
    assert not y[1, 89].isfinite()
    assert y[1, least] == 0 and (y[1] != 0).sum() == 12
    if values.startswith("q"):
        assert (~y[1].isfinite()).sum() == 12
    else:
        clean[1, 89], clean[1, least] = y[1, 89], 0
        assert_identical(y, clean)


def test_nan_comes_before_infinity():
    x = torch.tensor([1.0, -torch.inf, torch.nan, 2.0])
    assert TopK(0.25).select(x, KEY).tolist() == [[2]]
    assert TopK(0.5).select(x, KEY).tolist() == [[1, 2]]


@pytest.mark.slow
@few
@given(codec=codecs, shape=shapes, dtype=dtypes)
def test_indices_are_read_back_and_can_be_prescribed(codec, shape, dtype):
    x = gaussian(*shape, dtype=dtype)
    samples, n = codec.samples_of(shape)
    chosen, payload = codec.select(x, KEY), encode(codec, x)
    assert chosen.shape == (samples, codec.count(n)) and chosen.dtype == torch.int64
    assert_identical(codec.indices(payload, shape, dtype, KEY), chosen)
    again = torch.empty_like(payload)
    codec.encode_at(x, chosen, again, KEY)
    assert_identical(again, payload)


def test_prescribed_indices_are_what_is_sent():
    x = gaussian(2, 40)
    chosen = torch.tensor([[0, 1, 2, 39], [47, 48, 60, 61]])
    payload = torch.empty(TopK(0.1).nbytes(x.shape, x.dtype), dtype=torch.uint8)
    TopK(0.1).encode_at(x, chosen, payload, KEY)
    assert_identical(TopK(0.1).indices(payload, x.shape, x.dtype, KEY), chosen)
    expected = put_values(values_at(chosen, x), chosen, torch.zeros(2, 40))
    assert_identical(decode(TopK(0.1), payload, x.shape, x.dtype), expected)


@pytest.mark.parametrize("codec", CODECS)
def test_other_devices_send_the_same_bytes(codec, monkeypatch):
    x = gaussian(3, 700).mul(8).round()
    payload, y = encode(codec, x), roundtrip(codec, x)
    monkeypatch.setattr(indices, "_on_host", lambda x: False)
    assert_identical(encode(codec, x), payload)
    assert_identical(roundtrip(codec, x), y)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("byte", [0, 255])
def test_a_wrong_payload_gives_no_place_outside_to_a_device_at_which_nobody_looks(codec, byte, monkeypatch):
    """A GPU that writes outside of a tensor is lost to its process."""
    monkeypatch.setattr(indices, "_on_host", lambda x: False)
    payload = encode(codec, gaussian(3, 700))
    y = decode(codec, payload.fill_(byte), (3, 700), torch.float32)
    assert y.shape == (3, 700)
    places = codec.indices(payload, (3, 700), torch.float32, KEY)
    assert int(places.min()) >= 0 and int(places.max()) < 2100
