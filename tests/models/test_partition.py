import math
import random
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.models.errors import ModelError
from thinwire.models.partition import Machine, cut_after, explicit, partition, partition_over


def all_cuts(count: int, num_stages: int) -> list[tuple[range, ...]]:
    return [
        tuple(range(a, b) for a, b in pairwise((0, *inner, count)))
        for inner in combinations(range(1, count), num_stages - 1)
    ]


def over_alike(costs, num_stages, boundary_costs=None, **machine):
    """A cut over machines that are alike."""
    return partition_over([Machine(costs=costs, **machine)] * num_stages, boundary_costs=boundary_costs)


def dearest(costs: list[float], cuts: tuple[range, ...]) -> float:
    return max(sum(costs[i] for i in cut) for cut in cuts)


@pytest.mark.parametrize(
    ("costs", "num_stages", "sizes"),
    [
        ([1], 1, [1]),
        ([1, 1, 1, 1], 2, [2, 2]),
        ([1, 1, 1, 1], 4, [1, 1, 1, 1]),
        ([5, 1, 1, 1, 1, 1], 2, [1, 5]),
        ([1, 1, 1, 1, 1, 5], 2, [5, 1]),
        # GPT-2 with twelve blocks, a free embedding and a cheap head
        ([0, *[10] * 12, 1], 4, [4, 3, 3, 4]),
        ([0, *[10] * 12, 45], 4, [5, 4, 4, 1]),
        # ties: the last cut comes as late as it can, then the one before
        ([1, 1, 1, 1, 1], 4, [2, 1, 1, 1]),
        ([1, 1, 1, 1, 1, 4], 3, [3, 2, 1]),
        ([0, 0, 0], 2, [2, 1]),
        # 0.1 + 0.2 + 0.3 is above 0.3 + 0.3 when added one by one; rounded once, it ties
        ([0.1, 0.2, 0.3, 0.3], 2, [3, 1]),
    ],
)
def test_partition(costs, num_stages, sizes):
    assert [len(cut) for cut in partition(costs, num_stages)] == sizes


def test_a_thousand_stages():
    """Trying every span of layers for every stage took minutes."""
    assert [len(cut) for cut in partition([1] * 1002, 1000)] == [2, 2, *[1] * 998]
    even = [1, 2, 3, 4] * 100
    assert dearest(even, partition(even, 200)) == 6


def test_partition_is_as_good_as_trying_everything():
    draw = random.Random(0)
    for _ in range(200):
        count = draw.randint(1, 9)
        num_stages = draw.randint(1, count)
        costs = [float(draw.randint(0, 6)) for _ in range(count)]
        cuts = partition(costs, num_stages)
        assert cuts in all_cuts(count, num_stages), f"{cuts} is no cut of {costs}"
        best = min(dearest(costs, other) for other in all_cuts(count, num_stages))
        assert dearest(costs, cuts) == best, f"{costs} into {num_stages}: {cuts}, {best} is possible"


@st.composite
def pipelines(draw):
    """Costs, boundary costs, memory of layers, and a number of stages."""
    count = draw(st.integers(1, 7))
    value = st.integers(0, 6).map(float)
    costs, memory = (draw(st.lists(value, min_size=count, max_size=count)) for _ in range(2))
    boundary_costs = draw(st.lists(st.integers(0, 12).map(float), min_size=count - 1, max_size=count - 1))
    return costs, boundary_costs, memory, draw(st.integers(1, count))


@pytest.mark.slow
@given(pipelines(), st.integers(3, 30).map(float))
@settings(max_examples=100)
def test_partition_with_boundaries_and_memory_is_as_good_as_trying_everything(pipeline, memory_limit):
    costs, boundary_costs, memory, num_stages = pipeline

    def rank(cuts):
        slowest = dearest(costs, cuts)
        starts = [cut.start for cut in cuts[1:]]
        wire = max((boundary_costs[start - 1] for start in starts), default=0.0)
        return max(slowest, wire), slowest

    possible = [cuts for cuts in all_cuts(len(costs), num_stages) if dearest(memory, cuts) <= memory_limit]
    options = {"boundary_costs": boundary_costs, "memory": memory, "memory_limit": memory_limit}
    if possible:
        got = over_alike(costs, num_stages, **options)
        assert got in possible
        assert rank(got) == min(rank(cuts) for cuts in possible)
    else:
        with pytest.raises(ModelError, match="keeps each stage within"):
            over_alike(costs, num_stages, **options)


@pytest.mark.parametrize(
    ("boundary_costs", "sizes"),
    [
        # free links: even compute
        ([0, 0, 0, 0, 0], [3, 3]),
        # a link slower than the whole model is worth an uneven cut
        ([9, 9, 9, 2, 9], [4, 2]),
        # hidden behind compute, it is not
        ([9, 9, 3, 2, 9], [3, 3]),
        # all links are as slow: compute decides
        ([9, 9, 9, 9, 9], [3, 3]),
    ],
)
def test_the_wire_moves_a_cut(boundary_costs, sizes):
    assert [len(cut) for cut in over_alike([1] * 6, 2, boundary_costs=boundary_costs)] == sizes


def test_memory_moves_a_cut():
    costs, memory = [1, 1, 1, 1], [5, 1, 1, 1]
    assert [len(cut) for cut in over_alike(costs, 2, memory=memory, memory_limit=6)] == [2, 2]
    assert [len(cut) for cut in over_alike(costs, 2, memory=memory, memory_limit=5)] == [1, 3]
    with pytest.raises(
        ModelError, match=r"4 layers into 2 stages .* within 4 GB of memory: .* take 8 GB, the largest 5 GB; raise"
    ):
        over_alike(costs, 2, memory=memory, memory_limit=4)


