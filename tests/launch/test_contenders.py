"""A contender of a bench, in one process: its steps have what training has."""

import time

import links
import pytest
import torch
import torch.distributed as dist
from contenders import StepMeasures, Thinwire

from support.gpus import GPU
from support.tiny_run import alone, prepared
from thinwire.launch.plan.places import simulated_placement
from thinwire.launch.timing.workload import codec_pair

pytestmark = pytest.mark.usefixtures("folder")


@pytest.mark.slow
def test_each_step_has_what_training_has(tmp_path):
    with alone():
        ready = prepared("--pipeline.layers", "[2, 2]")
        contender = Thinwire(ready, simulated_placement(ready.recipe), 0, codec_pair("q(4)/q(8)"), tmp_path)
        found = [contender.step(torch.arange(ready.recipe.batch_size)) for _ in range(3)]
        contender.close()
    for each in found:
        assert each.sent == found[0].sent > 0
        assert 0 < each.forward < each.sections["compute"] and each.sections["encode"] > 0


def test_a_timed_step_ends_when_the_gpu_has_done_it(monkeypatch):
    order = []

    class Contender:
        def forget_cache(self):
            order.append("cache")

        def step(self, ids):
            order.append("step")
            return StepMeasures({}, 0.0, 12.0)

    monkeypatch.setattr(links, "seconds_now", lambda device: order.append(device) or time.perf_counter())
    monkeypatch.setattr(dist, "barrier", lambda: order.append("barrier"))
    found = links.timed(Contender(), torch.arange(2), GPU)
    assert order == ["cache", "barrier", GPU, "step", GPU, "barrier"]
    assert found["seconds"] > 0 and found["sent"] == 12.0
