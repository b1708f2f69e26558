"""q's option step: errors in root mean squares of a row, codes by the column they are in, and refusals."""

import pytest
import torch
import zstandard

from support.codec_contract import assert_contract, documented
from support.codec_helpers import KEY, encode, gaussian, roundtrip
from thinwire.compress import CodecError, parse


def residual_stream(rows=256, width=256):
    """Rows as those of a language model: a few columns of large values, and a first row with one of thousands."""
    x = gaussian(rows, width) * torch.logspace(-1, 0.5, width)
    x[:, 7] += 40
    x[0] /= 10
    x[0, 9] = 24000.0
    return x


def rms(x):
    return x.square().mean(-1).sqrt()


@pytest.mark.parametrize("step", [0.1, 0.25, 1])
def test_the_error_of_each_row_is_that_of_steps_of_its_root_mean_square(step):
    x = residual_stream()[1:]
    error = rms(roundtrip(f"q(8, step={step})", x) - x) / rms(x)
    assert error.max() <= step / 2 * 1.01 and 0.7 * step / 12**0.5 < error.mean() < 1.2 * step / 12**0.5


def test_a_row_with_a_value_that_needs_a_larger_step_keeps_that_value():
    x = torch.ones(2, 100_000)
    x[0, 5] = -3e5
    decoded = roundtrip("q(8, step=0.2)", x)
    assert decoded[0, 5] == pytest.approx(-3e5, rel=2**-7) and decoded[1, 0] == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (2, 40, 900), (2, 24, 40, 40), (70_000,), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_shape_is_decoded_within_its_bound(shape, dtype):
    assert_contract(parse("q(8, step=0.2)"), gaussian(*shape).to(dtype))


def test_massive_values_cost_the_rest_of_their_row_nothing():
    """Beside them absmax sends zeros for all else, and a fine absmax pays for it in every other row."""
    x = residual_stream()
    codec = parse("q(8, step=0.2)")
    bits = 8 * codec.used(encode(codec, x)) / x.numel()
    plain = gaussian(256, 256)
    of_plain = 8 * codec.used(encode(codec, plain)) / plain.numel()
    assert bits < of_plain < 4.6


def test_a_massive_row_goes_apart():
    """The first token of a text lost all but its largest value, and a model that trained so needed the codec."""
    x = residual_stream()
    assert torch.equal(roundtrip("q(8, step=0.2)", x)[0], x[0].bfloat16().float())
    assert roundtrip("q(8, step=0.2)", x[:63])[0].count_nonzero() == 1, "one row in 64 at most"
    assert_contract(parse("q(8, step=0.2)"), x)
    x[0, 9] = torch.inf
    assert torch.equal(roundtrip("q(8, step=0.2)", x)[0], x[0].bfloat16().float())


@pytest.mark.parametrize("rows", [1, 128])
def test_the_largest_values_of_bf16_stay_finite(rows):
    """Their scale was infinite, and what was decoded NaN."""
    x = gaussian(rows, 64).bfloat16()
    x[0] = torch.finfo(torch.bfloat16).max
    assert assert_contract(parse("q(8, step=0.25)"), x).isfinite().all()


def test_the_largest_value_of_fp16_in_a_row_apart_stays_finite():
    """Its bf16 is 65536, which fp16 does not have: the receiver stopped at an infinity that nobody had sent."""
    x = residual_stream().half()
    x[0, 9] = 65504
    assert_contract(parse("q(8, step=0.2)"), x)
    assert roundtrip("q(8, step=0.2)", x)[0, 9] == 65504


def test_more_rows_apart_than_a_payload_has_are_refused():
    x = residual_stream()
    codec = parse("q(8, step=0.2)")
    payload = encode(codec, x)
    payload[4 : 4 + 2 * len(x)] = 0
    with pytest.raises(CodecError, match="rows apart need 131072 bytes"):
        codec.decode(payload, torch.empty_like(x), KEY)


