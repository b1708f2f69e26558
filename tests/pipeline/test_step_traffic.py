"""What each stage exchanged with other replicas in a step, where it is logged."""

import os
import time

import pytest

from support import processes
from support.toy import make_trainer
from thinwire.pipeline.errors import PeerError
from thinwire.pipeline.measuring.step_traffic import StepTraffic
from thinwire.pipeline.processes.collectives import AsyncNotes, NoteKind

pytestmark = pytest.mark.processes

OPTIONS = {"replicas": 2, "steps": 4, "microbatches": 2, "microbatch_size": 1, "optimizer": {"lr": 0.05}}


def room_before_waiting(rank):
    """The steps in which there was no room for the next activations when this process began to wait for reports."""
    trainer, end = make_trainer(rank, **OPTIONS), StepTraffic.end
    [stage] = trainer.stages
    without = []

    def noted(traffic, beside):
        if stage.ends.upstream is not None and stage.ends.upstream.incoming._room != OPTIONS["microbatches"]:
            without.append(len(records))
        return end(traffic, beside)

    StepTraffic.end = noted
    records = []
    trainer.train(records.append)
    told = [(each.step, [stage.stage for stage in each.exchanged]) for each in records if each.exchanged]
    return told, without, [each.bytes for each in records]


def test_there_is_room_for_the_next_step_before_anyone_waits_for_the_reports_of_one():
    """The last stage waited first: each step of a run without a norm took one more round trip between the stages."""
    (_, *_), (told, without, total), *others = outcomes = processes.run(room_before_waiting, 4)
    assert [each for each, *_ in (outcomes[0], *others)] == [[]] * 3, "the last stage of the first replica reports"
    assert told == [(step, [0, 1]) for step in range(OPTIONS["steps"])]
    last = OPTIONS["steps"] - 1
    assert [each for _, each, _ in outcomes] == [[], [last], [], [last]], "nothing comes after the last step"
    sent = [nbytes for _, _, nbytes in outcomes]
    assert without == [last] and all(of_all > own > 0 for of_all, own in zip(total, sent[0], strict=True))


def left(rank):
    trainer = make_trainer(rank, **OPTIONS)
    trainer.train_step(0)
    if rank == 0:
        AsyncNotes.send = lambda notes, mine: (time.sleep(1), os._exit(0)) if notes._kind == NoteKind.STEP else None
    with pytest.raises(PeerError) as caught:
        trainer.train_step(1)
    return str(caught.value)


def test_who_says_nothing_is_named():
    returned, told = processes.outcomes_of(left, 4)[1]
    assert returned and told.startswith("stage 1 was waiting for the report on a step of stage 0: "), told


def test_a_simulation_knows_its_own(alone):
    trainer = make_trainer(0, **OPTIONS, simulated=True)
    records = [trainer.train_step(step) for step in range(2)]
    assert [record.step for record in records if record.exchanged] == [0, 1]
    stages = records[0].exchanged
    assert [sum(each.exchanged[stage.stage_index].bytes for each in records) for stage in trainer.stages] == [
        stage.meter.exchanged for stage in trainer.stages
    ]
    assert all(stage.seconds > 0 for stage in stages)
