"""NaN and infinity from one stage to the next, under each value of `wire.nonfinite`, in processes and simulated."""

import os
import re
from itertools import product
from pathlib import Path

import pytest
import torch

from support.processes import outcomes_of, run
from support.toy import make_trainer
from thinwire.pipeline.errors import NonFiniteError, PeerError

VALUES = {"NaN": torch.nan, "inf": torch.inf, "-inf": -torch.inf}
BOUNDARIES = {"first": 0, "middle": 1}
CHANNELS = ("activations", "gradients")
CODECS = {
    "none": {"activations": "none", "gradients": "none"},
    "default": {},
    "at both ends": {"activations": 'ef21(q(4), slot="sample")', "gradients": 'ef21(q(4), slot="sample")'},
    "at the sender": {"activations": "ef(q(4))", "gradients": "ef(q(4))"},
}
SAMPLE, MICROBATCH = 1, 1
"""Of the first step: the one row that is not finite."""

PLACES = list(product(VALUES, BOUNDARIES, CHANNELS))
SENT = [*product(("none",), VALUES, BOUNDARIES, CHANNELS), *product(("default",), ("NaN",), BOUNDARIES, CHANNELS)]


def spoiled_trainer(rank, codec, value, boundary, channel, **options):
    """Four stages in two processes, or all in this one, and what crosses the boundary in the spoiled channel.

    It is a list of the tensors that arrived at the other end, if that is here.
    """
    options = {"schedule": "interleaved-1f1b", "num_stages": 4, "compression": CODECS[codec], "steps": 2} | options
    trainer, arrived, calls = make_trainer(rank, **options), [], []
    number, forward = BOUNDARIES[boundary], channel == "activations"

    def spoil(x):
        row = torch.zeros(len(x), 1, 1, dtype=torch.bool).index_fill(0, torch.tensor(SAMPLE), True)
        return torch.where(row, VALUES[value], x)

    def after(module, inputs, output):  # the stage before the boundary
        if not forward:
            output.register_hook(lambda gradient: arrived.append(gradient.clone()))
        elif calls.append(None) or len(calls) == MICROBATCH + 1:
            return spoil(output)
        return output

    def before(module, inputs):  # the stage behind it
        (x,) = inputs
        x = x.clone()
        if forward:
            arrived.append(x.detach())
        elif calls.append(None) or len(calls) == MICROBATCH + 1:
            x.register_hook(spoil)
        return (x,)

    for stage in trainer.stages:
        if stage.stage_index == number:
            stage.submod.register_forward_hook(after)
        elif stage.stage_index == number + 1:
            stage.submod.register_forward_pre_hook(before)
    return trainer, arrived


def bytes_of(x):
    return x.detach().numpy().tobytes()


def trained(rank, case, **options):
    """What arrived, losses, and weights, all as bytes: NaN differs from itself."""
    trainer, arrived = spoiled_trainer(rank, *case, wire={"timeout": 60.0, "nonfinite": "send"}, **options)
    losses = []
    trainer.train(lambda record: losses.append(record.loss))
    weights = {
        stage.stage_index: [bytes_of(weight) for weight in stage.submod.parameters()] for stage in trainer.stages
    }
    return arrived, [str(loss) for loss in losses], weights


def train_each(rank, cases):
    return {case: trained(rank, case) for case in cases}


@pytest.fixture(scope="module")
def sent():
    """What each of two processes returns for each case; to start them takes longer than to train a case."""
    return run(train_each, 2, SENT, timeout=240)


