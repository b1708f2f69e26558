"""Replicas: they are one pipeline with a larger batch, and a simulation of them equals the processes bit for bit."""

import pytest
import torch

from support.toy import make_trainer
from support.toy_runs import equal_to_a_simulation
from thinwire.pipeline.replicas.division import Bucket, divide
from thinwire.pipeline.replicas.layout import FLAT, StageRows

CODECS = {
    "stochastic and by position": {
        "activations": 'ef21(q(4, round="stochastic"))',
        "gradients": 'ef(q(4, round="stochastic"))',
    },
    "by sample": {"activations": "aqsgd(q(4))", "gradients": "q(8)"},
}
EXCHANGES = {
    2: {"exchange": "ef(q(4))"},
    3: {
        "exchange": 'ef(q(2, round="stochastic"))',
        "optimizer": {"name": "quantized-adam", "freeze_after": "2 steps", "lr": 0.05, "max_grad_norm": 0.5},
    },
}
SMALL = {"microbatches": 2, "microbatch_size": 1, "accumulation": 2, "dropout": 0.2}


@pytest.mark.parametrize(
    ("rows", "replicas", "parts"),
    [
        (0, 2, []),
        (1, 2, [[(0, 1), (1, 1)]]),
        (5, 2, [[(0, 3), (3, 5)]]),
        (7, 3, [[(0, 3), (3, 5), (5, 7)]]),
        (13, 3, [[(0, 4), (4, 7), (7, 10)], [(10, 11), (11, 12), (12, 13)]]),
        (12, 3, [[(0, 4), (4, 7), (7, 10)], [(10, 11), (11, 12), (12, 12)]]),
    ],
)
def test_every_row_has_one_owner(rows, replicas, parts):
    wanted = [Bucket(index, tuple(range(start, stop) for start, stop in bucket)) for index, bucket in enumerate(parts)]
    assert divide(rows, replicas, bucket=10) == wanted


def test_zeros_fill_the_last_row():
    counts = [StageRows({"weight": torch.Size((elements,))}, FLAT).count for elements in (0, 1, 512, 513)]
    assert counts == [0, 1, 1, 2]


@pytest.mark.processes
@pytest.mark.parametrize(("replicas", "codec"), [(2, "by sample"), (3, "stochastic and by position")])
def test_a_simulation_of_replicas_equals_their_processes_bit_for_bit(replicas, codec, alone):
    """Three replicas have an empty last part: a stage has one row of weights. They exchange momentum from step 2 on.

    Two replicas exchange whole gradients, and from step 2 on thin matrices.
    """
    options = SMALL | {"replicas": replicas, "compression": CODECS[codec], "steps": 5} | EXCHANGES[replicas]
    real = equal_to_a_simulation(2 * replicas, options)
    assert [sum(stage in result[2] for result in real) for stage in range(2)] == [replicas] * 2


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("codec", ["none", *CODECS])
def test_replicas_are_one_pipeline_with_all_their_passes(replicas, codec, alone):
    """Dropout, stochastic rounding and feedback are those of the sample's place in the batch, not of a replica."""
    compression = CODECS.get(codec, {"activations": "none", "gradients": "none"})
    options = SMALL | {
        "simulated": True,
        "compression": compression,
        "optimizer": {"name": "sgd", "max_grad_norm": 0.5},
    }
    several = make_trainer(0, replicas=replicas, steps=4, **options)
    one = make_trainer(0, **options | {"accumulation": 2 * replicas, "steps": 4})
    records = {several: [], one: []}
    for trainer, kept in records.items():
        trainer.train(kept.append)
    assert records[several][0].loss == records[one][0].loss
    for ours, theirs in zip(records[several], records[one], strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
        assert ours.samples == theirs.samples == 4 * replicas
    # equal but for the order of the sums
    for mine, other in zip(several.stages, one.stages, strict=True):
        for ours, theirs in zip(mine.submod.parameters(), other.submod.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_frames_between_replicas_are_as_many_and_as_long_as_planned(alone):
    trainer = make_trainer(0, **SMALL | {"simulated": True, "replicas": 3, "steps": 2})
    trainer.train(lambda record: None)
    # weights of 12 x 12 and 12 biases are one row, which the first replica owns
    for stage in trainer.stages:
        parts, sums = (stage.meter.sent[stage.stage_index, channel, "train"] for channel in ("parts", "sums"))
        assert parts == sums
        assert (parts.frames, parts.bytes) == (2 * 2, 2 * 2 * (64 + 4 * 512))
