"""Runs on a GPU: `make test-gpu`."""

import json
import shlex
import sys

import pytest
import torch

from support.commands import NEW_THINWIRE, TORCHRUN, completed
from support.tiny_run import write_recipe

pytestmark = pytest.mark.gpu


def summary_of(command, folder, *options):
    where = folder / command
    words = [*NEW_THINWIRE, command, "tiny.yaml", "--training.device", "cuda", "--output", where, *options]
    done = completed(words, folder)
    assert done.status == 0, done.stderr
    return json.loads((where / "summary.json").read_text())


def two_hosts_of_one_gpu(folder, *options):
    """A run of two processes on one GPU that NCCL takes for two hosts; what it printed, and its folder."""
    words = [sys.executable, "-m", "thinwire.launch.train", "tiny.yaml", "--output", "hosts", *options]
    line = f"NCCL_HOSTID=host-$LOCAL_RANK exec {shlex.join(words)}"
    launcher = ["env", *TORCHRUN, "--standalone", "--nproc-per-node", "2", "--no-python", "sh", "-c", line]
    over_loopback = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "WARN"}
    return completed(launcher, folder, CUDA_VISIBLE_DEVICES="0", **over_loopback), folder / "hosts"


@pytest.mark.processes
@pytest.mark.parametrize(
    "codecs",
    ["q(4)/q(8)", 'q(2, round="stochastic")/topk(0.1)', 'aqsgd(q(4), store="device")/ef(topk(0.1))', "none/none"],
)
def test_processes_that_share_a_gpu_over_gloo_train_as_a_simulation_on_it(tmp_path, codecs):
    write_recipe(tmp_path)
    real, simulated = (summary_of(command, tmp_path, "--codec", codecs) for command in ("train", "simulate"))
    assert real["weights_digest"] == simulated["weights_digest"]
    assert real["train_loss"] == simulated["train_loss"]
    assert all(stage["device"].startswith("cuda:") for stage in real["stages"])


@pytest.mark.processes
def test_buffers_on_the_gpu_in_memory_and_on_disk_give_the_same_run(tmp_path):
    write_recipe(tmp_path)
    digests = set()
    for command, medium in (("simulate", "memory"), ("train", "device"), ("train", "memory"), ("train", "disk")):
        codecs = f'aqsgd(q(4), store="{medium}")/ef(topk(0.1), store="{medium}")'
        options = ("--codec", codecs, "--training.steps", "60", "--overwrite")
        digests.add(summary_of(command, tmp_path, *options)["weights_digest"])
    assert len(digests) == 1


@pytest.mark.processes
def test_nan_on_a_gpu_stops_the_run_at_the_end_of_the_pass(tmp_path):
    write_recipe(tmp_path)
    words = [*NEW_THINWIRE, "train", "tiny.yaml", "--training.device", "cuda", "--optimizer.lr", "1e30"]
    done = completed([*words, "--training.steps", "20"], tmp_path)
    assert done.status != 0
    assert "has NaN or infinity in the" in done.stderr


@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_train_over_nccl_as_over_gloo(tmp_path):
    write_recipe(tmp_path)
    digests = []
    for transport in ("gloo", "nccl"):
        options = ("--wire.transport", transport, "--overwrite")
        digests.append(summary_of("train", tmp_path, *options)["weights_digest"])
    assert digests[0] == digests[1]


@pytest.mark.processes
def test_one_gpu_over_nccl(tmp_path):
    """`make test-gpu` shows what this prints: whether NCCL lets two processes on one GPU pass for two hosts."""
    write_recipe(tmp_path)
    wanted = summary_of("train", tmp_path)["weights_digest"]
    done, folder = two_hosts_of_one_gpu(
        tmp_path, "--training.device", "cuda", "--wire.transport", "nccl", "--wire.timeout", "60"
    )
    versions = f"torch {torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    said = [line for line in (done.stdout + done.stderr).splitlines() if "NCCL" in line or "nccl" in line]
    if done.status != 0 and said:
        pytest.xfail(f"NCCL does not work between two processes on one GPU ({versions}): {said[-1][:300]}")
    assert done.status == 0, done.stderr
    assert "nccl carries what processes 0 and 1 send each other" in done.stdout
    assert json.loads((folder / "summary.json").read_text())["weights_digest"] == wanted
    print(f"NCCL works between two processes on one GPU, with the weights of gloo ({versions})")
