"""Where stages live: rank arithmetic without a process group, and what is gathered from all stages with one."""

import math
from datetime import timedelta

import pytest
import torch.distributed as dist

from support.processes import left_by_the_first, outcomes_of, run
from thinwire.pipeline.errors import MismatchError, PeerError
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.processes.placement import Placement

IN_A_V = Placement({0: 0, 1: 1, 2: 1, 3: 0})


@pytest.mark.parametrize(
    ("placement", "stages", "last"),
    [
        (Placement({0: 0, 1: 1}), [[0], [1]], 1),
        (Placement({0: 0, 1: 1, 2: 0, 3: 1}), [[0, 2], [1, 3]], 1),
        (IN_A_V, [[0, 3], [1, 2]], 0),
        (Placement({0: 0, 1: 0, 2: 0}), [[0, 1, 2], []], 0),
        (Placement({1: 1, 0: 0, 2: 0}), [[0, 2], [1]], 0),
    ],
)
def test_which_stages_a_process_holds_and_where_the_loss_is(placement, stages, last):
    assert [placement.stages_of(process) for process in range(2)] == stages
    assert (placement.num_stages, placement.last_process) == (sum(map(len, stages)), last)


def test_the_counterparts_of_three_replicas_meet_in_rounds_of_disjoint_pairs():
    where = Placement({0: 2, 1: 3}, replica=1, num_replicas=3)
    assert where.counterparts == [(2, 4), (3, 5), (0, 2), (1, 3), (0, 4), (1, 5)]
    assert [where.counterpart(3, replica) for replica in range(3)] == [1, 3, 5]
    assert Placement({0: 0, 1: 1}).counterparts == []


def grouped(rank):
    made, new_group = [], dist.new_group

    def seen(ranks, timeout, **others):
        made.append((ranks, timeout.total_seconds()))
        return new_group(ranks, timeout=timeout, **others)

    dist.new_group = seen
    first = 2 * (rank // 2)
    where = Placement({0: first, 1: first + 1}, rank // 2, 3)
    where = collectives.connected(where, timedelta(seconds=50), timedelta(seconds=70))
    groups = [dist.get_process_group_ranks(group) for group in (where.pipeline, where.across)]
    return groups, made


@pytest.mark.processes
def test_replicas_wait_longer_for_each_other_than_stages():
    ranks = [[0, 1], [2, 3], [4, 5]]
    for rank, (groups, made) in enumerate(run(grouped, 6)):
        assert groups == [ranks[rank // 2], [row[rank % 2] for row in ranks]]
        assert made == [(groups[0], 50), (groups[1], 70)]


def numbers(rank):
    mine = {stage: math.pi * 10.0**stage for stage in IN_A_V.stages_of(rank)}
    return collectives.gather_numbers(IN_A_V, mine)


@pytest.mark.processes
def test_every_process_knows_every_stages_number_exactly_in_stage_order():
    expected = [math.pi * 10.0**stage for stage in range(4)]
    assert run(numbers, 2) == [expected, expected]


def compared(rank, drifting):
    def digests(stage):
        return {f"boundary {boundary}": f"{boundary}" for boundary in (stage - 1, stage) if 0 <= boundary < 3}

    mine = {stage: digests(stage) for stage in IN_A_V.stages_of(rank)}
    if drifting and rank == 1:
        mine[2]["boundary 2"] = "other"
    collectives.compare(IN_A_V, mine)
    return "alike"


@pytest.mark.processes
def test_buffers_that_are_alike_pass_and_the_first_that_differ_are_named_where_the_last_stage_is():
    assert run(compared, 2, False) == ["alike", "alike"]
    outcomes = outcomes_of(compared, 2, True)
    assert outcomes[1] == (True, "alike")
    returned, told = outcomes[0]
    assert not returned
    assert "MismatchError: the buffers of boundary 2 differ between stages 2 and 3" in told


def test_replicas_with_other_weights_are_named(monkeypatch):
    where = Placement({0: 0, 1: 0}, replica=0, num_replicas=3)
    monkeypatch.setattr(collectives, "everyone_across", lambda where, mine: [mine, mine, ["a", "other"]])
    with pytest.raises(MismatchError, match="of stage 1 differ between replicas 0 and 2, but all"):
        collectives.compare_replicas(where, {0: "a", 1: "b"})
    monkeypatch.setattr(collectives, "everyone_across", lambda where, mine: [mine] * 3)
    collectives.compare_replicas(where, {0: "a", 1: "b"})


def left_alone(rank):
    left_by_the_first(rank)
    with pytest.raises(PeerError) as caught:
        collectives.gather_numbers(Placement({0: 0, 1: 1}), {1: 1.0})
    return str(caught.value)


@pytest.mark.processes
def test_a_process_that_is_gone_is_told_with_what_was_awaited():
    outcomes = outcomes_of(left_alone, 2)
    returned, told = outcomes[1]
    assert returned, told
    assert told.startswith("stage 1 was waiting for numbers of all stages: ")
