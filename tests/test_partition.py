import random
from itertools import combinations, pairwise

import pytest

from thinwire.models.errors import ModelError
from thinwire.models.partition import explicit, partition


def all_cuts(count: int, num_stages: int) -> list[tuple[range, ...]]:
    return [
        tuple(range(a, b) for a, b in pairwise((0, *inner, count)))
        for inner in combinations(range(1, count), num_stages - 1)
    ]


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
