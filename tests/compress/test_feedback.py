import itertools
import math

import pytest
import torch

from support.codec_helpers import encode
from thinwire.compress import CodecError, Decoder, Encoder, Key, Microbatch, SlotCounts, parse
from thinwire.compress.codec import tensor_bytes
from thinwire.compress.stores.memory import MemoryStore

ROWS, WIDTH = 4, 24
KEY = Key(0, 0, "activations", "train", 0, 0)


class Pair:
    """Both ends of one tensor's channel, and what crossed between them."""

    def __init__(
        self,
        expression,
        dtype=torch.float32,
        positions=ROWS,
        samples=16,
        fill=True,
        activations=(None, None),
        shape=(ROWS, WIDTH),
    ):
        example = torch.empty(shape, dtype=dtype, device="meta")
        counts = SlotCounts(positions=positions, samples=samples, evaluation_samples=samples)
        self.dtype = dtype
        self.sender, self.receiver = (
            kind(
                parse(expression),
                example,
                counts=counts,
                make_store=lambda layout, purpose: MemoryStore(layout),
                warmup_fill=fill,
                activation=activation,
            )
            for kind, activation in zip((Encoder, Decoder), activations, strict=True)
        )

    def carry(self, x, samples=None, kind="train", step=0, start=0):
        positions = range(start, start + self.sender.rows)
        microbatch = Microbatch(kind, positions, None if samples is None else torch.tensor(samples))
        key = Key(0, 0, "activations", kind, step, 0)
        sent, received = self.sender.plan(microbatch), self.receiver.plan(microbatch)
        assert sent.nbytes == received.nbytes <= self.sender.capacity
        self.nbytes = sent.nbytes
        payload = torch.empty(self.nbytes, dtype=torch.uint8)
        x = x.to(self.dtype)
        before = x.clone()
        encoded = self.sender.encode(x, payload, key, sent)
        self.sent = payload.clone()
        self.sender.settle(encoded)
        assert torch.equal(payload, self.sent), "settle wrote into a frame that may be on its way"
        assert torch.equal(x, before), "the tensor sent was changed"
        out = torch.empty_like(x)
        self.receiver.decode(payload, out, key, received)
        assert self.sender.buffers.digests() == self.receiver.buffers.digests()
        return out


def random(step):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


CODECS = ["q(4)", "q(8)", "topk(0.25)", "randk(0.5)", 'topk(0.25, values="fp16")', "fp16", "dither(4)", "lowrank(2)"]


@pytest.mark.parametrize("codec", CODECS)
def test_efs_sum_of_messages_is_the_sum_of_inputs_minus_the_last_error(codec):
    pair = Pair(f"ef({codec})")
    inputs = [random(step) for step in range(20)]
    outputs = [pair.carry(x, step=step) for step, x in enumerate(inputs)]
    error = pair.sender.buffers._stores["train"].read(torch.arange(ROWS))
    torch.testing.assert_close(sum(outputs).double(), sum(inputs).double() - error.double(), rtol=0, atol=1e-4)
    assert error.abs().max() > 0
    assert pair.receiver.buffers._stores == {}, "the receiver of ef keeps nothing"


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
        'q(3, rotate="hadamard")',
        "q(3, outliers=0.05)",
        "dither(4)",
        "fp8",
        "bf16",
        "fp16",
        "topk(0.25)",
        'topk(0.25, values="q(8)")',
        "randk(0.5)",
        "lowrank(2)",
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


def test_the_first_visit_of_a_sample_goes_in_full_and_later_ones_do_not():
    pair = Pair("aqsgd(q(2))")
    row, coded = WIDTH * 4, math.ceil(2 * WIDTH / 8) + 2
    first = random(0)
    assert torch.equal(pair.carry(first, [0, 1, 2, 3]), first)
    assert pair.nbytes == ROWS * row
    x = first + 0.1 * random(1)
    mixed = pair.carry(x, [2, 8, 0, 9], step=1)
    assert pair.nbytes == 2 * row + 2 * coded
    assert torch.equal(mixed[[1, 3]], x[[1, 3]])
    assert not torch.equal(mixed[[0, 2]], x[[0, 2]])
    pair.carry(x, [8, 9, 0, 1], step=2)
    assert pair.nbytes == ROWS * coded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_full_come_first_in_a_payload_and_the_codecs_of_the_others_follow(dtype):
    pair = Pair("aqsgd(q(4))", dtype=dtype)
    first, x = random(0).to(dtype), random(1).to(dtype)
    pair.carry(first, [0, 1, 2, 3])
    pair.carry(x, [2, 8, 0, 9], step=1)
    in_full = tensor_bytes(x[[1, 3]])
    assert torch.equal(pair.sent[: len(in_full)], in_full)
    assert torch.equal(pair.sent[len(in_full) :], encode("q(4)", x[[0, 2]].float() - first[[2, 0]].float()))


