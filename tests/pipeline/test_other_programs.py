"""torchtitan and NeMo AutoModel, the real packages, train a tiny Llama with CompressedStage in place of torch's stage.

Two processes each; runs with torch's own stage are the measure.
"""

import json

import pytest

from support.pages import ROOT
from support.scripts import on_two_processes

pytestmark = [pytest.mark.slow, pytest.mark.processes]
BUFFERS = "ef(q(4))/ef(q(8));1F1B;saved"
TORCHTITAN = {
    "torch": "torch",
    "none": "none",
    "default": "q(8, step=0.2)",
    "torch, interleaved": "torch;Interleaved1F1B",
    "none, interleaved": "none;Interleaved1F1B",
    "saved": BUFFERS,
    "went on": f"{BUFFERS};2",
}
NEMO = {
    "torch": "torch",
    "none": "none",
    "default": "q(8, step=0.2)",
    "torch, interleaved": "torch;interleaved1f1b",
    "none, interleaved": "none;interleaved1f1b",
}
SCHEDULES = pytest.mark.parametrize("schedule", ["", ", interleaved"])


def found_by(script, folder, runs):
    """What each run found in both processes: losses, norms and bytes."""
    runs = [f"{name}={run}" for name, run in runs.items()]
    printed = on_two_processes(ROOT / "tests" / "support" / script, folder, *runs)
    lines = [line for line in printed.splitlines() if line.startswith("found ")]
    return [json.loads(line.removeprefix("found ")) for line in lines]


@pytest.fixture(scope="module")
def torchtitan(tmp_path_factory):
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    return found_by("torchtitan_run.py", tmp_path_factory.mktemp("torchtitan"), TORCHTITAN)


@pytest.fixture(scope="module")
def nemo(tmp_path_factory):
    pytest.importorskip("nemo_automodel", reason="nemo_automodel is not installed")
    return found_by("nemo_run.py", tmp_path_factory.mktemp("nemo"), NEMO)


@SCHEDULES
def test_torchtitans_losses_and_norms_are_its_own_without_compression(torchtitan, schedule):
    for process in torchtitan:
        assert len(process[f"torch{schedule}"]["steps"]) == 4
        assert process[f"none{schedule}"]["steps"] == process[f"torch{schedule}"]["steps"]


def test_torchtitan_sends_little_with_the_default_codec_and_trains_alike(torchtitan):
    assert all(process["default"]["bytes"] < 0.3 * process["default"]["uncompressed"] for process in torchtitan)
    (*_, [loss, _]), (*_, [wanted, _]) = (torchtitan[1][name]["steps"] for name in ("default", "torch"))
    assert 0 < abs(loss - wanted) < 0.1


def test_buffers_of_feedback_go_on_from_torchtitans_checkpoint(torchtitan):
    for process in torchtitan:
        assert process["went on"]["steps"] == process["saved"]["steps"][2:]


@SCHEDULES
def test_nemos_losses_and_gradients_are_its_own_without_compression(nemo, schedule):
    """Though the second of its three batches has longer sequences."""
    for process in nemo:
        assert len(process[f"torch{schedule}"]["steps"]) == 3
        assert process[f"none{schedule}"]["steps"] == process[f"torch{schedule}"]["steps"]


def test_nemo_sends_little_with_the_default_codec_and_trains_alike(nemo):
    assert all(process["default"]["bytes"] < 0.3 * process["default"]["uncompressed"] for process in nemo)
    (*_, [losses, _]), (*_, [wanted, _]) = (nemo[1][name]["steps"] for name in ("default", "torch"))
    assert all(0 < abs(loss - other) < 0.1 for loss, other in zip(losses, wanted, strict=True))
