"""`thinwire predict` as a user types it."""

import json
import re
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from support.workloads import uniform
from thinwire.compress import CodecError
from thinwire.compress.codecs.quantize import Quantize
from thinwire.launch.cli import main
from thinwire.launch.predict import profile
from thinwire.launch.shared.tables import Table, duration_text
from thinwire.launch.timing.workload import CodecCost, codec_pair
from thinwire.pipeline.options.compression import FAST, MILD
from thinwire.pipeline.schedules import SCHEDULES

pytestmark = pytest.mark.slow

GIVEN = ["quickstart", "--forward-ms", "45", "--backward-ms", "135"]


DEFAULT = "q(8, step=0.2, codebook=4096)/q(8, step=0.2)"


def predicted(capsys, *arguments):
    assert main(["predict", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_packaged_recipe_with_given_times(capsys):
    found = predicted(capsys, *GIVEN, "--bandwidth", "1gbit,10mbit", "--codec", "q(2)/q(4)", "--latency", "20ms")
    assert found["workload"]["forward"] == [0.045] * 4
    cells = {(cell["codec"], cell["bandwidth"]): cell for cell in found["predictions"]}
    assert {codec for codec, _ in cells} == {"none", DEFAULT, "q(2)/q(4)"}
    assert cells["none", 1e7]["samples_per_second"] < cells[DEFAULT, 1e7]["samples_per_second"]
    assert cells["none", 1e7]["speedup"] == 1.0
    needed = found["needed_bandwidth"]
    assert needed["none"] > 4 * needed[DEFAULT] > 4 * needed["q(2)/q(4)"] > 0
    assert {cell["schedule"] for cell in found["schedules"]} >= {"gpipe", "1f1b", "1f1b-wan"}
    assert [sentence.split(" with ")[0] for sentence in found["verdicts"]] == ["at 1gbit", "at 10mbit"]
    assert "compression pays: q(2)/q(4)" in found["verdicts"][1]
    for cell in found["predictions"]:
        shares = zip(cell["busy"], cell["wait"], cell["bubble"], strict=True)
        assert [sum(parts) for parts in shares] == pytest.approx([cell["seconds"]] * 4)


def test_a_pretrained_model_is_advised_no_codec_that_breaks_it(capsys, tmp_path, monkeypatch):
    """The advice is by speed, and was q(2)/q(4), with which SmolLM2 answers nothing."""
    monkeypatch.chdir(tmp_path)
    sizes = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)).save_pretrained("tiny")
    (tmp_path / "text").write_text("words and words\n" * 200)
    given = ["--data.name", "text", "--data.held_out", "0", "--model.name", "tiny", "--model.config", "{}"]
    own = predicted(capsys, *GIVEN, *given, "--model.weights", "pretrained", "--bandwidth", "10mbit")
    assert {cell["codec"] for cell in own["predictions"]} == {
        "none",
        'q(8, step=0.28, codebook=4096)/q(16, step=0.65, per="tensor")',
        *MILD,
    }
    fresh = predicted(capsys, *GIVEN, *given, "--bandwidth", "10mbit")
    assert {cell["codec"] for cell in fresh["predictions"]} == {"none", DEFAULT, *FAST}


def test_its_json_has_the_tables(capsys):
    told = predicted(capsys, *GIVEN, "--bandwidth", "10mbit", "--codec", "q(2)/q(4)")
    assert told["title"] == "prediction of quickstart"
    speeds, needed, frames, stages, schedules = (Table(**table) for table in told["tables"])
    codecs = ["none", DEFAULT, "q(2)/q(4)"]
    assert [row[:2] for row in speeds.rows] == [["10mbit", codec] for codec in codecs]
    assert [row[2] for row in speeds.rows] == [cell["samples_per_second"] for cell in told["predictions"]]
    assert [row[0] for row in needed.rows] == codecs and len(stages.rows) == 4
    assert [row[:2] for row in frames.rows[-2:]] == [["q(2)", "activations"], ["q(4)", "gradients"]]
    assert 3 * len(schedules.rows) == len(told["schedules"]) == 3 * len(codecs), "each on as many stages as processes"


def test_over_nccl_frames_are_as_long_as_they_are_there(capsys):
    """Codecs were told to save there what coding saves elsewhere, and NCCL carries every payload uncoded."""

    def bits(*options):
        told = predicted(capsys, *GIVEN, "--bandwidth", "10mbit", "--codec", "q(2, code='entropy')", *options)
        return {row[0]: row[2] for row in told["tables"][2]["rows"] if row[1] == "activations"}

    elsewhere, over_nccl = bits(), bits("--wire.transport", "nccl")
    assert elsewhere["none"] == over_nccl["none"] == pytest.approx(32, rel=1e-2)
    assert 1.4 < elsewhere['q(2, code="entropy")'] < 1.7 < 2 < over_nccl["q(2)"] < 2.2
    [(default, coded), (known, plain)] = (
        next((name, bits) for name, bits in found.items() if "step" in name) for found in (elsewhere, over_nccl)
    )
    assert default == "q(8, step=0.2, codebook=4096)" and 'code="plain"' in known
    assert 4 < coded < 5 and 9 < plain < 9.2


