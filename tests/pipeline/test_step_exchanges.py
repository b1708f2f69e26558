"""What each stage exchanged with other replicas in a step, where it is logged."""

import os
import time

import pytest
import torch.distributed as dist

from support import processes
from support.toy import make_trainer
from thinwire.pipeline.errors import PeerError
from thinwire.pipeline.processes.collectives import AsyncNotes

pytestmark = pytest.mark.processes

OPTIONS = {"replicas": 2, "steps": 4, "microbatches": 2, "microbatch_size": 1, "optimizer": {"lr": 0.05}}


def kept_from_talking(rank):
    """Stage 0 says nothing of a step until the last stage is through with it."""
    trainer, store, send = make_trainer(rank, **OPTIONS), dist.distributed_c10d._get_default_store(), AsyncNotes.send
    found, stepped = [], []

    def send_late(words, mine):
        if rank == 0:
            store.get(f"through {len(stepped)}")
        send(words, mine)

    AsyncNotes.send = send_late
    for step in range(2):
        found += trainer.train_step(step).exchanged
        stepped.append(step)
        if rank == 1:
            store.set(f"through {step}", "")
    found += trainer.sync.exchanges.settle()
    dist.barrier()
    return [(each.step, [stage.stage for stage in each.stages]) for each in found]


def test_no_process_waits_for_the_words_of_a_step_before_the_next_one():
    """The last stage waited for them, and made room for the next frames two latencies later."""
    assert processes.run(kept_from_talking, 4) == [[], [(0, [0, 1]), (1, [0, 1])], [], []]


def left(rank):
    trainer = make_trainer(rank, **OPTIONS)
    trainer.train_step(0)
    if rank == 0:
        AsyncNotes.send = lambda words, mine: (time.sleep(1), os._exit(0))
    trainer.train_step(1)
    with pytest.raises(PeerError) as caught:
        trainer.sync.exchanges.settle()
    return str(caught.value)


def test_who_says_nothing_is_named():
    returned, told = processes.outcomes_of(left, 4)[1]
    assert returned and told.startswith(
        "stage 1 was waiting for the report on the exchange of the replicas of stage 0: "
    ), told


def test_a_simulation_knows_its_own(alone):
    trainer = make_trainer(0, **OPTIONS, simulated=True)
    records = [trainer.train_step(step) for step in range(2)]
    assert [[each.step for each in record.exchanged] for record in records] == [[], [0]]
    [last] = trainer.sync.exchanges.settle()
    assert [stage.bytes for stage in last.stages] == [stage.meter.exchanged // 2 for stage in trainer.stages]
    assert all(stage.seconds > 0 and stage.hidden is None for stage in last.stages)
