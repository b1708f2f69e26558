"""The buffers of feedback: which slot a row uses, and a state that comes back exactly."""

import pytest
import torch

from support.coder_pair import ROWS, Pair, random
from thinwire.compress import CodecError


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
