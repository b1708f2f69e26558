"""The layers of each stage. A cut is a tuple of ranges of layers.

The bottleneck decides how long a step takes. Stages compute while earlier micro-batches cross the wire (sends do not
wait, receives are posted ahead), so the times of compute and wire do not add up. When the pipeline is full, every
micro-batch takes the time of the slowest stage or link. A stage's time is forward plus backward. A link's time is
activation plus gradient, because GPipe sends all activations before the first gradient. Fill and drain are left out.
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
    """Cut layers of these costs so that the bottleneck costs as little as possible. No stage is empty.

    The bottleneck is the stage or boundary with the highest cost; a stage costs the sum of its layers. If several cuts
    have the same bottleneck, the cut whose costliest stage is cheapest wins. If that is equal too, the last cut lies as
    late as possible, then the cut before it, and so on: the last stage computes the loss too, so it gets the fewest
    layers.

    Args:
        costs: the cost of each layer, in any unit; seconds of a micro-batch if boundaries have a cost.
        num_stages: the number of ranges to return.
        boundary_costs: the cost of a boundary after each layer except the last, in the unit of `costs`
            (`boundary_seconds`); 0 by default.
        memory: the memory that each layer adds to its stage; 0 by default.
        memory_limit: the most memory of one stage, in the unit of `memory`.

    Raises:
        ModelError: there are more stages than layers, or no stage; a number is negative or not finite; or no cut keeps
            the limit.
    """
    count = len(costs)
    boundaries = [0.0] * (count - 1) if boundary_costs is None else boundary_costs
    sizes = [0.0] * count if memory is None else memory
    _check(costs, num_stages, boundaries, sizes)
    # every other stage has at least one layer, so none can have more than this
    most = count - num_stages + 1
    compute, fits = _span_sums(costs, most), _span_sums(sizes, most) <= memory_limit
    entering = np.array([0.0, *boundaries])[:, None]
    bottleneck = np.where(fits, np.maximum(compute, entering), math.inf)
    least, cuts = _least_bottleneck(bottleneck, num_stages)
    require(
        (
            least < math.inf,
            f"no cut of {count} layers into {num_stages} stages keeps each stage within {memory_limit:g} of memory: "
            f"all layers take {math.fsum(sizes):g}, the largest {max(sizes):g}; raise num_stages or the limit",
        )
    )
    if boundary_costs is None:
        return cuts
    # most cuts tie if a link is the bottleneck, so the stages decide among them
    return _least_bottleneck(np.where(bottleneck <= least, compute, math.inf), num_stages)[1]


def _check(costs: Sequence[float], num_stages: int, boundaries: Sequence[float], sizes: Sequence[float]) -> None:
    """Raise ModelError if no cut can be looked for: wrong counts, or numbers that are negative or not finite."""
    count = len(costs)
    require(
        (num_stages >= 1, f"num_stages must be at least 1, got {num_stages}"),
        (
            num_stages <= count,
            f"each stage must have a layer, got {num_stages} stages for {count} layers; lower pipeline.num_stages to "
            f"at most {count}, or take a model with more layers",
        ),
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


def boundary_seconds(activation_bytes: float, gradient_bytes: float, bandwidth: float) -> float:
    """The seconds that the payloads of a micro-batch take over a link of `bandwidth` Mbit/s, both directions together.

    Raises:
        ModelError: the bandwidth is not above 0.
    """
    require((bandwidth > 0, f"bandwidth must be above 0 Mbit/s, got {bandwidth}"))
    return (activation_bytes + gradient_bytes) * 8 / (bandwidth * 1e6)


def explicit(sizes: Sequence[int], num_layers: int) -> tuple[range, ...]:
    """Cut `num_layers` layers into stages of these sizes.

    Raises:
        ModelError: a stage has no layer, or the sizes do not add up to `num_layers`.
    """
    require(
        (len(sizes) > 0, "a cut must have at least one stage, got none"),
        (all(size >= 1 for size in sizes), f"each stage must have at least one layer, got {list(sizes)}"),
        (sum(sizes) == num_layers, f"stage sizes must add up to {num_layers} layers, got {list(sizes)} = {sum(sizes)}"),
    )
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0)))


def cut_after(cuts: Sequence[str], names: Sequence[str]) -> tuple[range, ...]:
    """Cut after each layer that `cuts` names; n cuts give n + 1 stages. `names` are all layers, in order.

    "layer1" means the last of "layer1.0", "layer1.1" and so on, unless a layer is called "layer1" itself.

    Raises:
        ModelError: a cut names no layer, the cuts are out of order, or no layer is left after the last.
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
    """The index of the layer with this name, or of the last layer of the group with this name."""
    if cut in names:
        return names.index(cut)
    group = [index for index, name in enumerate(names) if name.startswith(f"{cut}.")]
    if group:
        return group[-1]
    raise ModelError(f"a cut must name one of the layers {', '.join(names)}, got {cut!r}{did_you_mean(cut, names)}")


def _span_sums(values: Sequence[float], most: int) -> CostTable:
    """[start, stop]: the sum of values[start:stop] if it has 1 to `most` values, else infinity."""
    count = len(values)
    sums = np.full((count, count + 1), math.inf)
    for start in range(count):
        for stop in range(start + 1, min(start + most, count) + 1):
            # fsum rounds once, so stages of the same costs tie in any order of summation
            sums[start, stop] = math.fsum(values[start:stop])
    return sums


def _least_bottleneck(stage_cost: CostTable, num_stages: int) -> tuple[float, tuple[range, ...]]:
    """The least cost that the costliest stage can have, and the cut that gives it, its last cuts as late as possible.

    Dynamic programming over the place of the last cut: best(s, j) = min over i < j of max(best(s - 1, i),
    stage_cost[i, j]), for s stages over the first j layers. Each stage before and after takes at least one layer, so
    a cut has as many possible places as a stage has possible layers.
    """
    count = len(stage_cost)
    places = count - num_stages + 1
    best = stage_cost[0, 1 : places + 1]
    # cut_at[s - 1][j - s - 1]: where the last of s + 1 stages over the first j layers begins
    cut_at = []
    for stage in range(1, num_stages):
        costliest = np.maximum(best[:, None], stage_cost[stage : stage + places, stage + 1 : stage + places + 1])
        # the least cost, then the latest cut
        latest = places - 1 - costliest[::-1].argmin(axis=0)
        best = costliest[latest, np.arange(places)]
        cut_at.append(stage + latest)
    bounds = [count]
    for stage in reversed(range(1, num_stages)):
        bounds.append(int(cut_at[stage - 1][bounds[-1] - stage - 1]))
    return float(best[-1]), tuple(range(start, stop) for start, stop in pairwise(reversed([*bounds, 0])))
