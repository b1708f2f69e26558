"""One tensor at one end of its channel: a plan made once, what `encode` leaves for `settle`, and what is remembered."""

import math

import pytest
import torch

from thinwire.compress import CodecError, Decoder, Encoder, Key, Microbatch, SlotCounts, parse
from thinwire.compress.stores.memory import MemoryStore

ROWS, WIDTH = 4, 24
KEY = Key(0, 0, "activations", "train", 0, 0)


def coder(kind, expression, made=None, *, samples=16, shape=(ROWS, WIDTH), activation=None):
    def make_store(layout, purpose):
        if made is not None:
            made.append(purpose)
        return MemoryStore(layout)

    counts = SlotCounts(positions=8 * ROWS, samples=samples, evaluation_samples=samples)
    example = torch.empty(shape, device="meta")
    return kind(parse(expression), example, counts=counts, make_store=make_store, activation=activation)


def microbatch(kind="train", ids=None, first=0):
    return Microbatch(kind, range(first, first + ROWS), None if ids is None else torch.tensor(ids))


def random(seed=0):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def carry(sender, receiver, x, which):
    """Send one tensor; what arrives."""
    plan = sender.plan(which)
    payload = torch.empty(plan.nbytes, dtype=torch.uint8)
    sender.settle(sender.encode(x, payload, KEY, plan))
    out = torch.empty_like(x)
    receiver.decode(payload, out, KEY, receiver.plan(which))
    return out


def test_a_plan_says_which_rows_go_in_full_and_how_many_bytes_that_makes():
    sender = coder(Encoder, 'aqsgd(q(2, grid="midrise"))')
    coded, row = math.ceil(2 * WIDTH / 8) + 2, 4 * WIDTH
    first = sender.plan(microbatch(ids=[0, 1, 2, 3]))
    assert (first.rows.full.tolist(), first.full_bytes, first.nbytes) == ([True] * 4, 4 * row, 4 * row)
    payload = torch.empty(first.nbytes, dtype=torch.uint8)
    sender.settle(sender.encode(random(), payload, KEY, first))
    mixed = sender.plan(microbatch(ids=[2, 8, 0, 9]))
    assert mixed.rows.full.tolist() == [False, True, False, True]
    assert (mixed.rows.num_full, mixed.rows.num_coded) == (2, 2)
    assert (mixed.full_bytes, mixed.nbytes) == (2 * row, 2 * row + 2 * coded)
    assert mixed.rows.in_full(torch.arange(4)).tolist() == [1, 3]
    assert mixed.rows.coded(torch.arange(4)).tolist() == [0, 2]


