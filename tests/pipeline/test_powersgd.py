"""PowerSGD between replicas: the arithmetic of torch's own hook, equal replicas, and its state by name."""

from math import prod

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from support.exchanging import exchange, exchanged, gradients, make, simulated, take_turns
from support.processes import run
from support.toy import train
from thinwire.pipeline.errors import CheckpointError
from thinwire.pipeline.options import ReplicaOptions

SHAPES = {"bias": (5,), "matrix": (24, 40), "small": (3, 4), "conv": (8, 4, 3, 3)}
SIZE = sum(map(prod, SHAPES.values()))
STEPS = 8


class Bucket:
    """What torch's hook gets from DistributedDataParallel."""

    def __init__(self, flat):
        self.flat = flat

    def buffer(self):
        return self.flat

    def gradients(self):
        parts = self.flat.split(list(map(prod, SHAPES.values())))
        return [part.view(shape) for part, shape in zip(parts, SHAPES.values(), strict=True)]

    def index(self):
        return 0

    def is_last(self):
        return True


def hooked(rank, starts):
    """The means that the hook gives in each step, and the errors at the end, for each rank of PowerSGD.

    `starts` are the first Q, one behind the other.
    """
    results = {}
    for power, start in starts.items():
        state = PowerSGDState(None, matrix_approximation_rank=power, start_powerSGD_iter=2)
        state.iter = 2
        state.p_memory_dict[0], state.q_memory_dict[0] = torch.empty(power * (24 + 8)), start.clone()
        # the mean of the doubled gradients of two replicas is the sum of their gradients
        means = [
            powerSGD_hook(state, Bucket(2 * gradients(step, 2, SIZE)[rank])).wait().clone() for step in range(STEPS)
        ]
        results[power] = means, state.error_dict[0].clone()
    return results


@pytest.mark.processes
def test_it_is_the_arithmetic_of_torchs_hook():
    """Rank 2 is orthogonalized by Gram and Schmidt there, rank 3 by QR."""
    ours = {power: make(f"powersgd({power})", 2, shapes=SHAPES) for power in (2, 3)}
    starts = {
        power: torch.cat([replicas[0].exchange.state_dict()[f"start/{name}"].flatten() for name in ("matrix", "conv")])
        for power, replicas in ours.items()
    }
    theirs = run(hooked, 2, starts)
    for power, replicas in ours.items():
        for step in range(STEPS):
            for number, flat in enumerate(exchanged(replicas, gradients(step, 2, SIZE), step)):
                torch.testing.assert_close(flat, theirs[number][power][0][step], rtol=1e-3, atol=1e-4)
        for number, replica in enumerate(replicas):
            state = replica.exchange.state_dict()
            errors = dict(zip(SHAPES, theirs[number][power][1].split(list(map(prod, SHAPES.values()))), strict=True))
            for name in ("matrix", "conv"):
                mine = state[f"worker/{number}/{name}/0"]
                torch.testing.assert_close(2 * mine, errors[name], rtol=1e-3, atol=1e-4)
                assert mine.norm() > 1, "the matrices are not of this rank"


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_replicas_stay_equal_for_100_steps_and_lose_nothing_for_good(count):
    replicas = make("powersgd(2)", count, shapes=SHAPES)
    used, wanted = torch.zeros(2, SIZE, dtype=torch.float64)
    first_error = None
    for step in range(100):
        given = gradients(step % 5, count, SIZE)
        mine, *others = exchanged(replicas, given, step)
        assert all(torch.equal(mine, other) for other in others), step
        torch.testing.assert_close(mine[:5], given.sum(0)[:5])  # the bias travels whole
        used, wanted = used + mine, wanted + given.double().sum(0)
        error = float((used - wanted).norm() / wanted.norm())
        first_error = first_error or error
    assert error < first_error / 4
    assert first_error > 0.1


def test_a_gradient_may_lie_otherwise_than_its_matrix():
    """A convolution in channels_last has such ones: they ended the first step with a traceback."""
    plain, other = (make("powersgd(2)", 2, shapes=SHAPES) for _ in range(2))
    for step in range(2):
        given = gradients(step, 2, SIZE)
        for replicas in (plain, other):
            for replica, flat in zip(replicas, given, strict=True):
                replica.set_gradients(flat)
        for replica in other:
            conv = replica.parameters["conv"]
            conv.grad = conv.grad.contiguous(memory_format=torch.channels_last)
        for replicas in (plain, other):
            exchange(replicas, step)
        assert all(torch.equal(one.flat, two.flat) for one, two in zip(plain, other, strict=True))