def test_what_a_layer_takes_for_a_moment_counts_once_in_a_stage():
    machine = Machine(costs=[1, 1, 1, 1], memory=[1, 1, 1, 1], working=[3, 2, 2, 0], memory_limit=5)
    assert [len(cut) for cut in partition_over([machine, machine])] == [2, 2], "1 + 1 + 3, and 1 + 1 + 2"
    with pytest.raises(ModelError, match="keeps each stage within 4 GB"):
        partition_over([replace(machine, memory_limit=4)] * 2)


NAMES = ("stem", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer10.0", "head")


@pytest.mark.parametrize(
    ("cuts", "sizes"),
    [
        ([], [7]),
        (["stem"], [1, 6]),
        (["layer1.0"], [2, 5]),
        # a group is its last layer, and layer10 is not of layer1's
        (["layer1", "layer2"], [3, 2, 2]),
        (["layer1.1", "layer2.1", "layer10.0"], [3, 2, 1, 1]),
    ],
)
def test_cuts_by_name(cuts, sizes):
    assert cut_after(cuts, NAMES) == explicit(sizes, len(NAMES))


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        (["layer1.2"], r"one of the layers stem, layer1\.0, .*, head, got 'layer1\.2' \(did you mean layer1\.[01] or "),
        (["zzz"], r"head, got 'zzz'$"),
        (["layer2", "layer1"], "in the order of the layers, each once, got layer2, layer1"),
        (["layer1", "layer1.1"], "each once"),
        (["stem", "head"], "must leave layers after it, got stem, head and the last layer is head"),
    ],
)
def test_impossible_cuts(cuts, message):
    with pytest.raises(ModelError, match=message):
        cut_after(cuts, NAMES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"boundary_costs": [1.0]}, "after each of 3 layers but the last, got 1"),
        ({"boundary_costs": [1.0, -1.0]}, "boundary_costs must be finite and not negative"),
        ({"memory": [1.0]}, "memory must have a value for each of 3 layers, got 1"),
        ({"memory": [1.0, 1.0, math.inf]}, "memory must be finite"),
    ],
)
def test_impossible_boundaries_and_memory(options, message):
    with pytest.raises(ModelError, match=message):
        over_alike([1.0, 1.0, 1.0], 2, **options)


def test_explicit():
    assert explicit([2, 1, 3], 6) == (range(0, 2), range(2, 3), range(3, 6))


@pytest.mark.parametrize(
    ("costs", "num_stages", "message"),
    [
        ([1.0, 1.0], 3, "got 3 stages for 2 layers"),
        ([1.0, 1.0], 0, "num_stages must be at least 1, got 0"),
        ([1.0, -1.0], 2, "not negative"),
        ([1.0, float("nan")], 2, "finite"),
        ([], 1, "got 1 stages for 0 layers"),
    ],
)
def test_impossible_partitions(costs, num_stages, message):
    with pytest.raises(ModelError, match=message):
        partition(costs, num_stages)


@pytest.mark.parametrize(
    ("sizes", "messages"),
    [
        ([], ["at least one stage"]),
        ([2, 2], ["add up to 6 layers, got [2, 2] = 4"]),
        ([6, 0], ["at least one layer, got [6, 0]"]),
        ([0, 3], ["at least one layer", "add up to 6"]),
    ],
)
def test_impossible_sizes(sizes, messages):
    with pytest.raises(ModelError) as caught:
        explicit(sizes, 6)
    assert all(message in str(caught.value) for message in messages), str(caught.value)


def test_a_slow_machine_gets_fewer_layers():
    fast, slow = (Machine(costs=[seconds] * 12) for seconds in (1.0, 3.0))
    assert [len(cut) for cut in partition_over([fast, slow, fast, fast])] == [4, 1, 4, 3]


def test_a_small_memory_gets_fewer_layers():
    small, large = (Machine(costs=[1.0] * 6, memory=[4.0] * 6, memory_limit=limit) for limit in (8.0, 80.0))
    assert [len(cut) for cut in partition_over([small, large])] == [2, 4]
    with pytest.raises(ModelError, match=r"6 layers into 2 stages keeps each stage within 8 GB of memory"):
        partition_over([small, small])
    huge = Machine(costs=[1.0] * 6, memory=[9.0] * 6, memory_limit=16.0)
    with pytest.raises(ModelError, match=r"within its own of 8, 16 GB of memory: stages of one layer take 54 GB"):
        partition_over([small, huge])


def test_the_cut_over_machines_is_as_good_as_trying_everything():
    draw = random.Random(1)
    for _ in range(200):
        count = draw.randint(1, 8)
        num_stages = draw.randint(1, count)
        machines = [Machine(costs=[float(draw.randint(0, 6)) for _ in range(count)]) for _ in range(num_stages)]

        def slowest(cuts, machines=machines):
            return max(sum(machine.costs[i] for i in cut) for machine, cut in zip(machines, cuts, strict=True))

        assert slowest(partition_over(machines)) == min(map(slowest, all_cuts(count, num_stages)))


def test_machines_have_the_costs_of_the_same_layers():
    with pytest.raises(ModelError, match=r"must have a cost for each layer, got \[3, 2\] costs"):
        partition_over([Machine(costs=[1.0] * 3), Machine(costs=[1.0] * 2)])