@pytest.mark.processes
@pytest.mark.parametrize("case", SENT, ids=", ".join)
def test_send_passes_the_row_on_and_changes_no_other(case, sent, alone):
    arrived, losses, weights = trained(0, case, simulated=True)
    real = [process[case] for process in sent]
    assert losses in [said for _, said, _ in real] and losses[1] == "nan", "and the run goes on"
    assert real[0][2] | real[1][2] == weights
    [there] = [tensors for tensors, _, _ in real if tensors]
    assert [bytes_of(x) for x in there] == [bytes_of(x) for x in arrived]
    first, *_ = there
    assert first.isfinite().all()
    row, other = there[MICROBATCH][SAMPLE], there[MICROBATCH][1 - SAMPLE]
    assert other.isfinite().all()
    codec, value, *_ = case
    assert not row.isfinite().any()
    if codec == "none":
        assert torch.equal(row.nan_to_num(7, 8, 9), torch.full_like(row, VALUES[value]).nan_to_num(7, 8, 9))


def refused(rank, place, folder):
    """Train, and write down what the stage with the row says; its process ends, so its peers need not wait."""
    trainer, _ = spoiled_trainer(rank, "none", *place)
    try:
        trainer.train(lambda record: None)
    except NonFiniteError as error:
        Path(folder, "said").write_text(str(error))
        os._exit(0)
    except PeerError as error:
        return str(error)


@pytest.mark.processes
@pytest.mark.parametrize("place", PLACES, ids=", ".join)
def test_raise_stops_the_stage_that_would_send_it_and_names_the_tensor(place, tmp_path, alone):
    _, boundary, channel = place
    number = BOUNDARIES[boundary]
    sender = number if channel == "activations" else number + 1
    [(lost, told)] = outcomes_of(refused, 2, place, tmp_path).values()
    assert lost and re.match(r"stage \d was (waiting for|making room for|sending) ", told), "the other process lost it"
    assert (tmp_path / "said").read_text() == (
        f"stage {sender} has NaN or infinity in the {channel} of micro-batch {MICROBATCH}, train pass 0, over boundary "
        f"{number}; lower the learning rate, or pass it on, with wire.nonfinite send and a codec without feedback"
    )
    simulated, _ = spoiled_trainer(0, "none", *place, simulated=True)
    with pytest.raises(NonFiniteError, match=re.escape((tmp_path / "said").read_text())):
        simulated.train(lambda record: None)


@pytest.mark.slow
@pytest.mark.parametrize("buffers", ["at both ends", "at the sender"])
@pytest.mark.parametrize("place", PLACES, ids=", ".join)
def test_no_buffer_of_feedback_takes_it_even_where_it_may_be_sent(place, buffers, alone):
    trainer, _ = spoiled_trainer(0, buffers, *place, simulated=True, wire={"nonfinite": "send"})
    with pytest.raises(NonFiniteError, match=r"or pass it on, with wire\.nonfinite send and a codec"):
        trainer.train(lambda record: None)


@pytest.mark.parametrize("norm", [None, 1.0])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_loss_that_no_frame_shows_stops_the_run_too(stages, norm, alone):
    """One stage sends nothing, and what goes back may be finite nevertheless."""
    options = {"num_stages": stages, "simulated": True, "steps": 3, "optimizer": {"max_grad_norm": norm}}
    trainer, done = make_trainer(0, **options), []

    def spoil(module, inputs, output):
        everywhere = torch.ones_like(output, dtype=torch.bool)
        return torch.where(everywhere, torch.nan, output) if len(done) == 1 else output

    trainer.stages[-1].submod.register_forward_hook(spoil)
    with pytest.raises(NonFiniteError, match=r"the loss of step 2 is nan; lower the learning rate, or go on with wire"):
        trainer.train(done.append)
    assert len(done) == 1


def test_a_norm_that_is_not_finite_stops_the_run_where_the_loss_still_is(alone):
    trainer, done = make_trainer(0, num_stages=1, simulated=True, steps=3, optimizer={"max_grad_norm": 1.0}), []
    [weight, *_] = trainer.stages[0].submod.parameters()
    weight.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(NonFiniteError, match=r"the gradient norm of step 1 is (inf|nan); lower"):
        trainer.train(done.append)
    assert not done
