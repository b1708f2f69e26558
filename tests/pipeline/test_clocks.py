import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe

from support import processes
from thinwire.pipeline import CompressedStage, CompressionOptions, Wire
from thinwire.pipeline.measuring import clocks
from thinwire.pipeline.measuring.clocks import Clock, NeighbourClocks, Reading


def test_times_lie_on_the_line_through_both_readings():
    clock = Clock(Reading(at=100.0, offset=5.0, error=1e-4), Reading(at=300.0, offset=5.02, error=3e-4))
    assert clock.drift == pytest.approx(1e-4)
    for here, there in {100.0: 105.0, 200.0: 205.01, 300.0: 305.02}.items():
        assert clock.local(there) == pytest.approx(here, abs=1e-9)


def test_a_difference_within_the_errors_is_no_drift():
    clock = Clock(Reading(at=100.0, offset=5.0, error=1e-4), Reading(at=100.01, offset=5.0002, error=1.1e-4))
    assert clock.drift == 0.0
    assert clock.local(95.0002) == pytest.approx(90.0, abs=1e-9)


def test_one_reading_has_no_drift():
    reading = Reading(at=1.0, offset=-3.0, error=0.0)
    assert Clock(reading, reading).drift == 0.0
    assert Clock(reading, reading).local(4.0) == 7.0


SHIFTS = (40.0, 0.0, -3.5)


def _read_neighbours(rank):
    """What the clocks of neighbours in a chain say when this process's says 1000 s, read twice, and their readings."""
    clocks.time = SimpleNamespace(perf_counter=lambda: time.perf_counter() + SHIFTS[rank])
    known = NeighbourClocks()
    for _ in range(2):
        known.read([(0, 1), (1, 2)])
    readings = {peer: clock.last for peer, clock in known._clocks.items()}
    return {peer: known.local(peer, 1000.0) for peer in range(len(SHIFTS))}, readings


@pytest.mark.processes
def test_both_of_two_neighbours_know_each_others_time_and_nobody_elses():
    """The processes of one machine share a clock, so what they measure is the shift they were given."""
    for rank, (read, readings) in enumerate(processes.run(_read_neighbours, len(SHIFTS))):
        for peer, reading in readings.items():
            assert 0 < reading.error < 1, reading
            assert abs(reading.offset - (SHIFTS[peer] - SHIFTS[rank])) <= reading.error, (rank, peer, reading)
        for peer, local in read.items():
            if abs(rank - peer) == 1:
                assert local == pytest.approx(1000.0 + SHIFTS[rank] - SHIFTS[peer], abs=0.5), (rank, read)
            else:
                assert local is None, (rank, read)


SLOW = 0.5
"""Seconds that the first stage computes while the second waits."""


def _waited(rank, apart):
    """Two stages on hosts whose clocks differ by `apart` seconds: what the second waited for in one pass."""
    theirs = time.perf_counter, time.perf_counter_ns
    ahead = apart * rank
    time.perf_counter = lambda: theirs[0]() + ahead
    time.perf_counter_ns = lambda: theirs[1]() + int(1e9 * ahead)

    store, passes = dist.distributed_c10d._get_default_store(), []

    class Slow(nn.Linear):
        def forward(self, x):
            store.wait([f"ready {len(passes)}"])
            passes.append(time.sleep(SLOW))
            return super().forward(x)

    module = Slow(4, 4) if rank == 0 else nn.Linear(4, 4)
    wire = Wire(CompressionOptions(activations="none", gradients="none"))
    x = torch.empty(2, 4)
    stage = CompressedStage(module, rank, 2, torch.device("cpu"), input_args=x, output_args=x, wire=wire)
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    data = torch.ones(4, 4)
    step = partial(schedule.step, data) if rank == 0 else partial(schedule.step, target=data)
    store.set("ready 0", "")
    store.set("ready 1", "")
    step()  # connects
    wire.clocks.read([(0, 1)])
    before = dict(stage.meter.seconds)
    if rank == 1:
        store.set("ready 2", "")
        store.set("ready 3", "")
    step()
    stage.flush()
    return {name: spent - before[name] for name, spent in stage.meter.seconds.items()}


@pytest.mark.processes
def test_waiting_is_told_apart_between_hosts_whose_clocks_differ_by_an_hour():
    """By the time that the frame says, it left an hour before the wait began, and all of the wait was the wire's."""
    _, second = processes.run(_waited, 2, 3600.0)
    assert second["neighbour"] > 0.0 == second["wait"], second
    assert sum(second.values()) < 3600.0, second
