import time

import pytest
import torch

from thinwire.compress.transfer import put
from thinwire.models.seed import seeded
from thinwire.pipeline.devices import device
from thinwire.pipeline.devices.device import CPU, choose, copy_to_host, described, put_all, seconds_now, use
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.options import TrainingOptions


@pytest.mark.parametrize(
    ("gpus", "local_rank", "wanted", "got"),
    [
        (0, 3, "auto", "cpu"),
        (0, 3, "cpu", "cpu"),
        (4, 3, "auto", "cuda:3"),
        (4, 3, "cuda", "cuda:3"),
        (4, 3, "cpu", "cpu"),
        (2, 3, "auto", "cuda:1"),
        (1, 3, "cuda", "cuda:0"),
        (2, 0, "cuda", "cuda:0"),
    ],
)
def test_processes_take_the_gpus_of_their_host_in_turn(monkeypatch, gpus, local_rank, wanted, got):
    monkeypatch.setattr(device, "num_gpus", lambda: gpus)
    assert choose(wanted, local_rank) == torch.device(got)


def test_a_wish_for_a_gpu_without_one_is_one_sentence(monkeypatch):
    monkeypatch.setattr(device, "num_gpus", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(OptionsError, match=r"training.device cuda needs a GPU .* add --training.device cpu") as refused:
        choose("cuda")
    assert "\n" not in str(refused.value)


def test_gpus_that_are_hidden_are_told_apart_from_gpus_that_are_not_there(monkeypatch):
    monkeypatch.setattr(device, "num_gpus", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for seen in ("", "7"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
        with pytest.raises(OptionsError, match=f"CUDA_VISIBLE_DEVICES='{seen}' leaves none; change or unset it, or"):
            choose("cuda")


def test_no_gpu_is_used_unasked():
    assert TrainingOptions().device == "cpu"


def test_on_the_cpu_nothing_is_moved_or_changed():
    x, settings = torch.randn(3), torch.are_deterministic_algorithms_enabled()
    use(CPU)
    assert put(x, CPU) is x and put_all({"x": x, "n": 3}, CPU)["x"] is x
    assert torch.are_deterministic_algorithms_enabled() == settings
    assert described(CPU) == "cpu"
    assert seconds_now(CPU) <= time.perf_counter()


def test_a_copy_for_a_checkpoint_does_not_follow_the_weights():
    x = torch.randn(2, 3)
    copy = copy_to_host(x)
    x.zero_()
    assert copy.abs().sum() > 0


def test_a_seeded_forward_on_a_gpu_seeds_its_generator_and_gives_it_back(monkeypatch):
    gpu = torch.Generator().manual_seed(7)
    before = gpu.get_state()

    class Module:
        default_generators = [None, gpu]

    monkeypatch.setattr(torch, "get_device_module", lambda found: Module)
    draws = []
    for _ in range(2):
        with seeded(torch.Generator().manual_seed(5), torch.device("cuda", 1)):
            draws.append(torch.randn(4, generator=gpu))
    assert torch.equal(*draws)
    assert torch.equal(draws[0], torch.randn(4, generator=torch.Generator().manual_seed(5)))
    assert torch.equal(gpu.get_state(), before)
