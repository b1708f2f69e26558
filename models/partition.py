"""The layers of each stage. A cut is a tuple of ranges of layers.

The bottleneck decides how long a step takes. Stages compute while earlier micro-batches cross the wire (sends do not
wait, receives are posted ahead), so the times of compute and wire do not add up. When the pipeline is full, every
micro-batch takes the time of the slowest stage or link. A stage's time is forward plus backward. A link's time is
activation plus gradient, because GPipe sends all activations before the first gradient. Fill and drain are left out.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from thinwire.errors.names import did_you_mean
from thinwire.models.errors import ModelError, require

CostTable = NDArray[np.float64]


def partition(costs: Sequence[float], num_stages: int) -> tuple[range, ...]:
    """Cut layers of these costs, in any unit, into so many stages of one machine, as `partition_over` does."""
    return partition_over([Machine(costs=costs)] * num_stages)


@dataclass(frozen=True, kw_only=True, eq=False)
class Machine:
    """What the layers cost where one stage computes."""

    costs: Sequence[float]
    """The cost of each layer, in the unit of all other machines."""
    memory: Sequence[float] | None = None
    """The gigabytes of memory that each layer adds to the stage; None is 0."""
    working: Sequence[float] | None = None
    """The gigabytes that each layer takes for a moment, with all that a stage takes once; the stage takes those of one
    layer. None is 0."""
    memory_limit: float = math.inf
    """The most gigabytes of the stage."""


def partition_over(machines: Sequence[Machine], *, boundary_costs: Sequence[float] | None = None) -> tuple[range, ...]:
    """Cut layers so that the bottleneck costs as little as possible, where each stage has a machine of its own.

    The bottleneck is the stage or boundary with the highest cost; a stage costs the sum of its layers, and is never
    empty. If several cuts have the same bottleneck, the cut whose costliest stage is cheapest wins. If that is equal
    too, the last cut lies as late as possible, then the cut before it, and so on: the last stage computes the loss too,
    so it gets the fewest layers.

    Args:
        machines: that of each stage; several may be the same object.
        boundary_costs: the cost of a boundary after each layer except the last, in the unit of the machines' costs;
            0 by default.

    Raises:
        ModelError: there are more stages than layers, or no stage; a number is negative or not finite; or no cut keeps
            the limits.
    """
    num_stages = len(machines)
    require((num_stages >= 1, f"num_stages must be at least 1, got {num_stages}"))
    count = len(machines[0].costs)
    lengths = [len(machine.costs) for machine in machines]
    require((len(set(lengths)) == 1, f"every machine must have a cost for each layer, got {lengths} costs"))
    boundaries = [0.0] * (count - 1) if boundary_costs is None else boundary_costs
    for machine in dict.fromkeys(machines):
        _check(machine.costs, num_stages, boundaries, [0.0] * count if machine.memory is None else machine.memory)
    entering = np.array([0.0, *boundaries])[:, None]
    tables = {machine: _tables(machine, entering, count - num_stages + 1) for machine in dict.fromkeys(machines)}
    least, cuts = _least_bottleneck([tables[machine][1] for machine in machines])
    require((least < math.inf, _too_large(machines)))
    if boundary_costs is None:
        return cuts
    # most cuts tie if a link is the bottleneck, so the stages decide among them
    among = {machine: np.where(high <= least, compute, math.inf) for machine, (compute, high) in tables.items()}
    return _least_bottleneck([among[machine] for machine in machines])[1]


def _tables(machine: Machine, entering: CostTable, most: int) -> tuple[CostTable, CostTable]:
    """For each [start, stop] of at most `most` layers: the compute of a stage, and the bottleneck that it makes."""
    # every other stage has at least one layer, so none can have more than this
    compute = _span_sums(machine.costs, most)
    high = np.maximum(compute, entering)
    if machine.memory is None:
        return compute, high
    memory = _span_sums(machine.memory, most)
    if machine.working is not None:
        memory += _spans(machine.working, most, max)
    return compute, np.where(memory <= machine.memory_limit, high, math.inf)


def _too_large(machines: Sequence[Machine]) -> str:
    """Why no cut keeps the limits, in words."""
    sizes = max((_one_by_one(machine) for machine in machines), key=math.fsum)
    limits = list(dict.fromkeys(f"{machine.memory_limit:g}" for machine in machines))
    within = limits[0] if len(limits) == 1 else "its own of " + ", ".join(f"{each.memory_limit:g}" for each in machines)
    return (
        f"no cut of {len(sizes)} layers into {len(machines)} stages keeps each stage within {within} GB of memory: "
        f"stages of one layer take {math.fsum(sizes):.3g} GB, the largest {max(sizes):.3g} GB; raise num_stages or the "
        f"limit"
    )


def _one_by_one(machine: Machine) -> list[float]:
    """The gigabytes of a stage of each layer alone."""
    memory, working = (each or [0.0] * len(machine.costs) for each in (machine.memory, machine.working))
    return [own + moment for own, moment in zip(memory, working, strict=True)]


def _check(costs: Sequence[float], num_stages: int, boundaries: Sequence[float], sizes: Sequence[float]) -> None:
    """Raise ModelError if no cut can be looked for: wrong counts, or numbers that are negative or not finite."""
    count = len(costs)
    require(
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
    # fsum rounds once, so stages of the same costs tie in any order of summation
    return _spans(values, most, math.fsum)


def _spans(values: Sequence[float], most: int, of: Callable[[Sequence[float]], float]) -> CostTable:
    """[start, stop]: what `of` makes of values[start:stop] if it has 1 to `most` values, else infinity."""
    count = len(values)
    found = np.full((count, count + 1), math.inf)
    for start in range(count):
        for stop in range(start + 1, min(start + most, count) + 1):
            found[start, stop] = of(values[start:stop])
    return found


def _least_bottleneck(stage_costs: Sequence[CostTable]) -> tuple[float, tuple[range, ...]]:
    """The least cost that the costliest stage can have, and the cut that gives it, its last cuts as late as possible.

    Dynamic programming over the place of the last cut: best(s, j) = min over i < j of max(best(s - 1, i),
    stage_costs[s][i, j]), for s stages over the first j layers. Each stage before and after takes at least one layer,
    so a cut has as many possible places as a stage has possible layers.
    """
    count, num_stages = len(stage_costs[0]), len(stage_costs)
    places = count - num_stages + 1
    best = stage_costs[0][0, 1 : places + 1]
    # cut_at[s - 1][j - s - 1]: where the last of s + 1 stages over the first j layers begins
    cut_at = []
    for stage in range(1, num_stages):
        spans = stage_costs[stage][stage : stage + places, stage + 1 : stage + places + 1]
        costliest = np.maximum(best[:, None], spans)
        # the least cost, then the latest cut
        latest = places - 1 - costliest[::-1].argmin(axis=0)
        best = costliest[latest, np.arange(places)]
        cut_at.append(stage + latest)
    bounds = [count]
    for stage in reversed(range(1, num_stages)):
        bounds.append(int(cut_at[stage - 1][bounds[-1] - stage - 1]))
    return float(best[-1]), tuple(range(start, stop) for start, stop in pairwise(reversed([*bounds, 0])))
