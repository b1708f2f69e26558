"""The exchange between replicas in a bench: its arithmetic with the measured links and codecs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from thinwire.launch.run.assembly import Prepared, real_placement
from thinwire.launch.shared.links import Network
from thinwire.launch.timing.exchange_time import ReplicaWork, seconds_alone, time_exchange
from thinwire.launch.timing.step_time import Course
from thinwire.models.layers import build_layers
from thinwire.pipeline.measuring.probe import LinkSpeed
from thinwire.pipeline.replicas.layout import FLAT, TILES


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
    if prepared.recipe.replicas.count == 1:
        return course.done
    options = prepared.recipe.replicas
    every = options.sync.every if options.step_alone else 1
    work = replica_work(prepared, between)
    if spent:
        # each element is encoded as a part, and its sum by the owner; decoded as a part by the owner, and as a sum;
        # if all add up for themselves, it is encoded once, and decoded from everyone
        elements = max(work.elements)
        most = spent[work.elements.index(elements)]
        work = replace(
            work,
            encode=every * most["encode"] / elements / (1 if work.to_all else 1 + 1 / work.count),
            decode=every * most["decode"] / elements / (work.count if work.to_all else 2),
        )
    exchange = time_exchange(work, course, network_of(prepared, links))
    return list(exchange.ends) if every == 1 else [end + exchange.adds / every for end in course.done]


def limits_of_exchange(prepared: Prepared, between: str, links: Mapping[tuple[int, int], LinkSpeed]) -> Sequence[float]:
    """Seconds of the exchange of each process in each step, with codecs that cost nothing; none where it is not so."""
    options = prepared.recipe.replicas
    if options.count == 1 or options.step_alone:
        return []
    work, network = replica_work(prepared, between), network_of(prepared, links)
    return [seconds_alone(work, process, network) for process in range(len(work.elements))]


def network_of(prepared: Prepared, links: Mapping[tuple[int, int], LinkSpeed]) -> Network:
    """The slowest of the measured links between replicas."""
    size = prepared.recipe.pipeline.num_processes
    across = [speed for (source, target), speed in links.items() if source % size == target % size]
    return Network(
        bandwidth=8 * min(speed.goodput for speed in across),
        latency=max(speed.latency for speed in across),
        duplex=min(speed.duplex for speed in across),
    )


def replica_work(prepared: Prepared, gradients: str) -> ReplicaWork:
    """What the replicas of a recipe exchange with a codec of gradients."""
    recipe = prepared.recipe
    elements = [0] * recipe.pipeline.num_processes
    for (_, process), trained in zip(
        sorted(real_placement(recipe).process_of.items()), weights_of(prepared), strict=True
    ):
        elements[process] += trained
    return ReplicaWork(
        count=recipe.replicas.count,
        gradients=gradients,
        elements=tuple(elements),
        layout=FLAT if recipe.replicas.sync.every == 1 else TILES,
        to_all=recipe.replicas.step_alone,
        # each step or round of a bench ends at a barrier: no later stage begins the next one before all have their sums
        clips=True,
    )


def weights_of(prepared: Prepared) -> list[int]:
    """The weights that each stage trains, tied ones once."""
    layers = build_layers(prepared.blueprint)
    parts = [set(chain(*(layer.parameters() for layer in layers[cut.start : cut.stop]))) for cut in prepared.cuts]
    return [sum(each.numel() for each in part if each.requires_grad) for part in parts]
