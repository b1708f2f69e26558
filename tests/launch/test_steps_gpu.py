"""`make bench-gpu`: what docs/measured/steps_gpu.py would measure on a GPU, as far as the host goes."""

import argparse
import itertools
import json
import os
import runpy
import time

import pytest

from support.pages import DOCS
from support.processes import begin
from thinwire.launch.recipe import recipe
from thinwire.models.model import find_model
from thinwire.pipeline.devices.device import CPU
from thinwire.pipeline.measuring.meters import Meter

SCRIPT = runpy.run_path(str(DOCS / "measured/steps_gpu.py"))


def test_the_model_is_a_gpt_of_350_million_parameters_in_bf16_with_8_micro_batches_of_1024_tokens():
    wanted = recipe.parse(SCRIPT["words"](False, "cpu"))
    head = 50257 * 1024  # the weights of the embedding again
    assert find_model(wanted.model).parameters - head == pytest.approx(350e6, rel=0.03)
    pipeline = wanted.pipeline
    assert (pipeline.num_stages, pipeline.num_microbatches, pipeline.microbatch_size) == (4, 8, 1)
    assert (wanted.data.block_size, wanted.training.precision) == (1024, "bf16")


def _measure(rank, port, options):
    around = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": SCRIPT["STAGES"]}
    around |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in around.items()})
    SCRIPT["work"](options, CPU)


@pytest.mark.processes
@pytest.mark.slow
def test_its_processes_take_turns_with_all_ways_to_send_and_leave_traces(tmp_path):
    options = argparse.Namespace(
        tiny=True, only=["PipelineStage", "q(4)/q(8)"], steps=1, work=str(tmp_path), folder=tmp_path / "traces"
    )
    with SCRIPT["free_port"]() as port:
        processes = [begin(_measure, rank, port, options, daemon=True) for rank in range(SCRIPT["STAGES"])]
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * SCRIPT["STAGES"]
    told = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(SCRIPT["STAGES"])]
    assert all(0 < one["steps"]["q(4)/q(8)"][0]["codecs"] < one["steps"]["q(4)/q(8)"][0]["seconds"] for one in told)
    assert "| `q(4)/q(8)` | " in SCRIPT["page"](told, 1)
    trace = json.loads(next((tmp_path / "traces").glob("q*-stage-1.json")).read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"encode", "decode"} <= names


def test_the_time_of_codecs_is_that_of_encode_and_decode_alone(monkeypatch):
    spent, meter = SCRIPT["CodecTime"](CPU), Meter()
    spent.watch(meter)
    monkeypatch.setattr(time, "perf_counter", itertools.count().__next__)
    for name in ("encode", "compute", "decode"):
        with meter.section(name):
            pass
    assert spent.take() == 2, "a tick each"
    assert spent.take() == 0
    assert all(meter.seconds[name] > 0 for name in ("encode", "compute", "decode"))


def test_the_page_has_the_step_beside_plain_torch_and_the_exposed_codecs_of_the_slowest_stage():
    sections = dict.fromkeys(SCRIPT["SECTIONS"], 0.05)
    steps = {
        "PipelineStage": [{"seconds": 0.2, "codecs": 0, "sections": {}}],
        "q(4)/q(8)": [{"seconds": seconds, "codecs": 0.01, "sections": sections} for seconds in (0.1, 0.1, 0.4)],
    }
    told = [{"device": "cuda:0 (X)", "peak": 10**9, "steps": steps, "tiny": False}] * 3
    slow = {**steps, "q(4)/q(8)": [{**step, "codecs": 0.02} for step in steps["q(4)/q(8)"]]}
    page = SCRIPT["page"]([*told, {**told[0], "steps": slow, "peak": 2 * 10**9}], 3)
    assert "| `PipelineStage` | 200.0 | 1.00 |  |" in page
    assert "| `q(4)/q(8)` | 100.0 | 0.50 | 20.0% | 50.0 | 50.0 |" in page
    assert "4 stages on cuda:0 (X)" in page and "numbers mean nothing" not in page
    assert page.count("1.0 GB") == 3 and page.count("2.0 GB") == 1