def test_a_plan_is_made_once_for_all_micro_batches_until_something_is_remembered():
    """Indices that a gradient asks for later, after a switch of its codec, must still be recorded."""
    sender = coder(Encoder, "topk(0.25)")
    assert sender.plan(microbatch()) is sender.plan(microbatch(first=ROWS))
    assert sender.plan(microbatch("eval-off")) is not sender.plan(microbatch())
    memory, later = sender.index_memory(), microbatch(first=ROWS)
    plan = sender.plan(later)
    assert not plan.recurs and plan is not sender.plan(microbatch())
    sender.settle(sender.encode(random(), torch.empty(plan.nbytes, dtype=torch.uint8), KEY, plan))
    assert memory[later.positions.start].indices.shape == (ROWS, WIDTH // 4)


@pytest.mark.parametrize(
    ("first", "row_bytes", "close"),
    [("none", 4 * WIDTH, 0.0), ("bf16", 2 * WIDTH, 2**-8), ("q(8)", 2 + WIDTH, 2**-7)],
)
def test_first_visits_go_through_their_own_codec_and_fill_both_buffers_alike(first, row_bytes, close):
    expression, x = f'aqsgd(q(4, grid="midrise"), first={first})', random()
    sender, receiver = coder(Encoder, expression), coder(Decoder, expression)
    assert sender.plan(microbatch(ids=[0, 1, 2, 3])).nbytes == ROWS * row_bytes
    arrived = carry(sender, receiver, x, microbatch(ids=[0, 1, 2, 3]))
    assert (arrived == x).all() == (first == "none")
    assert ((arrived - x).abs() <= close * x.abs().amax(1, keepdim=True)).all()
    kept = [end.buffers.store("train").read(torch.arange(ROWS)) for end in (sender, receiver)]
    assert torch.equal(kept[0], arrived) and torch.equal(kept[1], arrived)
    mixed = microbatch(ids=[2, 8, 0, 9])
    plan, coded = sender.plan(mixed), math.ceil(4 * WIDTH / 8) + 2
    assert (plan.full_bytes, plan.nbytes) == (2 * row_bytes, 2 * row_bytes + 2 * coded)
    nearer = carry(sender, receiver, x[[2, 1, 0, 3]], mixed)
    assert (nearer[0] - x[2]).norm() <= (arrived[2] - x[2]).norm()
    assert sender.buffers.digests() == receiver.buffers.digests()


@pytest.mark.parametrize("inner", ['q(4, grid="midrise")', 'q(4, code="entropy")'])
def test_first_visits_may_take_fewer_bytes_than_planned(inner):
    """A coded part with other rows behind it has its longest size, and zeros where it needs less."""
    expression, x = f"aqsgd({inner}, first=q(8, step=0.2))", torch.randn(ROWS, 512)
    sender, receiver = (coder(kind, expression, shape=(ROWS, 512)) for kind in (Encoder, Decoder))
    assert sender.varies and receiver.varies
    seen = []
    for which, given in ((microbatch(ids=[0, 1, 2, 3]), x), (microbatch(ids=[2, 8, 0, 9]), x[[2, 1, 0, 3]])):
        plan = sender.plan(which)
        payload = torch.full((plan.nbytes,), 0x5A, dtype=torch.uint8)
        sender.settle(sender.encode(given, payload, KEY, plan))
        used = sender.used(payload, plan)
        assert used == receiver.used(payload, receiver.plan(which))
        payload[used:] = 0xA5
        out = torch.empty_like(x)
        receiver.decode(payload, out, KEY, receiver.plan(which))
        assert ((out - given).abs() <= given.abs().amax(1, keepdim=True) / 4).all()
        assert sender.buffers.digests() == receiver.buffers.digests()
        seen.append((plan, payload, used))
    (plan, payload, used), (mixed, both, _) = seen
    assert used == parse("q(8, step=0.2)").used(payload) < plan.nbytes == plan.full_bytes <= sender.capacity
    short = parse("q(8, step=0.2)").used(both[: mixed.full_bytes])
    assert short < mixed.full_bytes and not both[short : mixed.full_bytes].any()


def test_warm_up_and_evaluation_without_compression_stay_in_full_whatever_first_visits_do():
    sender, receiver = (coder(kind, 'aqsgd(q(4, grid="midrise"), first=q(8))') for kind in (Encoder, Decoder))
    for kind in ("warmup", "eval-off"):
        assert torch.equal(carry(sender, receiver, random(), microbatch(kind, ids=[0, 1, 2, 3])), random())
    assert sender.capacity == 4 * ROWS * WIDTH
    assert sender.plan(microbatch(ids=[0, 1, 2, 3])).rows.num_full == 0


def test_planning_changes_nothing_and_a_plan_that_was_made_stays_as_it_is():
    sender = coder(Encoder, 'aqsgd(q(2, grid="midrise"))')
    which = microbatch(ids=[0, 1, 2, 3])
    once, again = sender.plan(which), sender.plan(which)
    assert once.nbytes == again.nbytes == ROWS * WIDTH * 4
    payload = torch.empty(once.nbytes, dtype=torch.uint8)
    sender.settle(sender.encode(random(), payload, KEY, once))
    assert again.nbytes == ROWS * WIDTH * 4
    assert sender.plan(which).nbytes < again.nbytes


def test_a_row_of_one_element_goes_in_full_with_any_stride():
    sender, receiver = (coder(kind, 'q(4, grid="midrise")', shape=(1,)) for kind in (Encoder, Decoder))
    assert carry(sender, receiver, torch.arange(3.0, 5.0)[::2], Microbatch("warmup", range(1))).tolist() == [3.0]


@pytest.mark.parametrize("expression", ["ef(topk(0.25))", 'ef21(q(4, grid="midrise"))', 'aqsgd(q(4, grid="midrise"))'])
def test_buffers_change_when_a_message_is_settled_and_no_sooner(expression):
    sender, ids = coder(Encoder, expression), [0, 1, 2, 3]
    carry(sender, coder(Decoder, expression), random(), microbatch(ids=ids))

    def kept():
        return sender.buffers.store("train").read(torch.arange(ROWS))

    before = kept()
    plan = sender.plan(microbatch(ids=ids))
    encoded = sender.encode(random(1), torch.empty(plan.nbytes, dtype=torch.uint8), KEY, plan)
    assert torch.equal(kept(), before)
    sender.settle(encoded)
    assert not torch.equal(kept(), before)


@pytest.mark.parametrize(
    ("kind", "expression", "passes", "made"),
    [
        (Encoder, 'q(4, grid="midrise")', ["train", "warmup", "eval-on", "eval-off"], []),
        (Encoder, 'ef(q(4, grid="midrise"))', ["warmup", "eval-on", "eval-off"], []),
        (Encoder, 'ef(q(4, grid="midrise"))', ["train"], ["train"]),
        (Decoder, 'ef(q(4, grid="midrise"))', ["train", "warmup", "eval-on", "eval-off"], []),
        (Decoder, 'ef21(q(4, grid="midrise"))', ["eval-off"], []),
        (Decoder, 'ef21(q(4, grid="midrise"))', ["warmup", "train", "eval-on"], ["train"]),
        (Encoder, 'aqsgd(q(4, grid="midrise"))', ["eval-on", "train"], ["eval", "train"]),
        (Encoder, 'aqsgd(q(4, grid="midrise"), eval_history=False)', ["eval-on"], []),
    ],
)
def test_a_store_is_made_by_the_first_pass_that_uses_it(kind, expression, passes, made):
    found = []
    end = coder(kind, expression, found)
    for name in passes:
        end.plan(microbatch(name, ids=[0, 1, 2, 3]))
    assert found == made
    assert set(made) <= set(end.buffers.layouts)


@pytest.mark.parametrize("expression", ['q(4, grid="midrise")', 'ef21(q(4, grid="midrise"))', "topk(0.25)"])
@pytest.mark.parametrize("kind", ["warmup", "eval-off"])
def test_what_goes_in_full_arrives_exactly_and_is_planned_so_at_both_ends(expression, kind):
    sender, receiver = coder(Encoder, expression), coder(Decoder, expression)
    assert sender.plan(microbatch(kind)).nbytes == receiver.plan(microbatch(kind)).nbytes == ROWS * WIDTH * 4
    assert torch.equal(carry(sender, receiver, random(), microbatch(kind)), random())
    assert not torch.equal(carry(sender, receiver, random(1), microbatch()), random(1))


def test_no_payload_is_longer_than_the_capacity():
    sender = coder(Encoder, 'aqsgd(q(8, grid="midrise"))')
    sizes = {sender.plan(microbatch("eval-off")).nbytes, sender.plan(microbatch(ids=[0, 1, 2, 3])).nbytes}
    assert max(sizes) == sender.capacity == ROWS * WIDTH * 4


def test_reuse_reads_the_trace_of_its_own_micro_batch_and_lets_it_go():
    forth = coder(Encoder, "topk(0.25)"), coder(Decoder, "topk(0.25)")
    back = coder(Encoder, "reuse", activation=forth[1]), coder(Decoder, "reuse", activation=forth[0])
    places = [microbatch(first=first) for first in (0, ROWS)]
    sent = [carry(*forth, random(seed), which) for seed, which in enumerate(places)]
    for which, activation in zip(places, sent, strict=True):
        gradient = carry(*back, random(9), which)
        assert torch.equal(gradient != 0, activation != 0)
        assert torch.equal(gradient[gradient != 0], random(9)[activation != 0])
    for end in back:
        with pytest.raises(KeyError):
            end.plan(places[0])  # one gradient for each activation, and then it is forgotten


def test_what_is_missing_is_told_with_what_to_say():
    with pytest.raises(CodecError, match=r"give the stages sample ids, with stage\.begin\(Pass\(sample_ids"):
        coder(Encoder, 'aqsgd(q(4, grid="midrise"))').plan(microbatch())
    with pytest.raises(CodecError, match=r"needs a slot for each sample, got none: .* Wire\(slots=SlotCounts"):
        coder(Encoder, 'aqsgd(q(4, grid="midrise"))', samples=0).plan(microbatch(ids=[0, 1, 2, 3]))
    with pytest.raises(CodecError, match="reuse needs topk or randk"):
        coder(Encoder, "reuse", activation=coder(Encoder, 'q(4, grid="midrise")'))


def test_evaluation_with_nothing_compressed_needs_no_sample_ids():
    sender, receiver = coder(Encoder, 'aqsgd(q(4, grid="midrise"))'), coder(Decoder, 'aqsgd(q(4, grid="midrise"))')
    assert torch.equal(carry(sender, receiver, random(), microbatch("eval-off")), random())
