from itertools import pairwise

import pytest
import torch
from torch.nn import Parameter

from support.processes import run
from thinwire.pipeline.measuring.meters import Meter
from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.shared import SharedWeights

# stage -> process; the stages without a copy are those that `holders` leaves out
LAYOUTS = {
    "one process": [0, 0, 0, 0],
    "a process each": [0, 1, 2, 3],
    "looped": [0, 1, 0, 1],
    "v": [0, 1, 1, 0],
}
HOLDERS = [[0, 1, 2, 3], [1, 2], [0, 3], [2]]


def gradients(stage):
    generator = torch.Generator().manual_seed(stage)
    return [torch.randn(3, 2, generator=generator), torch.randn(5, generator=generator)]


def summed(rank, layout, holders):
    """Every copy's gradients afterwards, and the bytes sent, of the stages on this process."""
    here = [stage for stage in holders if layout[stage] == rank]
    copies = {stage: [Parameter(torch.zeros(3, 2)), Parameter(torch.zeros(5))] for stage in here}
    for stage, parameters in copies.items():
        for parameter, gradient in zip(parameters, gradients(stage), strict=True):
            # a stage that did not use a weight has no gradient of it
            parameter.grad = None if stage == 1 and gradient.dim() == 1 else gradient
    meters = {stage: Meter() for stage in here}
    SharedWeights(holders, copies, meters, Placement(dict(enumerate(layout)))).sum_gradients()
    sent = sum(meter.total.bytes for meter in meters.values())
    return {stage: [parameter.grad for parameter in parameters] for stage, parameters in copies.items()}, sent


def expected(holders):
    """The sum of the holders' gradients, last to first."""
    last, *others = reversed(holders)
    total = gradients(last)
    for stage in others:
        own = gradients(stage)
        total = [total[0] + own[0], total[1] if stage == 1 else total[1] + own[1]]
    return total


def each_summed(rank):
    return {(name, *holders): summed(rank, layout, holders) for name, layout in LAYOUTS.items() for holders in HOLDERS}


@pytest.fixture(scope="module")
def sums():
    """What each of four processes has of each layout; to start them takes longer than the sums."""
    return run(each_summed, 4)


@pytest.mark.processes
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("holders", HOLDERS)
def test_every_copy_gets_the_sum_in_stage_order_wherever_it_lives(name, holders, sums):
    layout = LAYOUTS[name]
    results = [each[name, *holders] for each in sums]
    found = {stage: copies for result, _ in results for stage, copies in result.items()}
    assert sorted(found) == holders
    wanted = gradients(2) if holders == [2] else expected(holders)
    for copies in found.values():
        assert all(torch.equal(copy, want) for copy, want in zip(copies, wanted, strict=True))
    crossings = sum(layout[a] != layout[b] for a, b in pairwise(holders))
    assert sum(sent for _, sent in results) == 2 * crossings * 4 * (6 + 5)


def test_copies_that_codecs_changed_get_the_mean_of_their_gradients(alone):
    """What replicas moved goes through a codec apart for each copy, and the copies must stay equal."""
    copies = {stage: [Parameter(torch.zeros(3, 2)), Parameter(torch.zeros(5))] for stage in (0, 2)}
    for stage, parameters in copies.items():
        for parameter, gradient in zip(parameters, gradients(stage), strict=True):
            parameter.grad = gradient
    meters = {stage: Meter() for stage in copies}
    SharedWeights([0, 2], copies, meters, Placement(dict.fromkeys(range(3), 0))).average_gradients()
    for first, last, ours, theirs in zip(*copies.values(), gradients(0), gradients(2), strict=True):
        assert torch.equal(first.grad, last.grad)
        assert torch.equal(first.grad, (theirs + ours) / 2)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_simulation_counts_what_processes_would_send(layout, alone):
    copies = {stage: [Parameter(torch.zeros(3, 2))] for stage in range(4)}
    meters = {stage: Meter() for stage in copies}
    here, apart = Placement(dict.fromkeys(range(4), 0)), Placement(dict(enumerate(layout)))
    SharedWeights(range(4), copies, meters, here, apart).sum_gradients(2)
    crossings = sum(a != b for a, b in pairwise(layout))
    assert sum(meter.total.bytes for meter in meters.values()) == 2 * 2 * crossings * 4 * 6
