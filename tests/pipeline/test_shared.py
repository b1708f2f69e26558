"""Weights that several stages hold: every copy gets the same sum, wherever it lives and whatever it goes through."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

from support.processes import run
from thinwire.compress import Progress, parse
from thinwire.pipeline.measuring.clocks import NeighbourClocks
from thinwire.pipeline.measuring.meters import Meter
from thinwire.pipeline.options import WireOptions
from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.replicas.shared import SharedWeights, bytes_of_step

# stage -> process; the stages without a copy are those that `holders` leaves out
LAYOUTS = {
    "one process": [0, 0, 0, 0],
    "a process each": [0, 1, 2, 3],
    "looped": [0, 1, 0, 1],
    "v": [0, 1, 1, 0],
}
HOLDERS = [[0, 1, 2, 3], [1, 2], [0, 3]]
METHODS = ["none", "ef(q(4))"]
SHAPES = {"matrix": (3, 200), "vector": (5,)}
ELEMENTS = 3 * 200 + 5
"""Two rows, the second one ragged."""
STEPS = 2


def gradients(stage, step):
    """None where a stage did not use a weight."""
    generator = torch.Generator().manual_seed(10 * step + stage)
    matrix, vector = (torch.randn(shape, generator=generator) for shape in SHAPES.values())
    return [matrix, None if stage == 1 else vector]


class Held:
    """The copies that one process has, and what adds up their gradients."""

    def __init__(self, layout, holders, method="none", rank=0, simulated=None):
        where = Placement(dict(enumerate(layout)))
        here = [stage for stage in where.stages_of(rank) if stage in holders]
        self.copies = {stage: {name: Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()} for stage in here}
        clocks, options = NeighbourClocks(), WireOptions()
        wire = SimpleNamespace(
            group=dist.group.WORLD, seed=0, clocks=clocks, options=options, timeout=timedelta(seconds=options.timeout)
        )
        stages = [
            SimpleNamespace(stage_index=stage, meter=Meter(), wire=wire) for stage in where.stages_of(rank) or [0]
        ]
        self.meters = [stage.meter for stage in stages]
        self.shared = SharedWeights(stages, self.copies, holders, where, parse(method), simulated=simulated)

    def give(self, given):
        for stage, named in self.copies.items():
            for parameter, gradient in zip(named.values(), given(stage), strict=True):
                parameter.grad = gradient

    def taken(self):
        return {stage: [each.grad.clone() for each in named.values()] for stage, named in self.copies.items()}

    def summed(self, step, replicas=1):
        """The gradients of all copies here after the sum of a step."""
        self.give(lambda stage: gradients(stage, step))
        self.shared.sum_gradients(Progress(step, 100), replicas)
        return self.taken()

    @property
    def sent(self):
        return sum(traffic.bytes for meter in self.meters for traffic in meter.sent.values())


def expected(holders, step):
    """The sum of the holders' gradients, last to first."""
    totals = [torch.zeros(shape) for shape in SHAPES.values()]
    for stage in reversed(holders):
        for total, gradient in zip(totals, gradients(stage, step), strict=True):
            total += 0 if gradient is None else gradient
    return totals


def equal(ours, theirs):
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def each_summed(rank):
    found = {}
    for name, layout in LAYOUTS.items():
        for holders in HOLDERS:
            for method in METHODS:
                held = Held(layout, holders, method, rank)
                found[name, method, *holders] = [held.summed(step) for step in range(STEPS)], held.sent
    return found


@pytest.fixture(scope="module")
def sums():
    """What each of four processes has of each layout; to start them takes longer than the sums."""
    return run(each_summed, 4)


def copies_of(sums, name, method, holders):
    """The gradients of all copies by stage, of each step."""
    by_process = [each[name, method, *holders][0] for each in sums]
    return [{stage: copy for found in by_process for stage, copy in found[step].items()} for step in range(STEPS)]