def test_thin_matrices_travel_from_their_start_on():
    replicas = make("powersgd(2, start=1)", 2, shapes=SHAPES)
    sizes = []
    for step in range(2):
        before = replicas[0].meter.total.bytes
        exchanged(replicas, gradients(step, 2, SIZE), step)
        sizes.append(replicas[0].meter.total.bytes - before)
    # rows of 512 elements: 1265 whole; then 17 whole and 64 of P, and 152 of Q. Each replica sends and gets a sum; of
    # one row the first replica is the owner, so it gets a part and sends a sum
    assert sizes == [4 * 64 + 3 * 2 * 4 * 512, 2 * 2 * (64 + 4 * 512)]
    # what travels stands for all gradients
    parts = replicas[1].meter.sent[1, "parts", "train"]
    assert parts.uncompressed == 4 * parts.elements == 4 * (2 * 512 + 2 * round(512 * 1265 / (17 + 64 + 152)))


def test_a_matrix_without_a_gradient_has_none_afterwards():
    after = take_turns(
        simulated("powersgd(1)", shapes=SHAPES), gradients(0, 2, SIZE), 0, (["matrix"], ["matrix", "conv"])
    )
    assert after["matrix"] is None
    assert after["conv"].any()


@pytest.mark.parametrize("sync", [{}, {"every": 2}, {"every": 2, "sums": "all"}])
def test_thin_matrices_of_full_rank_lose_nothing(sync, alone):
    """Gradients of each step, or what the weights moved in two."""
    options = {"simulated": True, "replicas": 3, "microbatches": 2, "microbatch_size": 1, "steps": 4, "sync": sync}
    (losses, weights, *_), (wanted, others, *_) = (
        train(0, options | {"exchange": exchange}) for exchange in ("powersgd(12, rate=0.01)", "none")
    )
    assert losses == pytest.approx(wanted, rel=1e-4)
    pairs = [(tensor, others[stage][name]) for stage, state in weights.items() for name, tensor in state.items()]
    assert not all(torch.equal(*pair) for pair in pairs), "nothing travels thin"


def test_its_state_goes_on_by_the_names_of_parameters():
    replicas, again = (make("powersgd(2)", 2, shapes=SHAPES) for _ in range(2))
    for step in range(3):
        exchanged(replicas, gradients(step, 2, SIZE), step)
    for number, (replica, other) in enumerate(zip(replicas, again, strict=True)):
        saved = replica.exchange.state_dict()
        assert saved.keys() == {
            *(f"start/{name}" for name in ("matrix", "conv")),
            *(f"worker/{number}/{name}/0" for name in ("matrix", "conv")),
            *(f"{part}/used" for part in ("all", "P", "Q")),
        }
        other.exchange.load_state_dict(saved)
        with pytest.raises(CheckpointError, match=f"nothing of PowerSGD between replicas that fits worker/{number}/"):
            other.exchange.load_state_dict({name: saved[name] for name in saved if "start" in name})
    ours, theirs = (exchanged(each, gradients(3, 2, SIZE), 3) for each in (replicas, again))
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
    fresh = exchanged(make("powersgd(2)", 2, shapes=SHAPES), gradients(3, 2, SIZE), 3)
    assert not torch.equal(fresh[0], ours[0])


@pytest.mark.parametrize("expression", ["powersgd(4)", "powersgd(4, rate=1.5, start=10)"])
def test_an_expression_is_what_it_says(expression):
    assert str(ReplicaOptions(count=2, gradients=expression).method) == expression


@pytest.mark.parametrize(
    ("shape", "rank", "columns"),
    [((24, 40), 2, 2), ((24, 40), 8, 0), ((40,), 1, 0), ((2, 300), 4, 0), ((3, 300), 1, 1), ((), 1, 0), ((0, 3), 1, 0)],
)
def test_a_parameter_travels_whole_if_it_gains_too_little(shape, rank, columns):
    """As torch's hook: (n + m) r must be below n m by more than the rate of 2."""
    assert ReplicaOptions(count=2, gradients=f"powersgd({rank})").method.rank_of(shape) == columns


@pytest.mark.parametrize("shape", [(), (40,), (0, 3)])
def test_a_vector_travels_whole_at_any_rate(shape):
    """Thin matrices of 40 + 1 elements are no gain over 40."""
    assert ReplicaOptions(count=2, gradients="powersgd(1, rate=0.01)").method.rank_of(shape) == 0
