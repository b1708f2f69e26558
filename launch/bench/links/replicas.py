"""The exchange between replicas in a bench: its arithmetic with the measured links and codecs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from thinwire.launch.run.assembly import Prepared, real_placement
from thinwire.launch.run.recipe import Recipe
from thinwire.launch.timing.exchange_time import ReplicaWork, seconds_alone, time_exchange
from thinwire.launch.timing.network import Link, Network
from thinwire.launch.timing.profile import replica_work
from thinwire.launch.timing.step_time import Course
from thinwire.pipeline.measuring.probe import LinkSpeed


def ends_of_processes(
    prepared: Prepared,
    course: Course,
    between: str,
    links: Mapping[tuple[int, int], LinkSpeed],
    spent: list[dict[str, float]],
) -> list[float]:
    """When each process of a pipeline has the gradients of its step: after its last backward, or after its exchange.

    Args:
        prepared: the recipe.
        course: its passes.
        between: the codec of the gradients.
        links: the measured links, by (sending process, receiving process).
        spent: measured seconds of codecs in an average step by section, of each process of a pipeline; empty if codecs
            cost nothing.
    """
    work, network = replica_work(prepared), network_of(prepared, links)
    own = [float(course.end[course.table.process == process].max()) for process in range(course.table.num_processes)]
    if work is None:
        return own
    options = prepared.recipe.replicas
    every = options.sync.every if options.step_alone else 1
    # each step or round of a bench ends at a barrier: no later stage begins the next one before all have their sums
    work = replace(_by_process(work, prepared.recipe), gradients=between, clips=True)
    if spent:
        # each element is encoded as a part, and its sum by the owner; decoded as a part by the owner, and as a sum;
        # if all add up for themselves, it is encoded once, and decoded from everyone
        elements = max(work.elements)
        most = spent[work.elements.index(elements)]
        work = replace(
            work,
            encode={between: every * most["encode"] / elements / (1 if work.to_all else 1 + 1 / work.count)},
            decode={between: every * most["decode"] / elements / (work.count if work.to_all else 2)},
        )
    exchange = time_exchange(work, course, network)
    return list(exchange.ends) if every == 1 else [end + exchange.adds / every for end in own]


def limits_of_exchange(prepared: Prepared, between: str, links: Mapping[tuple[int, int], LinkSpeed]) -> Sequence[float]:
    """Seconds of the exchange of each process in each step, with codecs that cost nothing; none where it is not so."""
    work = replica_work(prepared)
    if work is None or prepared.recipe.replicas.step_alone:
        return []
    work, network = replace(_by_process(work, prepared.recipe), gradients=between), network_of(prepared, links)
    return [seconds_alone(work, process, network) for process in range(prepared.recipe.pipeline.num_processes)]


def network_of(prepared: Prepared, links: Mapping[tuple[int, int], LinkSpeed]) -> Network:
    """The slowest of the measured links between replicas, if there are replicas."""
    size = prepared.recipe.pipeline.num_processes
    across = [speed for (source, target), speed in links.items() if source % size == target % size]
    if not across:
        return Network()
    slowest = Link(bandwidth=8 * min(speed.goodput for speed in across), latency=max(speed.latency for speed in across))
    return Network(duplex=min(speed.duplex for speed in across), replicas=slowest)


def _by_process(work: ReplicaWork, recipe: Recipe) -> ReplicaWork:
    """The same with what each process of a pipeline has, from that of each stage."""
    elements = [0] * recipe.pipeline.num_processes
    for stage, process in real_placement(recipe).process_of.items():
        elements[process] += work.elements[stage]
    return replace(work, elements=tuple(elements))
