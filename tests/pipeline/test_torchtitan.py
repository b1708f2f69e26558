"""torchtitan, the real package, trains a tiny Llama with CompressedStage in place of its own stage."""

import json

import pytest

from support.pages import ROOT
from support.scripts import on_two_processes

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

RUNS = {
    "torch": "torch",
    "none": "none",
    "default": "default",
    "torch, interleaved": "torch;Interleaved1F1B",
    "none, interleaved": "none;Interleaved1F1B",
    "saved": "ef(q(4))/ef(q(8));1F1B;saved",
    "went on": "ef(q(4))/ef(q(8));1F1B;saved;2",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each run found in both processes: losses, norms and bytes."""
    folder = tmp_path_factory.mktemp("torchtitan")
    runs = [f"{name}={run}" for name, run in RUNS.items()]
    printed = on_two_processes(ROOT / "tests" / "support" / "torchtitan_run.py", folder, str(folder), *runs)
    lines = [line for line in printed.splitlines() if line.startswith("found ")]
    return [json.loads(line.removeprefix("found ")) for line in lines]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("schedule", ["", ", interleaved"])
def test_without_compression_losses_and_norms_are_torchtitans_own(found, schedule):
    for process in found:
        assert len(process[f"torch{schedule}"]["steps"]) == 4
        assert process[f"none{schedule}"]["steps"] == process[f"torch{schedule}"]["steps"]


@pytest.mark.slow
@pytest.mark.processes
def test_the_default_codec_sends_a_quarter_and_trains_alike(found):
    for process in found:
        assert process["default"]["bytes"] < 0.3 * process["default"]["uncompressed"]
    (*_, last), (*_, wanted) = (found[1][name]["steps"] for name in ("default", "torch"))
    assert 0 < abs(last[0] - wanted[0]) < 0.1


@pytest.mark.slow
@pytest.mark.processes
def test_buffers_of_feedback_go_on_from_torchtitans_checkpoint(found):
    for process in found:
        assert process["went on"]["steps"] == process["saved"]["steps"][2:]