def test_the_model_computes_with_the_unrounded_sum_and_the_next_difference_is_to_the_stored_one():
    pair = Pair("aqsgd(q(4), store_bits=4)")
    ids, x = [0, 1, 2, 3], random(0)
    pair.carry(x, ids)
    kept = pair.receiver.buffers._stores["train"].read(torch.tensor(ids))
    assert 0 < (kept - x).abs().max() < 0.5
    out = pair.carry(x, ids, step=1)
    alone = Pair("q(4)").carry(x - kept)
    torch.testing.assert_close(out, kept + alone, rtol=0, atol=0)


def test_a_first_visit_sends_the_tensors_own_dtype():
    pair = Pair("aqsgd(q(4))", dtype=torch.bfloat16)
    x = random(0).bfloat16()
    assert torch.equal(pair.carry(x, [0, 1, 2, 3]), x)
    assert pair.nbytes == ROWS * WIDTH * 2


@pytest.mark.parametrize("shape", [(), (ROWS,)])
@pytest.mark.parametrize(
    "expression", ["ef(topk(0.5))", "efmixed(topk(0.5))", "ef21(topk(0.5))", "aqsgd(topk(0.5))", "ef21(q(8))"]
)
def test_a_tensor_without_rows_or_of_one_number_a_row_is_one_sample(expression, shape):
    pair = Pair(expression, shape=shape)
    x, ids = torch.tensor([3.0, -2.0, 0.5, 1.0])[: pair.sender.rows].reshape(shape), [3, 5, 0, 9][: pair.sender.rows]
    sent = [
        pair.carry(x, ids, kind=kind, step=step) for step, kind in enumerate(["warmup", "train", "train", "eval-on"])
    ]
    assert torch.equal(sent[0], x)
    assert all(out.count_nonzero() >= math.ceil(x.numel() / 2) for out in sent)


def test_positions_keep_buffers_apart():
    pair = Pair("ef21(q(2))", positions=2 * ROWS)
    x = random(0)
    for step in range(6):
        pair.carry(x, step=step, start=0)
    near = float((pair.carry(x, step=7, start=0) - x).norm())
    fresh = float((pair.carry(x, step=7, start=ROWS) - x).norm())
    assert near < 0.2 * fresh


@pytest.mark.parametrize("rule", ["ef", "ef21", "efmixed"])
def test_every_rule_keeps_buffers_by_sample_where_that_is_asked(rule):
    pair = Pair(f'{rule}(topk(0.25), slot="sample")')
    x = random(0)
    first = pair.carry(x, [0, 1, 2, 3])
    elsewhere = pair.carry(x, [4, 5, 6, 7], step=1)
    again = pair.carry(x, [0, 1, 2, 3], step=2)
    assert torch.equal(first, elsewhere)
    assert not torch.equal(first, again)


def test_sample_slots_need_sample_ids():
    with pytest.raises(CodecError, match="keeps a buffer for each sample: give the stages sample ids"):
        Pair("aqsgd(q(4))").carry(random(0))


@pytest.mark.parametrize(("fill", "gain"), [(True, True), (False, False)])
def test_warm_up_sends_in_full_and_fills_buffers_where_asked(fill, gain):
    pair, x = Pair("ef21(q(2))", fill=fill), random(0)
    assert torch.equal(pair.carry(x, kind="warmup"), x)
    assert pair.nbytes == ROWS * WIDTH * 4
    out = pair.carry(x, step=1)
    assert ((out - x).norm() < 1e-5) == gain
    aqsgd = Pair("aqsgd(q(2))", fill=fill)
    aqsgd.carry(x, [0, 1, 2, 3], kind="warmup")
    aqsgd.carry(x, [0, 1, 2, 3], step=1)
    assert (aqsgd.nbytes < ROWS * WIDTH * 4) == fill


