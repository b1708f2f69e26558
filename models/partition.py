"""Which layers each stage gets: a cut is a tuple of ranges, and nothing else needs to know how it came about."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from thinwire.models.errors import require


def partition(costs: Sequence[float], num_stages: int) -> tuple[range, ...]:
    """Cut layers of these costs so that the dearest stage is as cheap as any cut can make it, none being empty.

    Where several cuts are as good, the last one comes as late as it can, then the one before it, and so on: the last
    stage, which has the loss too, gets the fewest layers. Dynamic programming over the place of the last cut:
    best(s, j) = min over i < j of max(best(s - 1, i), costs[i] + ... + costs[j - 1]).

    Raises:
        ModelError: if there are more stages than layers, no stage, or a cost that is negative or not finite.
    """
    count = len(costs)
    require(
        (num_stages >= 1, f"num_stages must be at least 1, got {num_stages}"),
        (num_stages <= count, f"each stage must have a layer, got {num_stages} stages for {count} layers"),
        (all(0 <= cost < math.inf for cost in costs), f"costs must be finite and not negative, got {list(costs)}"),
    )
    # fsum rounds once, so stages of the same costs tie whatever the order of summation
    span = {(i, j): math.fsum(costs[i:j]) for i in range(count) for j in range(i + 1, count + 1)}
    # last_cuts[s][j]: where the last of s + 1 stages over the first j layers begins
    best = {j: span[0, j] for j in range(1, count + 1)}
    last_cuts = [dict.fromkeys(best, 0)]
    for stage in range(1, num_stages):
        # the least cost, then the latest cut
        choices = {j: min((max(best[i], span[i, j]), -i) for i in range(stage, j)) for j in range(stage + 1, count + 1)}
        best = {j: cost for j, (cost, _) in choices.items()}
        last_cuts.append({j: -negated for j, (_, negated) in choices.items()})
    bounds = [count]
    for cut_at in reversed(last_cuts):
        bounds.append(cut_at[bounds[-1]])
    return tuple(range(start, stop) for start, stop in pairwise(reversed(bounds)))


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
