"""A number of every stage in all processes, for which room is made when a step begins."""

import math
from datetime import timedelta

import pytest
import torch.distributed as dist

from support.processes import left_by_the_first, outcomes_of, run
from support.toy import make_trainer
from thinwire.pipeline.errors import PeerError
from thinwire.pipeline.processes.collectives import StageNumbers
from thinwire.pipeline.processes.placement import Placement

pytestmark = pytest.mark.processes

CLIPPED = {"lr": 0.05, "max_grad_norm": 0.5}
IN_A_V = Placement({0: 0, 1: 1, 2: 1, 3: 0})


def numbers_of(where):
    return StageNumbers(where, "the number", timedelta(seconds=60))


def gathered(rank):
    numbers, found = numbers_of(IN_A_V), []
    for step in range(3):
        numbers.expect()
        numbers.send({stage: math.pi * 10.0**stage + step for stage in IN_A_V.stages_of(rank)})
        found.append(numbers.receive())
    dist.barrier()
    return found


def test_every_process_knows_every_stages_number_exactly_in_stage_order():
    assert run(gathered, 2) == [[[math.pi * 10.0**stage + step for stage in range(4)] for step in range(3)]] * 2


def last_to_come(rank):
    """The others have told theirs, and listen only when stage 0 is through."""
    numbers, store = numbers_of(Placement({0: 0, 1: 1, 2: 2})), dist.distributed_c10d._get_default_store()
    numbers.expect()
    dist.barrier()
    numbers.send({rank: rank + 7.0})
    if rank:
        store.wait(["through"])
    found = numbers.receive()
    store.set("through", "")
    return found


def test_the_last_process_to_come_waits_for_nobody():
    assert run(last_to_come, 3) == [[7.0, 8.0, 9.0]] * 3


def left_alone(rank):
    numbers = numbers_of(Placement({0: 0, 1: 1}))
    left_by_the_first(rank)
    with pytest.raises(PeerError) as caught:
        numbers.expect()
        numbers.send({1: 1.0})
        numbers.receive()
    return str(caught.value)


def test_a_process_that_is_gone_is_named():
    returned, told = outcomes_of(left_alone, 2)[1]
    assert returned and told.startswith("stage 1 was "), told
    assert "the number" in told and "stage 0" in told


def room_while_it_listens(rank):
    """For how many frames of the next step the last stage has room while it waits for the norm."""
    trainer, rooms, receive = make_trainer(rank, steps=3, microbatches=2, optimizer=CLIPPED), [], StageNumbers.receive

    def listening(numbers):
        for end in trainer.stages[0].ends:
            rooms.append((end.incoming.channel.name, end.incoming._room, len(end.incoming._way._pending)))
        return receive(numbers)

    StageNumbers.receive = listening
    trainer.train(lambda record: None)
    return rooms


def test_there_is_room_for_the_next_activations_before_the_norm_is_there_but_after_the_last_step():
    first, last = run(room_while_it_listens, 2)
    assert first == [("gradients", 0, 0)] * 3
    assert last == [("activations", 2, 2)] * 2 + [("activations", 0, 0)]


def norms_without_clipping(rank):
    """The norms of a run, and on which numbers of all stages its processes have waited."""
    records, waited = [], []
    StageNumbers.receive = lambda numbers: waited.append(numbers)
    make_trainer(rank, steps=3, num_stages=3, optimizer={"lr": 0.05}).train(records.append)
    return [record.grad_norm for record in records], waited


def test_the_norm_is_known_without_clipping_and_no_step_waits_for_it(alone):
    simulated = []
    make_trainer(0, steps=3, num_stages=3, simulated=True, optimizer={"lr": 0.05}).train(simulated.append)
    *others, last = run(norms_without_clipping, 3)
    assert last == ([record.grad_norm for record in simulated], []) and all(last[0])
    assert others == [([None] * 3, [])] * 2
