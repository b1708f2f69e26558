"""Which layers each stage gets: a cut is a tuple of ranges, and nothing else needs to know how it came about.

A step takes as long as its bottleneck says. Stages compute while earlier micro-batches cross the wire (sends do not
wait, receives are posted ahead), so compute and wire do not add up: once the pipeline is full, every micro-batch costs
the time of the slowest of all stages and all links. A stage's time is forward plus backward; a link's is activation
plus gradient, for GPipe sends all of one before any of the other, as it computes. Filling and draining are left out.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from thinwire.errors.names import did_you_mean
from thinwire.models.errors import ModelError, require

CostTable = NDArray[np.float64]


def partition(
    costs: Sequence[float],
    num_stages: int,
    *,
    boundary_costs: Sequence[float] | None = None,
    memory: Sequence[float] | None = None,
    memory_limit: float = math.inf,
) -> tuple[range, ...]:
    """Cut layers of these costs so that the bottleneck is as cheap as any cut can make it, no stage being empty.

    The bottleneck is the dearest of the stages, each the sum of its layers, and of the boundaries between them. Where
    several cuts have the same bottleneck, their dearest stage decides; then the last cut comes as late as it can, and
    what is before it is cut by the same rule: the last stage, which has the loss too, gets the fewest layers.

    Args:
        costs: what each layer costs, in any unit; seconds of a micro-batch where boundaries have a cost.
        num_stages: the number of ranges to return.
        boundary_costs: what a boundary after each layer but the last costs, in the unit of `costs`
            (`boundary_seconds`); nothing by default.
        memory: what each layer adds to the memory of its stage; nothing by default.
        memory_limit: the most that the layers of one stage may add up to, in the unit of `memory`.

    Raises:
        ModelError: if there are more stages than layers, no stage, a number that is negative or not finite, or no cut
            within the limit.
    """
    count = len(costs)
    boundaries = [0.0] * (count - 1) if boundary_costs is None else boundary_costs
    sizes = [0.0] * count if memory is None else memory
    require(
        (num_stages >= 1, f"num_stages must be at least 1, got {num_stages}"),
        (num_stages <= count, f"each stage must have a layer, got {num_stages} stages for {count} layers"),
        (len(sizes) == count, f"memory must have a value for each of {count} layers, got {len(sizes)}"),
        (
            len(boundaries) == max(count - 1, 0),
            f"boundary_costs must have a value after each of {count} layers but the last, got {len(boundaries)}",
        ),
        *(
            (all(0 <= value < math.inf for value in values), f"{name} must be finite and not negative, got {[*values]}")
            for name, values in (("costs", costs), ("boundary_costs", boundaries), ("memory", sizes))
        ),
    )
    # no stage has more, for every other one has at least one
    most = count - num_stages + 1
    compute, fits = _span_sums(costs, most), _span_sums(sizes, most) <= memory_limit
    entering = np.array([0.0, *boundaries])[:, None]
    bottleneck = np.where(fits, np.maximum(compute, entering), math.inf)
    least, cuts = _least_dearest(bottleneck, num_stages)
    require(
        (
            least < math.inf,
            f"no cut of {count} layers into {num_stages} stages keeps each stage within {memory_limit:g} of memory: "
            f"the layers take {math.fsum(sizes):g} in all, the largest {max(sizes):g}; raise num_stages or the limit",
        )
    )
    if boundary_costs is None:
        return cuts

    # where a link is the bottleneck, most cuts tie
    return _least_dearest(np.where(bottleneck <= least, compute, math.inf), num_stages)[1]


def boundary_seconds(activation_bytes: float, gradient_bytes: float, bandwidth: float) -> float:
    """The seconds a micro-batch's payloads take over a link of `bandwidth` Mbit/s, both directions added up.

    Raises:
        ModelError: if the bandwidth is not above 0.
    """
    require((bandwidth > 0, f"bandwidth must be above 0 Mbit/s, got {bandwidth}"))
    return (activation_bytes + gradient_bytes) * 8 / (bandwidth * 1e6)


def explicit(sizes: Sequence[int], num_layers: int) -> tuple[range, ...]:
    """Cut `num_layers` layers into stages of the given numbers of layers.

    Raises:
        ModelError: if a stage would be empty, or the sizes do not add up to the layers there are.
    """
    require(
        (len(sizes) > 0, "a cut must have at least one stage, got none"),
        (all(size >= 1 for size in sizes), f"each stage must have at least one layer, got {list(sizes)}"),
        (sum(sizes) == num_layers, f"stage sizes must add up to {num_layers} layers, got {list(sizes)} = {sum(sizes)}"),
    )
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0)))


def cut_after(cuts: Sequence[str], names: Sequence[str]) -> tuple[range, ...]:
    """Cut the layers of these names after each layer that `cuts` names; n cuts give n + 1 stages.

    "layer1" stands for the last of "layer1.0", "layer1.1" and so on, unless a layer has that very name.

    Raises:
        ModelError: if a cut names no layer, comes before or at the one given before it, or leaves nothing after it.
    """
    ends = [_position(cut, names) + 1 for cut in cuts]
    ascending = all(before < after for before, after in pairwise(ends))
    require(
        (ascending, f"cuts must come in the order of the layers, each once, got {', '.join(cuts)}"),
        (
            not ends or max(ends) < len(names),
            f"a cut must leave layers after it, got {', '.join(cuts)} and the last layer is {names[-1]}",
        ),
    )
    return tuple(range(start, stop) for start, stop in pairwise((0, *ends, len(names))))


def _position(cut: str, names: Sequence[str]) -> int:
    """Index of the layer of that name, else of the last of the group of that name."""
    if cut in names:
        return names.index(cut)
    group = [index for index, name in enumerate(names) if name.startswith(f"{cut}.")]
    if group:
        return group[-1]
    raise ModelError(f"a cut must name one of the layers {', '.join(names)}, got {cut!r}{did_you_mean(cut, names)}")


def _span_sums(values: Sequence[float], most: int) -> CostTable:
    """[start, stop]: the sum of `values` from start to stop, 1 to `most` of them; infinite for all other spans."""
    count = len(values)
    sums = np.full((count, count + 1), math.inf)
    for start in range(count):
        for stop in range(start + 1, min(start + most, count) + 1):
            # rounds once, so stages of the same costs tie whatever the order of summation
            sums[start, stop] = math.fsum(values[start:stop])
    return sums


def _least_dearest(stage_cost: CostTable, num_stages: int) -> tuple[float, tuple[range, ...]]:
    """The least cost of the dearest stage, and the cut that has it, its last cuts as late as they can be.

    Dynamic programming over the place of the last cut: best(s, j) = min over i < j of max(best(s - 1, i),
    stage_cost[i, j]), for s stages over the first j layers. Each stage before and after takes a layer at least, so
    there are as many places for a cut as a stage may have layers.
    """
    count = len(stage_cost)
    places = count - num_stages + 1
    best = stage_cost[0, 1 : places + 1]
    # cut_at[s - 1][j - s - 1]: where the last of s + 1 stages over the first j layers begins
    cut_at = []
    for stage in range(1, num_stages):
        dearest = np.maximum(best[:, None], stage_cost[stage : stage + places, stage + 1 : stage + places + 1])
        # the least cost, then the latest cut
        latest = places - 1 - dearest[::-1].argmin(axis=0)
        best = dearest[latest, np.arange(places)]
        cut_at.append(stage + latest)
    bounds = [count]
    for stage in reversed(range(1, num_stages)):
        bounds.append(int(cut_at[stage - 1][bounds[-1] - stage - 1]))
    return float(best[-1]), tuple(range(start, stop) for start, stop in pairwise(reversed([*bounds, 0])))
