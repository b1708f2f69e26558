"""A contender of a bench with replicas, in one process: its steps have what training has."""

import time

import pytest
import torch
import torch.distributed as dist

from support.gpus import GPU
from support.tiny_run import alone, prepared
from thinwire.launch.bench.links import turns
from thinwire.launch.bench.links.contenders import Codecs, StepMeasures, Thinwire
from thinwire.launch.plan.places import simulated_placement

pytestmark = pytest.mark.usefixtures("folder")


def measured(folder, between, *options):
    """The contender of two replicas, and the measures of its first three turns."""
    with alone():
        ready = prepared("--replicas.count", "2", *options)
        contender = Thinwire(ready, simulated_placement(ready.recipe), 0, Codecs("none", "none", between), folder)
        found = [contender.step(torch.arange(8)) for _ in range(3)]
        contender.close()
    return contender, found


def exchanged(contender):
    """Frames and bytes of parts between replicas in the last turn, of all stages."""
    sent = [traffic for stage in contender.stages for key, traffic in stage.meter.sent.items() if key[1] == "parts"]
    return sum(each.frames for each in sent), sum(each.bytes for each in sent)


@pytest.mark.slow
def test_every_round_has_its_exchange(tmp_path):
    options = ["--replicas.sync.every", "3", "--pipeline.layers", "[2, 2]"]
    contender, found = measured(tmp_path, "ef(q(4))", *options)
    assert contender.round == 3
    assert exchanged(contender)[0] == 2 * 2, "of two stages and two replicas"
    for each in found:
        assert each.sent == found[0].sent > 0
        assert 0 < each.forward < each.sections["compute"] and each.sections["encode"] > 0


@pytest.mark.slow
def test_quantized_adam_is_measured_after_its_freeze(tmp_path):
    """Its second moment is that of one step. By it, a large step made weights NaN, and the bench ended."""
    options = ["--optimizer.name", "quantized-adam", "--optimizer.freeze_after", "2 steps", "--optimizer.lr", "1e20"]
    (whole, of_whole), (small, of_small) = (measured(tmp_path, between, *options) for between in ("none", "ef(q(4))"))
    assert small.round == 1
    assert exchanged(small)[1] < 0.25 * exchanged(whole)[1]
    for each, uncompressed in zip(of_small, of_whole, strict=True):
        assert each.sent < 0.5 * uncompressed.sent


def test_a_timed_step_ends_when_the_gpu_has_done_it(monkeypatch):
    order = []

    class Contender:
        round = 2

        def forget_cache(self):
            order.append("cache")

        def step(self, ids):
            order.append("step")
            return StepMeasures({}, 0.0, 12.0)

    monkeypatch.setattr(turns, "seconds_now", lambda device: order.append(device) or time.perf_counter())
    monkeypatch.setattr(dist, "barrier", lambda: order.append("barrier"))
    found = turns.timed(Contender(), torch.arange(2), GPU)
    assert order == ["cache", "barrier", GPU, "step", GPU, "barrier"]
    assert found["seconds"] > 0 and found["sent"] == 12.0
