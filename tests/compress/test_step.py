"""q's option step: errors in root mean squares of a block, classes by column and row, and refusals."""

from itertools import product

import numpy as np
import pytest
import torch

from support.codec_contract import assert_contract, documented
from support.codec_helpers import KEY, encode, entropy, gaussian, roundtrip
from thinwire.compress import CodecError, parse
from thinwire.compress.codecs.coding.lengths import put_length
from thinwire.compress.codecs.coding.symbols import encode_symbols
from thinwire.compress.codecs.fused import steps
from thinwire.compress.entries import limits_of, units_of


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


@pytest.mark.parametrize("last", [127, 32767])
def test_the_largest_integer_is_that_of_the_kernels_though_torch_multiplies_by_a_reciprocal(last):
    units = units_of(torch.arange(1, 0x7F80, dtype=torch.int16))
    exact = np.floor(np.float32(torch.finfo(torch.float32).max) / units.numpy()).clip(max=last)
    np.testing.assert_array_equal(limits_of(units, last), exact)


def error_of_wide(x, step):
    """The largest error of a wide row: half of its step, and the rounding of its scale and of float32."""
    size = x.abs().median() * 1.5 * step
    return max(size, x.abs().max() / 32767) * 0.51 + x.abs().max() * 2**-23


def test_a_massive_row_has_a_step_of_its_other_values():
    """The first token of a text lost all but its largest value, and a model that trained so needed the codec."""
    x = residual_stream()
    assert (roundtrip("q(8, step=0.2)", x)[0] - x[0]).abs().max() < error_of_wide(x[0], 0.2) < 0.5
    assert roundtrip("q(8, step=0.2)", x[:63])[0].count_nonzero() == 1, "none of 63 rows"
    assert_contract(parse("q(8, step=0.2)"), x)
    bits = [bits_of("q(8, step=0.2)", each) for each in (x, x[1:])]
    assert bits[0] < bits[1] + 0.15, "it took 16 bits a value"


def test_one_row_in_thirty_that_is_mostly_one_value_keeps_its_others():
    """They were zeros in rows of " the" after early blocks of SmolLM2: a third of what four stages lost."""
    x = gaussian(240, 256)
    x[::30, 5] = 130
    assert 4 * rms(x).median() < rms(x[::30]).min() < 16 * rms(x).median()
    found = roundtrip("q(8, step=0.2)", x)
    for row in range(0, 240, 30):
        assert (found[row] - x[row]).abs().max() < error_of_wide(x[row], 0.2) < 0.2
    assert_contract(parse("q(8, step=0.2)"), x)


@pytest.mark.parametrize("rows", [1, 128])
def test_the_largest_values_of_bf16_stay_finite(rows):
    """Their scale was infinite, and what was decoded NaN."""
    x = gaussian(rows, 64).bfloat16()
    x[0] = torch.finfo(torch.bfloat16).max
    assert assert_contract(parse("q(8, step=0.25)"), x).isfinite().all()


def test_the_largest_value_of_fp16_in_a_wide_row_stays_finite():
    """Decoded as 65536, which fp16 does not have, it stopped the receiver at an infinity that nobody had sent."""
    x = residual_stream().half()
    x[0, 9] = 65504
    assert_contract(parse("q(8, step=0.2)"), x)
    assert roundtrip("q(8, step=0.2)", x)[0, 9] == 65504


def test_columns_of_unlike_size_have_codes_of_their_own():
    x = residual_stream()
    codec = parse("q(8, step=0.2)")
    payload = encode(codec, x)
    integers = codec._quantizer.read(payload, x.shape)[2]
    together = len(encode_symbols((integers + 128).to(torch.uint8)))
    assert codec.used(payload) < 0.85 * together


@pytest.mark.parametrize("shape", [(1001, 80), (2, 24, 40, 41), (3, 7, 64, 64), (64, 1024)])
@pytest.mark.parametrize("expression", ["q(8, step=0.2)", 'q(16, step=0.01, per="tensor")'])
def test_what_is_coded_comes_back_whatever_the_values(shape, expression):
    """Values far from their column's others are beyond its table, and small steps need many low bits."""
    for values in (torch.full(shape, 9.0), gaussian(*shape) + 3, gaussian(*shape).relu(), gaussian(*shape).sign() * 7):
        values.view(-1)[:: 7 * 31] *= -30
        codec = parse(expression)
        scales, integers = codec._quantizer.integers(values.view(-1), codec._blocks(shape))
        assert not (codec._quantizer.read(encode(codec, values), shape)[0] < 0).any(), "no row is wide"
        expected = integers.view(codec._blocks(shape).count, -1) * (scales.int() << 16).view(torch.float32)[:, None]
        assert torch.equal(roundtrip(codec, values), expected.view(shape))


def bits_of(expression, x):
    codec = parse(expression)
    return 8 * codec.used(encode(codec, x)) / x.numel()


