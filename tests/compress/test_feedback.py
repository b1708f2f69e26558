"""The rules of feedback: their arithmetic, the codecs and channels they accept, and both ends that agree."""

import itertools
import math

import pytest
import torch

from support.coder_pair import ROWS, WIDTH, Pair, random
from thinwire.compress import CodecError, Key, parse

CODECS = ["q(4)", "q(8)", "topk(0.25)", "randk(0.5)", 'topk(0.25, values="fp16")', "fp16"]


@pytest.mark.parametrize("codec", CODECS)
def test_efs_sum_of_messages_is_the_sum_of_inputs_minus_the_last_error(codec):
    pair = Pair(f"ef({codec})")
    inputs = [random(step) for step in range(20)]
    outputs = [pair.carry(x, step=step) for step, x in enumerate(inputs)]
    error = pair.sender.buffers.stores["train"].read(torch.arange(ROWS))
    torch.testing.assert_close(sum(outputs).double(), sum(inputs).double() - error.double(), rtol=0, atol=1e-4)
    assert error.abs().max() > 0
    assert pair.receiver.buffers.stores == {}, "the receiver of ef keeps nothing"


@pytest.mark.parametrize("codec", ["q(4)", "q(2)", "topk(0.25)", "randk(0.5, scaled=False)", "fp16"])
def test_efs_sum_is_exact_in_float64(codec):
    """Its formulas alone, for a coder computes in float32: multiples of 2**-10 leave nothing to be rounded away."""
    rule, error, sent = parse(f"ef({codec})"), torch.zeros(ROWS, WIDTH, dtype=torch.float64), []
    inputs = [(random(step) * 1024).round().double() / 1024 for step in range(20)]
    for step, x in enumerate(inputs):
        message, decoded = torch.empty_like(x), torch.empty_like(x)
        rule.write_message(x, error, message)
        payload = torch.empty(rule.inner.nbytes(x.shape, x.dtype), dtype=torch.uint8)
        key = Key(0, 0, "activations", "train", step, 0)
        rule.inner.encode(message, payload, key)
        rule.inner.decode(payload, decoded, key)
        rule.advance(message, decoded, error)
        sent.append(decoded)
    assert error.abs().max() > 0
    assert torch.equal(sum(sent), sum(inputs) - error)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["ef21", "aqsgd"])
@pytest.mark.parametrize(
    "codec",
    [
        "q(4)",
        "q(2)",
        'q(3, scale="minmax")',
        'q(4, round="stochastic")',
        "fp8",
        "bf16",
        "fp16",
        "topk(0.25)",
        'topk(0.25, values="q(8)")',
        "randk(0.5)",
    ],
)
def test_differences_shrink_on_a_constant_input(rule, codec):
    pair = Pair(f"{rule}({codec})")
    x, ids = random(0), [3, 5, 0, 9]
    pair.carry(random(1), ids)
    errors = [float((pair.carry(x, ids, step=step + 1) - x).norm()) for step in range(24)]
    assert errors[-1] < 0.05 * errors[0] or errors[-1] < 1e-3, errors
    plain = float((Pair(codec).carry(x) - x).norm()) if codec != "randk(0.5)" else math.inf
    assert errors[-1] < plain


def test_minmax_of_one_bit_never_converges():
    pair = Pair('ef21(q(1, scale="minmax", per="tensor"))')
    x = random(0)
    errors = [float((pair.carry(x, step=step) - x).norm()) for step in range(30)]
    assert errors[-1] > 0.1 * errors[0], errors


def test_efmixed_sends_exactly_k_at_the_mixed_indices():
    pair = Pair("efmixed(topk(0.25))")
    for step in range(5):
        out = pair.carry(random(step), step=step)
        assert ((out != 0).sum(1) == 6).all()
    plain = Pair("ef(topk(0.25))")
    for step in range(5):
        other = plain.carry(random(step), step=step)
    assert not torch.equal(out, other)
    rows = Pair('efmixed(topk(0.25, per="row"))', shape=(4, 3, 8)).carry(random(0).view(4, 3, 8))
    assert ((rows != 0).sum(2) == 2).all()