def test_warm_up_of_ef_leaves_no_error_behind():
    pair, x = Pair("ef(q(2))"), random(0)
    assert torch.equal(pair.carry(x, kind="warmup"), x)
    assert torch.equal(pair.carry(x, step=1), Pair("q(2)").carry(x, step=1))


def stores(pair):
    return {
        (end, purpose): store.digests()
        for end, coder in (("sender", pair.sender), ("receiver", pair.receiver))
        for purpose, store in coder.buffers._stores.items()
        if purpose == "train"
    }


@pytest.mark.parametrize(
    "expression",
    ["ef(topk(0.25))", "efmixed(topk(0.25))", "ef21(topk(0.25))", "aqsgd(q(2))", 'ef21(q(2), slot="sample")'],
)
@pytest.mark.parametrize("kind", ["eval-on", "eval-off"])
def test_evaluation_never_writes_trainings_buffers(expression, kind):
    pair, ids = Pair(expression), [0, 1, 2, 3]
    for step in range(3):
        pair.carry(random(step), ids, step=step)
    before = stores(pair)
    for step in range(2):
        out = pair.carry(random(9 + step), ids, kind=kind, step=step)
    assert stores(pair) == before
    assert torch.equal(out, random(10)) == (kind == "eval-off")


def test_evaluation_of_ef_sends_the_codec_of_x_alone():
    pair, x = Pair("ef(topk(0.25))"), random(7)
    for step in range(3):
        pair.carry(random(step), step=step)
    assert torch.equal(pair.carry(x, kind="eval-on"), Pair("topk(0.25)").carry(x))


@pytest.mark.parametrize(
    "expression", ["ef(topk(0.25))", "ef(randk(0.5))", "efmixed(topk(0.25))", "aqsgd(none, eval_history=False)"]
)
def test_evaluation_of_a_16_bit_tensor_is_as_long_as_both_ends_expect(expression):
    """Feedback computes in float32; a codec whose payload depends on the dtype once got bf16 and float32."""
    pair, x = Pair(expression, dtype=torch.bfloat16), random(7).bfloat16()
    pair.carry(random(1), [0, 1, 2, 3])
    kept = pair.carry(x, [0, 1, 2, 3], kind="eval-on")
    assert torch.equal(kept, torch.where(kept != 0, x, 0)) and kept.count_nonzero() >= ROWS * WIDTH // 4


def test_evaluation_of_ef21_reads_the_trained_buffer():
    pair, x = Pair("ef21(topk(0.25))"), random(7)
    for step in range(30):
        pair.carry(x, step=step)
    assert (pair.carry(x, kind="eval-on") - x).norm() < 0.1 * x.norm()


def test_evaluation_of_aqsgd_has_a_history_of_its_own_unless_told_otherwise():
    pair, ids, x = Pair("aqsgd(q(2))"), [0, 1, 2, 3], random(7)
    pair.carry(random(1), ids)
    assert torch.equal(pair.carry(x, ids, kind="eval-on"), x)
    pair.carry(x + 0.01, ids, kind="eval-on", step=1)
    assert pair.nbytes < ROWS * WIDTH * 4
    memoryless = Pair("aqsgd(q(2), eval_history=False)")
    memoryless.carry(random(1), ids)
    assert torch.equal(memoryless.carry(x, ids, kind="eval-on"), Pair("q(2)").carry(x))


@pytest.mark.parametrize(
    "activations", ["topk(0.25)", "randk(0.25)", "ef(topk(0.25))", "ef21(topk(0.25))", "aqsgd(topk(0.25))"]
)
def test_reuse_sends_the_gradients_values_at_the_activations_indices(activations):
    forward = Pair(activations)
    back = Pair("reuse", activations=(forward.receiver, forward.sender))
    ids = [0, 1, 2, 3]
    for step in range(3):
        forward.carry(random(step), ids, step=step)
        gradient = random(100 + step)
        out = back.carry(gradient, step=step)
        in_full = activations.startswith("aqsgd") and step == 0
        kept = out != 0
        assert (kept.sum(1) == (WIDTH if in_full else 6)).all()
        scale = 4.0 if activations.startswith("randk") else 1.0
        torch.testing.assert_close(out[kept], scale * gradient[kept], rtol=0, atol=0)
        assert back.nbytes == ROWS * (WIDTH if in_full else 6) * 4