def test_columns_and_rows_that_are_alike_need_fewer_bits():
    """As channels are whose mean is not zero, and gradients of tokens that matter more than others."""
    steps = gaussian(512, 256)
    shifted = steps + 3 * gaussian(256, seed=1)
    assert bits_of("q(8, step=0.2)", shifted / rms(shifted)[:, None]) < bits_of("q(8, step=0.2)", steps) - 1
    unlike = steps * torch.logspace(-2, 2, 512)[torch.randperm(512)][:, None]
    common = 'q(8, step=0.5, per="tensor")'
    assert bits_of(common, unlike / rms(unlike.view(-1))) < bits_of(common, steps) - 1


@pytest.mark.parametrize(("step", "most"), [(0.8, 2.6), (2.0, 1.5)])
def test_frequent_integers_take_less_than_the_bits_of_a_prefix_code(step, most):
    x = gaussian(1024, 576)
    codec = parse(f"q(8, step={step})")
    payload = encode(codec, x)
    scales, _, integers = codec._quantizer.read(payload, x.shape)
    least = 8 * (4 + 2 * len(scales)) + entropy(integers)
    assert least < 8 * codec.used(payload) < 1.03 * least and least < most * x.numel()


@pytest.mark.parametrize("value", [0.0, 1.0, -7.5])
def test_a_constant_takes_next_to_nothing(value):
    assert bits_of("q(8, step=0.2)", torch.full((1024, 576), value)) < 0.1
    assert bits_of('q(16, step=0.2, per="tensor")', torch.full((1024, 576), value)) < 0.05


def test_a_message_of_four_kilobytes_is_near_its_entropy():
    x = gaussian(16, 64)
    codec = parse("q(8, step=0.2)")
    payload = encode(codec, x)
    integers = codec._quantizer.read(payload, x.shape)[2]
    assert codec.used(payload) < 4 + 2 * 16 + 6 + 2 + 4 + 1.02 * entropy(integers) / 8


def test_small_common_steps_need_integers_of_sixteen_bits():
    """With 8 bits one large value widened the step of all."""
    x = gaussian(64, 512)
    x[3, 5] = 4000.0
    expression = "q({}, step=0.005, per='tensor')"
    errors = [rms((roundtrip(expression.format(bits), x) - x).view(-1)) for bits in (8, 16)]
    assert errors[1] < 0.04 < 0.9 < errors[0]
    assert_contract(parse(expression.format(16)), x)


EXPRESSIONS = ["q(8, step=0.2)", "q(16, step=0.002)", 'q(16, step=0.01, per="tensor")', 'q(8, step=1.0, per="channel")']
EXPRESSIONS += ["q(8, step=0.3, group=5)", 'q(8, step=0.5, per="sample")']
SHAPES = [(), (1,), (5,), (1, 9), (3, 7), (33, 70), (2, 3, 4, 5), (2, 9, 3, 8), (7, 300)]
CODED = [*product(EXPRESSIONS, SHAPES), (EXPRESSIONS[0], (70_000,)), (EXPRESSIONS[1], (70_000,))]
"""The last two have more than one chunk."""


@pytest.mark.parametrize(("expression", "shape"), CODED, ids=str)
def test_torch_operations_and_kernels_give_the_same_bytes(expression, shape, monkeypatch):
    """What is traced, and a machine where Numba does not work, take the former."""
    heavy = gaussian(*shape) / gaussian(*shape, seed=1)
    codec, payloads, decoded = parse(expression), [], []
    for covers in (True, False):
        if not covers:
            monkeypatch.setattr(steps, "cover_code", lambda x: False)
            monkeypatch.setattr(steps, "cover", lambda flat, blocks: False)
        for x in (gaussian(*shape) + 0.7, heavy, heavy.round() * 0):
            payloads.append(encode(codec, x))
            decoded.append(roundtrip(codec, x))
    half = len(payloads) // 2
    for one, other in zip(payloads[:half] + decoded[:half], payloads[half:] + decoded[half:], strict=True):
        assert torch.equal(one, other)


