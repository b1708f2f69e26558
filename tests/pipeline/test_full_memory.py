"""A full memory is one sentence. torch's error stands in for the GPU that no test has."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from support.toy import make_trainer, row_of
from thinwire.pipeline.devices.memory import peak_on_gpu, told_if_full
from thinwire.pipeline.errors import MemoryFullError

WAYS_OUT = "lower pipeline.microbatch_size, set training.recompute to block, or raise pipeline.num_stages"


class Full(nn.Module):
    """Has no memory left, forward or backward."""

    def __init__(self, when):
        super().__init__()
        self.when = when

    def forward(self, x):
        if self.when == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return Backward.apply(x) if x.requires_grad else x


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_stage_without_memory_is_named_with_ways_out(when, alone):
    trainer = make_trainer(0, simulated=True, num_stages=3)
    row_of(trainer.stages[1]).append(Full(when))
    with pytest.raises(MemoryFullError) as caught:
        trainer.train_step(0)
    said = str(caught.value)
    assert said.startswith("stage 1 needs more memory than there is on cpu: its process has had ")
    assert said.endswith(f" GB at most; {WAYS_OUT}")


def test_an_optimizer_without_memory_is_told_too(alone, monkeypatch):
    trainer = make_trainer(0, simulated=True)

    def step():
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trainer.sync.optimizers[1], "step", step)
    with pytest.raises(MemoryFullError, match="stage 1 needs more memory"):
        trainer.train_step(0)


def test_the_memory_of_a_host_may_be_full_too():
    """Torch refuses at once what no machine has."""
    with (
        pytest.raises(MemoryFullError, match="stage 2 needs more memory than there is on cpu"),
        told_if_full(2, torch.device("cpu")),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)


def test_other_errors_stay_as_they_are():
    with pytest.raises(RuntimeError, match="something else"), told_if_full(0, torch.device("cpu")):
        raise RuntimeError("something else")


class Gpu:
    """What a device module of torch tells."""

    @staticmethod
    def max_memory_allocated(device):
        return 7_000_000_000

    @staticmethod
    def memory_allocated(device):
        return 6_500_000_000

    @staticmethod
    def mem_get_info(device):
        return 100_000_000, 8_000_000_000


def test_a_gpu_tells_its_peak_and_what_is_held(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device: Gpu)
    gpu = torch.device("cuda", 1)
    assert peak_on_gpu(gpu) == 7_000_000_000
    assert peak_on_gpu(torch.device("cpu")) is None
    with (
        pytest.raises(MemoryFullError, match=r"on cuda:1: its process holds 6\.5 GB of 8\.0 GB; lower"),
        told_if_full(0, gpu),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="what a process takes is read from /proc")
def test_what_started_a_process_does_not_count_as_its_memory():
    large = bytearray(1 << 30)
    words = "from thinwire.pipeline.devices.memory import peak_memory; print(peak_memory())"
    found = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert len(large) // 64 < int(found.stdout) < len(large)