def test_reuse_goes_in_full_where_the_activation_did():
    forward = Pair("aqsgd(topk(0.25))")
    back = Pair("reuse", activations=(forward.receiver, forward.sender))
    forward.carry(random(0), [0, 1, 2, 3])
    back.carry(random(1))
    forward.carry(random(0), [0, 7, 2, 8], step=1)
    out = back.carry(random(1), step=1)
    assert torch.equal(out[[1, 3]], random(1)[[1, 3]])
    assert ((out[[0, 2]] != 0).sum(1) == 6).all()
    forward.carry(random(0), [0, 1, 2, 3], kind="warmup", step=2)
    assert torch.equal(back.carry(random(1), kind="warmup", step=2), random(1))


def test_reuse_needs_a_sparse_activation():
    with pytest.raises(CodecError, match="reuse needs topk or randk on the activations of the same boundary"):
        Pair("reuse", activations=(Pair("q(4)").receiver, Pair("q(4)").sender))
    with pytest.raises(CodecError, match="reuse needs topk or randk"):
        Pair("reuse")


def test_state_comes_back_exactly():
    pair, ids = Pair("aqsgd(topk(0.25), store_bits=8)"), [0, 1, 2, 3]
    for step in range(3):
        pair.carry(random(step), ids, step=step)
    resumed = Pair("aqsgd(topk(0.25), store_bits=8)")
    resumed.sender.load_state_dict(pair.sender.state_dict())
    resumed.receiver.load_state_dict(pair.receiver.state_dict())
    assert resumed.sender.buffers.digests() == pair.sender.buffers.digests() != {}
    assert torch.equal(resumed.carry(random(9), ids, step=3), pair.carry(random(9), ids, step=3))


def test_state_replaces_what_was_remembered():
    pair, fresh, ids = Pair("aqsgd(topk(0.25))"), Pair("aqsgd(topk(0.25))"), [0, 1, 2, 3]
    pair.carry(random(0), ids)
    pair.carry(random(1), ids, kind="eval-on")
    for end, saved in ((pair.sender, fresh.sender), (pair.receiver, fresh.receiver)):
        end.load_state_dict(saved.state_dict())
        assert end.buffers.digests() == {}
    assert torch.equal(pair.carry(random(2), ids, step=1), random(2)), "first visits again"


@pytest.mark.parametrize("mixed", [False, True])
def test_a_sum_beyond_fp16_is_cut_as_codecs_cut(mixed):
    pair = Pair("aqsgd(q(2))", dtype=torch.float16)
    ids = [0, 1, 2, 3]
    pair.carry(torch.full((ROWS, WIDTH), 6e4), ids)
    x = random(0).sign() * 3e4 + 3e4  # from 0 to 6e4: two bits overshoot
    out = pair.carry(x, [0, 1, 2, 9] if mixed else ids, step=1)
    assert out.isfinite().all() and out.max() == torch.finfo(torch.float16).max


@pytest.mark.parametrize("expression", ["lowrank(2)", "ef21(lowrank(2))"])
def test_lowrank_goes_on_from_the_last_training_message_in_its_place(expression):
    pair, evaluated = Pair(expression, positions=2 * ROWS), Pair(expression, positions=2 * ROWS)
    x = random(0)
    first = pair.carry(x)
    evaluated.carry(x)
    evaluated.carry(random(1), kind="eval-on")
    resumed = Pair(expression, positions=2 * ROWS)
    resumed.sender.load_state_dict(pair.sender.state_dict())
    resumed.receiver.load_state_dict(pair.receiver.state_dict())
    fresh = Pair(expression, positions=2 * ROWS)
    again = pair.carry(x, step=1)
    assert torch.equal(evaluated.carry(x, step=1), again)
    assert torch.equal(resumed.carry(x, step=1), again)
    assert not torch.equal(fresh.carry(x, step=1), again)
    assert (again - x).norm() < (first - x).norm()
    assert torch.equal(pair.carry(x, step=2, start=ROWS), fresh.carry(x, step=2, start=ROWS)), "of another place"
    unaware = Pair(expression, positions=2 * ROWS)
    assert not torch.equal(pair.carry(x, step=3, start=ROWS), unaware.carry(x, step=3, start=ROWS)), "of that place"


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
