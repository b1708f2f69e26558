"""Runs on a card: `make test-gpu`."""

import json

import pytest
import torch

from support.commands import NEW_THINWIRE, completed
from support.tiny_run import write_recipe

pytestmark = pytest.mark.gpu


def summary_of(command, folder, *options):
    where = folder / command
    words = [*NEW_THINWIRE, command, "tiny.yaml", "--training.device", "cuda", "--output", where, *options]
    done = completed(words, folder)
    assert done.status == 0, done.stderr
    return json.loads((where / "summary.json").read_text())


@pytest.mark.processes
@pytest.mark.parametrize(
    "codecs",
    ["q(4)/q(8)", 'q(2, round="stochastic")/topk(0.1)', 'aqsgd(q(4), store="device")/ef(topk(0.1))', "none/none"],
)
def test_processes_that_share_a_card_over_gloo_train_as_a_simulation_on_it(tmp_path, codecs):
    write_recipe(tmp_path)
    real, simulated = (summary_of(command, tmp_path, "--codec", codecs) for command in ("train", "simulate"))
    assert real["weights_digest"] == simulated["weights_digest"]
    assert real["train_loss"] == simulated["train_loss"]
    assert all(stage["device"].startswith("cuda:") for stage in real["stages"])


@pytest.mark.processes
def test_nan_on_a_card_stops_the_run_at_the_end_of_the_pass(tmp_path):
    write_recipe(tmp_path)
    words = [*NEW_THINWIRE, "train", "tiny.yaml", "--training.device", "cuda", "--optimizer.lr", "1e30"]
    done = completed([*words, "--training.steps", "20"], tmp_path)
    assert done.status != 0
    assert "has NaN or infinity in the" in done.stderr


@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_cards_train_over_nccl_as_over_gloo(tmp_path):
    write_recipe(tmp_path)
    digests = []
    for transport in ("gloo", "nccl"):
        options = ("--wire.transport", transport, "--overwrite")
        digests.append(summary_of("train", tmp_path, *options)["weights_digest"])
    assert digests[0] == digests[1]