def test_columns_of_unlike_size_have_codes_of_their_own():
    x = residual_stream()
    codec = parse("q(8, step=0.2)")
    payload = encode(codec, x)
    codes = codec._coded.plain(payload, x.shape)[2 * len(x) :]
    together = len(zstandard.ZstdCompressor().compress(codes.numpy().tobytes()))
    assert codec.used(payload) < 0.93 * together


@pytest.mark.parametrize("shape", [(1001, 80), (2, 24, 40, 41), (3, 7, 64, 64), (64, 1024)])
def test_what_is_likely_comes_back_whatever_the_values(shape):
    """Differences of large codes are beyond 8 bits, and wrap around."""
    for values in (torch.full(shape, 9.0), gaussian(*shape) + 3, gaussian(*shape).relu(), gaussian(*shape).sign() * 7):
        values.view(-1)[:: 7 * 31] *= -30
        codec = parse("q(8, step=0.2)")
        plain = codec._coded.inner
        sent = torch.empty(plain.nbytes(shape), dtype=torch.uint8)
        plain.encode(values, sent, KEY)
        expected = torch.empty_like(values)
        plain.decode(sent, expected)
        assert torch.equal(roundtrip(codec, values), expected)


def test_rows_and_columns_that_are_alike_need_fewer_bits():
    """As tokens beside each other are, and channels whose mean is not zero."""
    steps = gaussian(512, 256)
    alike = steps.clone()
    for row in range(1, 512):
        alike[row] = 0.8 * alike[row - 1] + 0.6 * steps[row]
    codec, bits = parse("q(8, step=0.2)"), []
    for x in (steps, alike, steps + 3 * gaussian(256, seed=1)):
        x = x / rms(x)[:, None]
        bits.append(8 * codec.used(encode(codec, x)) / x.numel())
    assert bits[1] < bits[0] - 0.3 and bits[2] < bits[0] - 1


def test_the_reader_in_the_documentation_reads_what_is_written():
    x = residual_stream(rows=301)
    codec = parse("q(8, step=0.2)")
    payload = encode(codec, x)
    assert codec.used(payload) < len(payload) // 2
    plain, apart = documented("read_columns")(bytes(payload[: codec.used(payload)].tolist()), rows=301, width=256)
    assert plain == bytes(codec._coded.plain(payload, x.shape).tolist())
    assert apart == {0: x[0].bfloat16().tolist()}


def test_payloads_that_are_none_are_refused():
    x = residual_stream()
    codec = parse("q(8, step=0.2)")
    payload = encode(codec, x)
    damaged = payload.clone()
    damaged[1] = 3
    with pytest.raises(CodecError):
        codec.decode(damaged, torch.empty_like(x), KEY)


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("q(8, step=0)", "q's step must be above 0 and at most 2, got 0"),
        ("q(8, step=3.0)", "q's step must be above 0 and at most 2, got 3.0"),
        ("q(4, step=0.2)", "needs 8 bits, .* got q\\(4, step=0.2\\); write q\\(8, step=0.2\\)"),
        ('q(8, step=0.25, code="entropy")', "without code, got"),
        ('q(8, step=0.25, grid="midrise")', "a grid with zero"),
        ('q(8, step=0.25, scale="minmax")', "a grid with zero"),
    ],
)
def test_a_step_beside_what_it_excludes_is_one_sentence(expression, sentence):
    with pytest.raises(CodecError, match=sentence):
        parse(expression)


@pytest.mark.parametrize("count", [1, 8, 100])
def test_rows_of_zeros_are_no_rows_apart(count):
    """Their scale was taken for the mark of a row apart, and the payload could not be decoded."""
    x = torch.cat([torch.zeros(count, 48), gaussian(28, 48)])
    assert torch.equal(roundtrip(parse("q(8, step=0.2)"), x)[:count], x[:count])
    zeros = torch.zeros(count, 48)
    assert torch.equal(roundtrip(parse("q(8, step=0.2)"), zeros), zeros)
