"""lowrank: exact payloads, what it keeps of a matrix, the warm start, and a decoder that is the same everywhere."""

import math

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
from thinwire.compress import parse
from thinwire.compress.codecs.lowrank import LowRank
from thinwire.compress.measured import contraction

FORMATS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
formats = pytest.mark.parametrize("values", list(FORMATS))


def through(codec, x, shared=None, key=KEY):
    """Return the payload with a warm start, and what it decodes to."""
    payload = torch.empty(codec.nbytes(x.shape, x.dtype), dtype=torch.uint8)
    codec.encode(x, payload, key, shared)
    return payload, decode(codec, payload, x.shape, x.dtype)


def factors(payload, rows, values="fp16"):
    """Return the scale, P and Q of a payload of rank 3."""
    parts = payload[4:].clone().view(FORMATS[values]).view(-1, 3)
    return payload[:4].clone().view(torch.float32), parts[:rows], parts[rows:]


def spectrum(rows, columns, values, seed=0):
    """Return a matrix with these singular values."""
    left, _ = torch.linalg.qr(gaussian(rows, len(values), seed=seed))
    right, _ = torch.linalg.qr(gaussian(columns, len(values), seed=seed + 1))
    return left * torch.tensor(values) @ right.t()


@pytest.mark.parametrize(
    ("shape", "rows", "columns"),
    [
        ((), 1, 1),
        ((7,), 1, 7),
        ((6, 5), 6, 5),
        ((2, 3, 5), 6, 5),
        ((2, 3, 4, 5), 6, 20),
        ((2, 3, 4, 5, 6), 6, 120),
    ],
)
def test_a_tensor_is_a_matrix_of_its_rows(shape, rows, columns):
    for rank in (1, 2, 5, 9):
        for values, size in (("fp16", 2), ("bf16", 2), ("fp32", 4)):
            factors = 4 + (rows + columns) * min(rank, rows, columns) * size
            for dtype in (torch.float32, torch.bfloat16):
                expected = min(factors, rows * columns * dtype.itemsize)
                assert LowRank(rank, values=values).nbytes(shape, dtype) == expected
    x = gaussian(*shape)
    assert_identical(encode("lowrank(2)", x), encode("lowrank(2)", x.reshape(rows, columns)))


@formats
@pytest.mark.parametrize(("shape", "dtype"), [((1, 1), torch.float32), ((3, 3), torch.bfloat16), ((2,), torch.float32)])
def test_a_tensor_that_is_shorter_than_its_factors_is_sent_as_it_is(shape, dtype, values):
    codec, x = LowRank(9, values=values), gaussian(*shape, dtype=dtype)
    payload = encode(codec, x)
    assert_identical(payload, encode("none", x))
    assert_identical(roundtrip(codec, x), x)
    assert codec.next_shared(payload, x.shape, dtype) is None
    assert not codec.error_bound(x).any()


@few
@given(
    rank=st.integers(1, 9),
    values=st.sampled_from(list(FORMATS)),
    shape=shapes,
    dtype=st.sampled_from(FLOATING),
    offset=st.integers(0, 7),
    exponent=st.sampled_from([-30, 0, 12]),
)
def test_contract(rank, values, shape, dtype, offset, exponent):
    codec = LowRank(rank, values=values)
    assert parse(str(codec)) == codec
    x = gaussian(*shape, dtype=dtype, scale=2.0**exponent)
    y = assert_contract(codec, x, offset).double()
    denormal = torch.finfo(dtype).tiny * math.sqrt(max(1, x.numel()))
    assert (x.double() - y).norm() <= 1.02 * x.double().norm() + denormal