def test_a_codec_that_nccl_cannot_carry_is_told_as_a_run_tells_it(capsys, monkeypatch):
    def refused(codec):
        raise CodecError("it has no such form")

    monkeypatch.setattr(Quantize, "of_known_length", refused)
    assert main(["predict", *GIVEN, "--wire.transport", "nccl"]) == 2
    said = "wire.transport nccl needs frames whose length is known in advance: it has no such form; add --wire."
    assert capsys.readouterr().err.startswith(said)


def test_bandwidths_are_read_as_a_cluster_reads_them(capsys):
    found = predicted(capsys, *GIVEN, "--bandwidth", "NONE,10MBIT", "--codec", "q(8)", "--latency", "500us")
    assert {cell["bandwidth"] for cell in found["predictions"]} == {None, 1e7}


def test_fields_of_the_recipe_can_be_overridden(capsys):
    found = predicted(
        capsys, *GIVEN, "--pipeline.num_microbatches", "8", "--schedule", "1f1b-wan", "--max-in-flight", "3"
    )
    assert found["workload"]["num_microbatches"] == 8
    assert {cell["schedule"] for cell in found["predictions"]} == {"1f1b-wan"}
    assert found["best"] is None


def test_directions_that_leave_each_other_less_slow_the_schedules_that_use_both(capsys):
    def speed(schedule, *options):
        slow = ["--bandwidth", "2mbit", "--codec", "none", "--schedule", schedule]
        return predicted(capsys, *GIVEN, *slow, *options)["predictions"][0]["samples_per_second"]

    assert speed("gpipe", "--duplex", "0.8") == speed("gpipe")
    assert speed("1f1b-wan", "--duplex", "0.8") < 0.95 * speed("1f1b-wan")
    assert main(["predict", *GIVEN, "--duplex", "1.5"]) != 0
    assert "--duplex: must be above 0 and at most 1, got '1.5'" in capsys.readouterr().err


def test_tables_say_it_in_words(capsys):
    assert main(["predict", *GIVEN, "--bandwidth", "10mbit"]) == 0
    shown = capsys.readouterr().out
    for part in ("hides the wire", "compression pays", "best at 10mbit", "45+135", "1f1b-wan", "; 350 steps take "):
        assert part in shown


