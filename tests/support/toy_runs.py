"""Runs of the toy: real processes beside a simulation, and a stop in the middle."""

import pytest
import torch
import torch.distributed as dist

from support.processes import run
from support.toy import make_trainer, train
from thinwire.pipeline.saving.checkpoint import Checkpoints
from thinwire.pipeline.saving.checkpoint_folder import manifests
from thinwire.pipeline.training.training_state import collect, resume


def equal_to_a_simulation(processes, options):
    """Train in processes, and check that losses, weights and bytes are those of a simulation; what each one has."""
    real = run(train, processes, options | {"simulated": False})
    losses, weights, traffic, _ = train(0, options | {"simulated": True})
    assert [result[0] for result in real if result[0] is not None] == [losses]
    for result in real:
        for stage, state in result[1].items():
            assert all(torch.equal(tensor, weights[stage][name]) for name, tensor in state.items())
    for stage in range(2):
        for route, carried in traffic[stage].items():
            assert sum(each[2][stage][route].bytes for each in real if route in each[2].get(stage, ())) == carried.bytes
    return real


def assert_trains_to(trainer, weights, losses):
    """Train, and check losses and weights against those of an algorithm restated; the record of each step."""
    records = []
    trainer.train(records.append)
    assert [record.loss for record in records] == pytest.approx(losses, rel=1e-4)
    got = [parameter for stage in trainer.stages for parameter in stage.submod.parameters()]
    for ours, theirs in zip(got, weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    return records


def checkpoints_of(folder):
    """The checkpoints of a simulation with two stages."""
    return Checkpoints(folder, stages=[0, 1], num_stages=2, keep=2, header={}, words=dist.HashStore())


def stop_and_resume(folder, stop, options):
    """Train so many steps and write a checkpoint: the losses, the trainer, and another one that read the checkpoint."""
    stopped, checkpoints = make_trainer(0, **options), checkpoints_of(folder)
    losses = [stopped.train_step(step).loss for step in range(stop)]
    checkpoints.save(stop, lambda: collect(stopped, checkpoints))
    checkpoints.wait()
    again = make_trainer(0, **options)
    resume(again, checkpoints_of(folder), manifests(folder)[-1])
    return losses, stopped, again