def documented_values(payload, codec, x):
    rows = {"row_scales": codec.per == "row", "size": codec.bits // 8}
    used = bytes(payload[: codec.used(payload)].tolist())
    return torch.tensor(documented("read_steps")(used, *x.shape, **rows)).view(x.shape)


@pytest.mark.parametrize("expression", ["q(8, step=0.2)", 'q(8, step=1.0, per="tensor")', "q(16, step=0.001)"])
def test_the_reader_in_the_documentation_reads_what_is_written(expression):
    x, codec = residual_stream(rows=261), parse(expression)
    x[5, 3] = -3000
    payload = encode(codec, x)
    assert codec.used(payload) < len(payload) * (0.7 if codec.bits == 8 else 0.9)
    assert torch.equal(documented_values(payload, codec, x), roundtrip(codec, x))


@pytest.mark.parametrize("expression", ["q(8, step=0.001)", "q(16, step=0.2)"])
def test_integers_that_are_not_coded_are_read_too(expression):
    x, codec = torch.tensor([[1.0, -3.0, 100.0]]), parse(expression)
    payload = encode(codec, x)
    assert codec.used(payload) == len(payload)
    assert torch.equal(documented_values(payload, codec, x), roundtrip(codec, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("expression", [*EXPRESSIONS, "q(8, step=0.001)"])
def test_payloads_of_one_length_are_decoded_to_the_same_values(expression, dtype):
    """So a run over NCCL, where frames have a known length, ends with the weights of a run that codes."""
    codec = parse(expression)
    known = codec.of_known_length()
    assert codec.varies and not known.varies and known.of_known_length() == known == parse(str(known))
    noise = gaussian(200, 40)
    massive, most = noise.clone(), noise.clone()
    massive[[0, 77, 199]] *= 500
    most[::15] *= 500  # 14 of 200 are more than one in 16
    nowhere = torch.where(torch.arange(200)[:, None] % 3 == 0, 0, massive)
    for x in (residual_stream(rows=261)[:, :80], noise[:63], noise[:1], massive, most, nowhere, massive.log()):
        x = x.to(dtype)
        payload = encode(known, x)
        assert known.used(payload) == len(payload) == known.nbytes(x.shape, dtype) == codec.nbytes(x.shape, dtype)
        torch.testing.assert_close(roundtrip(known, x), roundtrip(codec, x), rtol=0, atol=0, equal_nan=True)


def test_wide_rows_lie_in_order_in_their_room():
    x, codec = residual_stream(rows=261), parse('q(8, step=0.2, code="plain")')
    x[130] *= 900
    payload = encode(codec, x)
    room = payload[4 + 2 * 261 + 261 * 256 :].view(torch.int16).view(16, 256)
    assert room[0].argmax() == 9 and room[:2].any(1).all() and not room[2:].any()
    assert torch.equal(documented_values(payload, codec, x), roundtrip(codec, x))
    assert_contract(codec, x)


def test_wide_rows_of_integers_that_coding_does_not_shorten_stay_wide():
    """The second form had none: what was decoded depended on whether coding had saved anything."""
    x = gaussian(64, 4)
    x[5] *= 3000
    codec = parse("q(8, step=0.001)")
    payload = encode(codec, x)
    assert codec.used(payload) == len(payload)
    assert (roundtrip(codec, x)[5] - x[5]).abs().max() < error_of_wide(x[5], 0.001)
    assert torch.equal(documented_values(payload, codec, x), roundtrip(codec, x))


@pytest.mark.parametrize("rows", [65, 16])
@pytest.mark.parametrize("covers", [True, False])
@pytest.mark.parametrize("expression", ["q(8, step=0.2)", 'q(16, step=0.01, per="tensor")'])
def test_damage_is_a_sentence(expression, covers, rows, monkeypatch):
    """Wherever it is, and however the payload is cut: nothing is read beyond it, and nothing hangs."""
    if not covers:
        monkeypatch.setattr(steps, "cover_code", lambda x: False)
    codec, x = parse(expression), residual_stream(rows=rows, width=16)
    payload, out = encode(codec, x), torch.empty_like(x)
    used, chance = codec.used(payload), torch.Generator().manual_seed(0)
    refused = 0
    for trial in range(60):
        damaged = payload.clone()
        if trial % 3 == 0:
            put_length(int(torch.randint(4, used, (1,), generator=chance)), damaged)
        else:
            place = int(torch.randint(4, used, (1,), generator=chance)) if trial % 3 == 1 else 4
            some = damaged[place : place + (1 if trial % 3 == 1 else used)]
            some ^= torch.randint(1, 256, some.shape, dtype=torch.uint8, generator=chance)
            put_length(used, damaged)
        try:
            codec.decode(damaged, out, KEY)
        except CodecError as error:
            refused += 1
            assert "payload" in str(error)
    assert refused > 30


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
        ("q(4, step=0.2)", "needs 8 or 16 bits, .* got q\\(4, step=0.2\\); write q\\(8, step=0.2\\)"),
        ('q(8, step=0.25, code="entropy")', "without code, got"),
        ('q(8, code="plain")', 'q\'s code must be one of "entropy", got "plain"'),
        ('q(8, step=0.25, grid="midrise")', "a grid with zero"),
        ('q(8, step=0.25, scale="minmax")', "a grid with zero"),
    ],
)
def test_a_step_beside_what_it_excludes_is_one_sentence(expression, sentence):
    with pytest.raises(CodecError, match=sentence):
        parse(expression)


@pytest.mark.parametrize("count", [1, 8, 100])
def test_rows_of_zeros_are_not_wide(count):
    """Their scale was taken for the mark of such a row, and the payload could not be decoded."""
    x = torch.cat([torch.zeros(count, 48), gaussian(28, 48)])
    assert torch.equal(roundtrip(parse("q(8, step=0.2)"), x)[:count], x[:count])
    zeros = torch.zeros(count, 48)
    assert torch.equal(roundtrip(parse("q(8, step=0.2)"), zeros), zeros)


def test_rows_of_sizes_that_lie_far_apart_take_room_for_their_own_tables_alone():
    pytest.importorskip("numba")
    from thinwire.compress.codecs.fused import step_kernels

    kinds, offsets = np.zeros(1000, np.int32), np.array([127, -128, 127], np.int32)
    tables, bits, places = step_kernels._by_offset(kinds, offsets)
    assert tables.shape == bits.shape == (2, 1000) and places.tolist() == [0, 1, 0]