def test_the_duration_of_a_recipe_in_epochs_is_told(capsys):
    """It was told for a recipe in steps alone."""
    epochs = [*GIVEN, "--data.limit", "40000", "--training.epochs", "2", "--bandwidth", "10mbit", "--codec", "none"]
    found = predicted(capsys, *epochs)
    assert found["workload"]["steps"] == 2 * 17
    assert main(["predict", *epochs]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"; 34 steps take {duration_text(34 * found['best']['seconds'])}" in shown


def test_a_step_of_several_passes_takes_as_many_times_as_long(capsys):
    """The seconds of a pass were told as those of a step, so a run of four passes a step seemed four times as short."""

    def said(accumulation):
        few = ["--bandwidth", "10mbit", "--codec", "none", "--training.steps", "100"]
        found = predicted(capsys, *GIVEN, *few, "--pipeline.accumulation", accumulation)
        return found, found["predictions"][0]

    (_, one), (found, four) = said("1"), said("4")
    assert found["workload"]["accumulation"] == 4
    assert four["seconds"] == pytest.approx(4 * one["seconds"])
    assert four["samples_per_second"] == pytest.approx(one["samples_per_second"])
    assert four["speedup"] == one["speedup"] and four["of_unthrottled"] == pytest.approx(one["of_unthrottled"])
    for stage in range(4):
        assert four["busy"][stage] + four["wait"][stage] + four["bubble"][stage] == pytest.approx(four["seconds"])
    shown = dict(zip(found["tables"][0]["columns"], found["tables"][0]["rows"][0], strict=True))
    assert shown["s a step"] == four["seconds"] and shown["100 steps"] == duration_text(100 * four["seconds"])


def test_only_schedules_that_the_model_can_be_cut_for_are_shown(capsys):
    """The best one needed eight stages of a model with six layers. Of the others, the options to type are told."""

    def schedules(*options):
        return {one["schedule"] for one in predicted(capsys, *GIVEN, *options)["schedules"]}

    assert schedules() == {name for name, spec in SCHEDULES.items() if spec.stages_per_process == 1}
    three = ["--pipeline.num_stages", "3", "--pipeline.layers", "null"]
    assert schedules(*three) > schedules()
    for schedule, column in (("1f1b", "stage"), ("interleaved-1f1b", "process")):
        shown = predicted(capsys, *GIVEN, *three, "--pipeline.num_microbatches", "6", "--schedule", schedule)["tables"][
            3
        ]
        assert (shown["columns"][0], len(shown["rows"])) == (column, 3), (
            "six stages in three processes were three stages"
        )
    assert main(["predict", *GIVEN, *three, "--bandwidth", "10mbit", "--schedule", "1f1b"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    best, chosen = re.search(r"best at 10mbit: (\S+) .* its options: (--pipeline.schedule .*)", shown).groups()
    assert chosen.startswith(f"--pipeline.schedule {best}")
    assert ("--pipeline.num_stages 6" in chosen) == (SCHEDULES[best].stages_per_process == 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--pipeline.schedule", "interleaved-1f1b"],
            "a prediction needs a recipe with one stage in each process, got 2; add --pipeline.num_stages 2 "
            "--pipeline.stages_per_process 1 --pipeline.layers null --pipeline.schedule gpipe --compression.boundaries "
            "'{}', and --schedule interleaved-1f1b for 2 stages in each",
        ),
        (
            ["--schedule", "interleaved-1f1b"],
            "interleaved-1f1b cuts the model into 8 stages, 2 for each of 4 processes, but it has 6 layers; take a "
            "smaller --pipeline.num_stages or another --schedule",
        ),
    ],
    ids=["recipe", "schedule"],
)
def test_stages_that_a_prediction_cannot_place_are_refused(capsys, options, said):
    """It took each stage for a process, so it predicted other processes than those of the recipe."""
    assert main(["predict", *GIVEN, *options]) == 2
    assert capsys.readouterr().err.endswith(f"{said}\n")


def test_times_are_measured_where_none_are_given(capsys):
    small = [
        "--model.config",
        '{"vocab_size": 256, "n_layer": 2, "n_embd": 12, "n_head": 2, "n_positions": 128}',
        "--pipeline.num_stages",
        "2",
    ]
    found = predicted(capsys, "quickstart", *small, "--bandwidth", "1gbit", "--codec", "topk(0.1)/reuse")
    assert all(seconds > 0 for name in ("forward", "backward") for seconds in found["workload"][name])
    measured = {(cost["channel"], cost["codec"]) for cost in found["workload"]["codec_seconds"]}
    assert {
        ("activations", "topk(0.1)"),
        ("activations", "q(8, step=0.2, codebook=4096)"),
        ("gradients", "q(8, step=0.2)"),
    } <= measured
    assert all(cost["encode"] > 0 and cost["decode"] > 0 for cost in found["workload"]["codec_seconds"])


def test_a_codec_costs_its_time_on_every_tensor_of_a_frame(monkeypatch):
    """That of the first tensor was taken for the frame of a model that sends two."""
    monkeypatch.setattr(profile, "time_codec", lambda method, one, device: CodecCost(one.numel(), 2 * one.numel()))
    two = uniform("two", num_stages=2, num_microbatches=2, forward=1.0, backward=1.0, shape=(2, 3))
    [[first]] = two.boundaries
    mask = torch.empty(2, 50, dtype=torch.int64, device="meta")
    two = replace(two, boundaries=((first, mask, torch.empty(2, 5, device="meta", requires_grad=True)),))
    cost = CodecCost(6 + 10, 2 * (6 + 10))
    assert profile.codec_costs([codec_pair("q(4)/q(8)")], two.boundaries) == {
        ("activations", "q(4)"): cost,
        ("gradients", "q(8)"): cost,
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: RECIPE"),
        (
            [*GIVEN, "--bandwidth", "fast"],
            "--bandwidth: a bandwidth must be like 500kbit, 100mbit, 1gbit, or none, got 'fast'",
        ),
        ([*GIVEN, "--bandwidth", "0mbit"], "--bandwidth: must be above 0, got '0mbit'"),
        ([*GIVEN, "--latency", "20"], "--latency: a latency must be like 500us, 20ms or 1s, got '20'"),
        ([*GIVEN, "--codec", "p(4)"], "unknown codec 'p'"),
        ([*GIVEN, "--codec", "none/reuse"], "reuse needs topk or randk on the activations of the same boundary"),
        ([*GIVEN, "--pipeline.num_stages", "1"], "a prediction needs links"),
        ([*GIVEN, "--pipeline.num_microbatches", "2", "--schedule", "1f1b"], "must be at least num_stages"),
        ([*GIVEN, "--schedule", "gpip"], "--schedule must be one of gpipe, 1f1b, "),
        ([*GIVEN, "--schedule", "gpip"], "got gpip (did you mean gpipe?)\n"),
        ([*GIVEN, "--forward-ms", "0"], "must be a number above 0, got '0'"),
        (["quickstart", "--forward-ms", "45"], "give --forward-ms and --backward-ms together"),
    ],
)
def test_mistakes_are_told_in_a_sentence(arguments, said, capsys):
    assert main(["predict", *arguments]) == 2
    assert said in capsys.readouterr().err