def test_the_model_computes_with_the_unrounded_sum_and_the_next_difference_is_to_the_stored_one():
    pair = Pair("aqsgd(q(4), store_bits=4)")
    ids, x = [0, 1, 2, 3], random(0)
    pair.carry(x, ids)
    kept = pair.receiver.buffers.stores["train"].read(torch.tensor(ids))
    assert 0 < (kept - x).abs().max() < 0.5
    out = pair.carry(x, ids, step=1)
    alone = Pair("q(4)").carry(x - kept)
    torch.testing.assert_close(out, kept + alone, rtol=0, atol=0)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_sum_beyond_fp16_is_cut_as_codecs_cut(mixed):
    pair = Pair('aqsgd(q(2, grid="midrise"))', dtype=torch.float16)
    ids = [0, 1, 2, 3]
    pair.carry(torch.full((ROWS, WIDTH), 6e4), ids)
    x = random(0).sign() * 3e4 + 3e4  # from 0 to 6e4: two bits overshoot
    out = pair.carry(x, [0, 1, 2, 9] if mixed else ids, step=1)
    assert out.isfinite().all() and out.max() == torch.finfo(torch.float16).max


@pytest.mark.parametrize(
    ("expression", "channel", "said"),
    [
        ("aqsgd(q(4))", "gradients", "aqsgd is for activations only"),
        ("reuse", "activations", "reuse is for gradients only"),
    ],
)
def test_methods_have_their_channel(expression, channel, said):
    with pytest.raises(CodecError, match=said):
        parse(expression).check_channel(channel)


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("ef(reuse)", "ef cannot go around reuse"),
        ("ef21(reuse)", "ef21 cannot go around reuse"),
        ("efmixed(q(4))", "efmixed chooses the indices itself, so it goes around topk only, got q\\(4\\)"),
        ("ef(ef(q(4)))", "ef goes around a codec, got ef\\(q\\(4\\)\\)"),
        ("ef()", "missing a required argument: 'codec'"),
        ('ef21(q(4), slot="row")', 'ef21\'s slot must be one of "position", "sample", got "row"'),
        ("aqsgd(q(4), store_bits=5)", "store_bits must be one of 32, 16, 8, 4, got 5"),
        ("ef(q(4), store_bits=8.0)", "store_bits must be one of 32, 16, 8, 4, got 8.0"),
        ("ef(q(4), store_bits=[8])", r"store_bits must be one of 32, 16, 8, 4, got \[8\]"),
        ('aqsgd(q(4), eval_history="no")', "aqsgd's eval_history must be True or False, got 'no'"),
    ],
)
def test_refused_combinations_are_one_sentence(expression, said):
    with pytest.raises(CodecError, match=said):
        parse(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "ef(topk(0.1))",
        'ef21(topk(0.1), slot="sample")',
        "efmixed(topk(0.1))",
        "aqsgd(q(4))",
        'aqsgd(topk(0.3), store="disk", store_bits=8)',
        'aqsgd(q(2, per="tensor"), eval_history=False)',
    ],
)
def test_an_expression_is_what_it_prints(expression):
    assert str(parse(expression)) == expression
    assert parse(str(parse(expression))) == parse(expression)


@pytest.mark.parametrize("method", ["ef(q(4))", "ef21(topk(0.25), store_bits=8)", "aqsgd(q(2), first=q(8))"])
def test_torchs_default_dtype_does_not_matter(method):
    pairs = Pair(method), Pair(method)
    for step in range(4):
        wanted = pairs[0].carry(random(step), range(ROWS), step=step)
        x = random(step)
        try:
            torch.set_default_dtype(torch.bfloat16)
            assert torch.equal(pairs[1].carry(x, range(ROWS), step=step), wanted)
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "codec", "bits"),
    list(itertools.product(["ef", "ef21", "aqsgd"], ["q(3)", "topk(0.3)", "randk(0.3)"], [32, 16, 8, 4])),
)
def test_both_ends_agree_after_fifty_steps(rule, codec, bits):
    pair = Pair(f"{rule}({codec}, store_bits={bits})")
    for step in range(50):
        ids = [(step * 3 + row * 5) % 16 for row in range(ROWS)]
        pair.carry(random(step % 7), ids, step=step)  # compares the digests of both ends


@pytest.mark.parametrize("first", ['"q(8)"', "reuse", "ef(q(4))", "8"])
def test_first_visits_take_a_codec_that_reads_no_other_message(first):
    with pytest.raises(CodecError, match="aqsgd's first must be a codec that reads no other message, got "):
        parse(f"aqsgd(q(2), first={first})")


@pytest.mark.parametrize("first", ["q(8, step=0.1)", "bf16", "topk(0.5)", "randk(0.5, scaled=False)"])
def test_the_codec_of_first_visits_is_written_as_any_other(first):
    method = parse(f"aqsgd(q(2), first={first})")
    assert (str(method), method.opening) == (f"aqsgd(q(2), first={first})", parse(first))