@pytest.mark.processes
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("holders", HOLDERS)
def test_every_copy_gets_the_sum_in_stage_order_wherever_it_lives(name, holders, sums):
    for step, copies in enumerate(copies_of(sums, name, "none", holders)):
        assert sorted(copies) == holders
        assert all(equal(copy, expected(holders, step)) for copy in copies.values())


@pytest.mark.processes
@pytest.mark.parametrize("holders", HOLDERS)
def test_a_codec_gives_all_copies_the_same_wherever_they_live(holders, sums):
    """Errors are those of the stages, so they do not depend on the processes."""
    for step, alone in enumerate(copies_of(sums, "one process", "ef(q(4))", holders)):
        one = alone[holders[0]]
        assert not equal(one, expected(holders, step)), "the codec does nothing"
        for name in LAYOUTS:
            copies = copies_of(sums, name, "ef(q(4))", holders)[step]
            assert sorted(copies) == holders and all(equal(copy, one) for copy in copies.values())


@pytest.mark.processes
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_are_those_that_are_said_before(name, method, sums):
    for holders in HOLDERS:
        processes = [LAYOUTS[name][stage] for stage in holders]
        said = bytes_of_step(ELEMENTS, processes, parse(method))
        assert sum(each[name, method, *holders][1] for each in sums) == STEPS * said
        assert (said == 0) == (len(set(processes)) == 1)


def test_bytes_of_a_step_are_those_of_four_frames():
    """Each of two stages owns one row of 512 elements: it gets that of the other one, and sends the sum back."""
    assert bytes_of_step(ELEMENTS, [0, 1], parse("none")) == 4 * (64 + 512 * 4)
    assert bytes_of_step(ELEMENTS, [0, 1], parse("bf16")) == 4 * (64 + 512 * 2)


def test_copies_that_codecs_changed_get_the_mean_of_their_gradients(alone):
    """What replicas moved goes through a codec apart for each copy, and the copies must stay equal."""
    held = Held([0] * 4, [0, 2])
    held.give(lambda stage: gradients(stage, 0))
    held.shared.average_gradients(Progress(0, 100))
    wanted = [total / 2 for total in expected([0, 2], 0)]
    assert all(equal(copy, wanted) for copy in held.taken().values())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_simulation_counts_what_processes_would_send(layout, alone):
    held = Held([0] * 4, range(4), simulated=Placement(dict(enumerate(layout))))
    held.summed(0, replicas=2)
    assert held.sent == 2 * bytes_of_step(ELEMENTS, layout, parse("none"))


class Part:
    """A part of a checkpoint."""

    def __init__(self, state):
        self._state = state

    def names(self, prefix):
        return {name.removeprefix(prefix) for name in self._state if name.startswith(prefix)}

    def tensors(self, prefix, names=None):
        return {name: self._state[f"{prefix}{name}"] for name in names or self.names(prefix)}


@pytest.mark.slow
def test_errors_go_on_from_a_checkpoint(alone):
    """What messages have lost goes with later ones, as if there had been no stop."""
    whole = Held([0] * 4, [0, 3], "ef(q(2))")
    for step in range(2):
        whole.summed(step)
    parts = [Part(whole.shared.state_dict(stage)) for stage in range(4)]
    wanted = whole.summed(2)
    again = Held([0] * 4, [0, 3], "ef(q(2))")
    for stage, part in enumerate(parts):
        again.shared.load_state_dict(stage, part)
    got = again.summed(2)
    assert equal(got[0], wanted[0])
    assert not equal(Held([0] * 4, [0, 3], "ef(q(2))").summed(2)[0], wanted[0]), "nothing was lost"


def test_without_feedback_checkpoints_hold_nothing_of_it(alone):
    """A run without a codec goes on from the checkpoints that it always wrote."""
    held = Held([0] * 4, [0, 3], "q(4)")
    held.summed(0)
    assert held.shared.state_dict(0) == {}