@formats
@pytest.mark.parametrize("shape", [(40, 30), (4, 10, 30), (2, 20, 5, 6), (20, 60)])
def test_a_matrix_of_that_rank_comes_back_but_for_rounding(shape, values):
    rows = 20 if len(shape) == 2 and shape[0] == 20 else 40
    x = spectrum(rows, math.prod(shape) // rows, [5.0, 3.0, 1.0]).view(shape)
    for rank in (3, 4, 9):
        lost = contraction(LowRank(rank, values=values), x)
        assert 1e-9 < lost < 4 * torch.finfo(FORMATS[values]).eps, lost
    assert contraction(LowRank(2, values=values), x) > 0.1


@formats
def test_full_rank_keeps_everything(values):
    x = gaussian(24, 16)
    assert contraction(LowRank(16, values=values), x) < 8 * torch.finfo(FORMATS[values]).eps


def test_what_is_lost_is_between_nothing_and_everything():
    lost = [contraction(LowRank(rank), gaussian(64, 48)) for rank in (1, 4, 16, 32, 48)]
    assert lost == sorted(lost, reverse=True) and lost[-1] < 1e-3 < 0.9 < lost[0] < 1, lost


def test_a_warm_start_converges_to_the_best_approximation():
    """One step of the power iteration a message; the best that rank 2 can do is known."""
    x = spectrum(60, 40, [8.0, 6.0, 3.0, 2.0, 1.0, 1.0])
    best = math.sqrt(9 + 4 + 1 + 1)
    codec, shared, errors = LowRank(2), None, []
    for step in range(12):
        payload, decoded = through(codec, x, shared, KEY._replace(step=step))
        errors.append((x - decoded).norm().item() / best)
        shared = codec.next_shared(payload, x.shape, x.dtype)
    assert errors[0] > 1.02 and 0.999 < errors[-1] < 1.001, errors


@formats
def test_what_is_shared_next_is_the_q_that_was_sent(values):
    codec, x = LowRank(3, values=values), gaussian(4, 5, 8)
    payload = encode(codec, x)
    shared = codec.next_shared(payload, x.shape, x.dtype)
    scale, left, right = factors(payload, 20, values)
    assert shared.dtype == torch.float32 and shared.shape == (8, 3)
    assert_identical(shared, right.float() * scale)
    assert shared.abs().max() <= scale < 4 * shared.abs().max()
    expected = x.view(20, 8).t() @ left.float()
    torch.testing.assert_close(shared, expected, rtol=0, atol=4 * torch.finfo(FORMATS[values]).eps)
    assert codec.next_shared(torch.empty(0, dtype=torch.uint8), (0, 8), x.dtype) is None


def test_a_start_is_drawn_from_the_key_unless_there_is_a_usable_one():
    codec, x = LowRank(2), gaussian(20, 10)
    cold, _ = through(codec, x)
    other = KEY._replace(microbatch=9)
    assert not torch.equal(through(codec, x, None, other)[0], cold)
    for useless in (torch.zeros(10, 2), torch.full((10, 2), torch.nan), gaussian(9, 2), gaussian(10, 1)):
        assert_identical(through(codec, x, useless)[0], cold)
    warm = gaussian(10, 2, seed=5)
    assert not torch.equal(through(codec, x, warm)[0], cold)
    assert_identical(through(codec, x, warm)[0], through(codec, x, warm, other)[0])
    assert_identical(through(codec, x, warm)[0], through(codec, x, 2.0**90 * warm)[0])


def test_p_is_an_orthonormal_basis_whose_signs_are_settled():
    x, shared = gaussian(50, 30), gaussian(30, 3, seed=1)
    _, left, _ = factors(through(LowRank(3, values="fp32"), x, shared)[0], 50, "fp32")
    torch.testing.assert_close(left.t() @ left, torch.eye(3), rtol=0, atol=1e-6)
    assert ((left.t() @ x @ shared).diagonal() > 0).all()


def test_fp16_factors_decode_exactly_so_that_no_order_of_summation_matters():
    x = gaussian(30, 20, scale=1e3)
    payload = encode("lowrank(3)", x)
    scale, left, right = factors(payload, 30)
    units = [[int(v * 2**24) for v in row] for row in left.double().tolist()]
    others = [[int(v * 2**24) for v in row] for row in right.double().tolist()]
    assert torch.tensor(units).double().mul(2.0**-24).equal(left.double()) and left.abs().max() <= 1
    sums = [[sum(p * q for p, q in zip(row, other, strict=True)) for other in others] for row in units]
    exact = [[math.ldexp(total, -48) * scale.item() for total in row] for row in sums]
    assert max(abs(total) for row in sums for total in row) < 2**53
    decoded = decode("lowrank(3)", payload, x.shape, x.dtype)
    assert_identical(decoded, torch.tensor(exact, dtype=torch.float64).float())


def test_the_largest_rank_leaves_room_for_exact_sums():
    """|sum of r products| <= |row of P| * |row of Q| <= 1 * sqrt(r), in units of 2**-48."""
    assert math.sqrt(512) * 1.001 * 2**48 < 2**53


def test_the_bound_is_reached():
    """All that the start misses is lost, and only that."""
    x = torch.tensor([[1.0, 0.0], [0.0, 0.9]])
    codec = LowRank(1)
    _, decoded = through(codec, x, torch.tensor([[1.0], [0.0]]))
    error, bound = (decoded - x).abs(), codec.error_bound(x)
    assert_identical(decoded, torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    assert 0.99 < error[1, 1] / bound[1, 1] <= 1


@pytest.mark.parametrize("magnitude", [1e-30, 1e-10, 1e6, 1e30])
@formats
def test_any_magnitude(magnitude, values):
    x = spectrum(40, 30, [5.0, 3.0, 1.0]) * magnitude
    codec = LowRank(3, values=values)
    payload, decoded = through(codec, x)
    _, again = through(codec, x, codec.next_shared(payload, x.shape, x.dtype))
    assert snr_db(x, decoded) > 40 and snr_db(x, again) > 40


@pytest.mark.parametrize("magnitude", [1.2e37, 1e38, 3.3e38])
@formats
def test_values_near_the_limit_of_float32_come_back(magnitude, values):
    """M Q0, a sum over a row, is beyond float32 where M is not."""
    x = torch.zeros(400, 30)
    x[::100] = magnitude * spectrum(4, 30, [5.0]).sign()
    codec = LowRank(3, values=values)
    decoded = assert_contract(codec, x)
    assert codec.error_bound(x).isfinite().all() == (magnitude < 1.7e38)
    if magnitude < 1.7e38:
        assert snr_db(x, decoded) > 40


@pytest.mark.parametrize("shape", [(), (7,), (6, 5), (2, 3, 4), (2, 3, 4, 5)])
def test_zeros_come_back_as_zeros_and_leave_no_poisoned_start(shape):
    codec, x = LowRank(2), torch.zeros(shape)
    payload, decoded = through(codec, x)
    assert_identical(decoded, x)
    shared = codec.next_shared(payload, x.shape, x.dtype)
    y = gaussian(*shape)
    assert_identical(through(codec, y, shared)[0], through(codec, y)[0])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@formats
def test_nothing_is_finite_where_anything_is_not(value, values):
    codec, x = LowRank(3, values=values), gaussian(4, 5, 8)
    x[1, 2, 3] = value
    payload, decoded = through(codec, x)
    assert not decoded.isfinite().any() and not codec.error_bound(x).isfinite().any()
    y = gaussian(4, 5, 8)
    assert_identical(through(codec, y, codec.next_shared(payload, x.shape, x.dtype))[0], through(codec, y)[0])


def test_formats_differ_in_precision():
    x = spectrum(40, 30, [5.0, 3.0, 1.0])
    lost = [contraction(LowRank(3, values=values), x) for values in ("fp32", "fp16", "bf16")]
    assert lost[0] < lost[1] / 100 and lost[1] < lost[2] / 4, lost


def test_strides_do_not_matter():
    x = gaussian(6, 4, 5, 3)
    for view in (x.transpose(0, 2), x[::2], x[..., 1], x.flip(0), x[:, :1].expand(6, 4, 5, 3)):
        assert_identical(encode("lowrank(2)", view), encode("lowrank(2)", view.contiguous()))


def test_tensors_in_a_graph_are_taken_and_left_as_they_are():
    x = gaussian(6, 4).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pytest.fail, pytest.fail):
        encode("lowrank(2)", x * 2)
    assert not parse("lowrank(2)").error_bound(x).requires_grad
    assert_identical(roundtrip("lowrank(2)", x).detach(), roundtrip("lowrank(2)", x.detach()))


QUANTIZERS = ["q(8)", "q(4)", "normal.Normal(3)", "fp8"]


@pytest.mark.slow
@few
@given(
    rank=st.integers(1, 9),
    values=st.sampled_from([*FORMATS, *QUANTIZERS]),
    per=st.sampled_from(["tensor", "sample"]),
    shape=shapes,
    dtype=st.sampled_from(FLOATING),
)
def test_contract_of_every_kind_of_factors(rank, values, per, shape, dtype):
    codec = LowRank(rank, values=values, per=per)
    assert parse(str(codec)) == codec
    assert_contract(codec, gaussian(*shape, dtype=dtype))


@pytest.mark.parametrize("values", QUANTIZERS)
def test_quantized_factors_are_payloads_of_their_columns(values):
    x, codec = gaussian(4, 10, 30), LowRank(3, values=values)
    assert LowRank(3, values=f" {values} ") == codec
    payload = encode(codec, x)
    left, right = parse(values).nbytes((1, 3, 40), torch.float32), parse(values).nbytes((1, 3, 30), torch.float32)
    assert len(payload) == left + right
    p = decode(values, payload[:left], (1, 3, 40), torch.float32)
    q = decode(values, payload[left:], (1, 3, 30), torch.float32)
    expected = (p[0].t().double() @ q[0].double()).float().view(x.shape)
    torch.testing.assert_close(decode(codec, payload, x.shape, x.dtype), expected, rtol=1e-6, atol=1e-6)
    assert_identical(codec.next_shared(payload, x.shape, x.dtype), q[0].t())


def test_factors_in_8_bits_lose_little_more():
    x = spectrum(200, 100, [0.7**step for step in range(20)])
    whole, halved = (snr_db(x, roundtrip(f"lowrank(8, values={values})", x)) for values in ('"fp16"', '"q(8)"'))
    assert whole - 0.2 < halved < whole
    sizes = [parse(f"lowrank(8, values={values})").nbytes(x.shape, x.dtype) for values in ('"fp16"', '"q(8)"')]
    assert sizes[1] < 0.51 * sizes[0]


@pytest.mark.parametrize(("shape", "rows", "columns"), [((5, 6, 7), 6, 7), ((5, 2, 3, 4), 2, 12), ((5, 9), 1, 9)])
def test_a_sample_is_a_matrix_of_its_own(shape, rows, columns):
    """Samples that have nothing in common."""
    directions = [spectrum(rows, columns, [3.0], seed=2 * sample) for sample in range(5)]
    x = torch.stack(directions).view(shape)
    apart = contraction(LowRank(1, per="sample", values="fp32"), x)
    assert apart < 1e-5 and (rows == 1 or contraction(LowRank(1, values="fp32"), x) > 0.3)
    fewest = min(5 * (4 + 2 * (rows + columns)), 4 * x.numel())
    codec = LowRank(1, per="sample")
    assert codec.nbytes(shape, x.dtype) == fewest
    payload = encode(codec, x)
    shared = codec.next_shared(payload, shape, x.dtype)
    assert shared.shape == (5, columns, 1)
    cold = LowRank(1)
    for sample in range(5):
        decoded, alone = decode(codec, payload, shape, x.dtype)[sample], torch.empty(shape[1:])
        own = torch.empty(cold.nbytes((rows, columns), x.dtype), dtype=torch.uint8)
        cold.encode(x[sample].view(rows, columns), own, KEY, shared[sample])
        alone = decode(cold, own, (rows, columns), x.dtype).view(shape[1:])
        torch.testing.assert_close(decoded, alone, rtol=0, atol=0.01)


def test_a_sample_that_is_not_finite_spoils_no_other():
    codec, x = LowRank(2, per="sample"), gaussian(4, 10, 8)
    payload, clean = through(codec, x)
    shared = codec.next_shared(payload, x.shape, x.dtype)
    x[1, 2, 3] = torch.nan
    payload, decoded = through(codec, x)
    assert not decoded[1].isfinite().any()
    assert_identical(decoded[[0, 2, 3]], clean[[0, 2, 3]])
    again = codec.next_shared(payload, x.shape, x.dtype)
    assert_identical(again[[0, 2, 3]], shared[[0, 2, 3]])
    assert through(codec, gaussian(4, 10, 8), again)[1].isfinite().all(), "it starts anew"


def test_decoding_in_parts_changes_nothing(monkeypatch):
    for shape in ((4, 50, 30), (200, 30)):
        for per in ("tensor", "sample"):
            codec, x = LowRank(3, per=per), gaussian(*shape)
            payload, decoded = through(codec, x)
            monkeypatch.setattr("thinwire.compress.codecs.lowrank._PART", 700)
            assert_identical(decode(codec, payload, x.shape, x.dtype), decoded)


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("lowrank", "'lowrank': missing a required argument: 'rank'; write lowrank(rank, values, per)"),
        ("lowrank(0)", "lowrank's rank must be an integer from 1 to 512, got 0"),
        ("lowrank(513)", "lowrank's rank must be an integer from 1 to 512, got 513"),
        (
            'lowrank(4, values="topk(0.1)")',
            'lowrank\'s values must be "fp16", "bf16", "fp32", or a quantizer such as "q(8)", got "topk(0.1)"',
        ),
        (
            'lowrank(4, values="q(9)")',
            'lowrank\'s values must be "fp16", "bf16", "fp32", or a quantizer such as "q(8)", got "q(9)"',
        ),
        ('lowrank(4, per="row")', 'lowrank\'s per must be one of "tensor", "sample", got "row"'),
    ],
)
def test_every_mistake_has_its_sentence(expression, sentence):
    assert said_by(expression) == sentence


def test_payloads_do_not_depend_on_strides():
    for seed in range(5):
        x = gaussian(64, 300, seed=seed)
        assert_identical(
            encode('lowrank(1, values="fp32")', x.t().contiguous().t()), encode('lowrank(1, values="fp32")', x)
        )
