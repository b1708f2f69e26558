"""What feedback sends and keeps in each kind of pass: first visits, warm-up, and evaluation."""

import math

import pytest
import torch

from support.codec_helpers import encode
from support.coder_pair import ROWS, WIDTH, Pair, random
from thinwire.compress.codec import tensor_bytes


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
        for purpose, store in coder.buffers.stores.items()
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
