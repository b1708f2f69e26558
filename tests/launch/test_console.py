"""What a run says before it trains, and its closing table, on terminals of several widths."""

import re
from dataclasses import replace

import pytest

from thinwire.launch.results.console import ProgressLine, show_stores, show_summary
from thinwire.pipeline.evaluation import Score
from thinwire.pipeline.measuring.meters import SECTIONS
from thinwire.pipeline.training.trainer import StepRecord

LONG = ('aqsgd(q(4), store="disk")', 'ef21(q(2, scale="minmax", per="tensor", round="stochastic"), slot="sample")')


def summary(*codecs):
    """A run of hours whose channels, from the first boundary on, used these codecs."""
    scores = {mode: {"loss": 1.5, "accuracy": 0.5, "num_targets": 30} for mode in ("on", "off")}
    channels = [
        {
            "boundary": index // 2,
            "channel": ("activations", "gradients")[index % 2],
            "codec": codec,
            "bytes": 1_234_000_000,
            "uncompressed": 9_876_000_000,
            "bits_per_element": 32.125,
            "full_share": 1.0,
        }
        for index, codec in enumerate(codecs)
    ]
    stage = {
        "seconds": dict.fromkeys(SECTIONS, 2000.0),
        "peak_memory": 12_345_000_000,
        "peak_on_gpu": None,
        "device": "cpu",
    }
    return {
        "name": "long",
        "smoke": False,
        "running": False,
        "steps": 100_000,
        "metered_from": 0,
        "seconds": 12_000.0,
        "training_seconds": 10_000.0,
        "evaluation_seconds": 1234.0,
        "saving_seconds": 5.25,
        "traffic": {phase: {"bytes": 111_000_000} for phase in ("train", "eval-on", "eval-off")},
        "held_out": scores,
        "channels": channels,
        "replicas": [],
        "samples": [6_400],
        "timed": "all",
        "stages": [{"stage": index, **stage} for index in range(2)],
        "weights_digest": "0123456789abcdef",
        "folder": "runs/long",
    }


def shown(capsys, monkeypatch, columns, *codecs):
    monkeypatch.setenv("COLUMNS", str(columns))
    show_summary(summary(*codecs))
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("codecs", [LONG, ("q(4)", "q(8)"), ("topk(0.3)", "reuse"), (*LONG, *LONG)])
def test_nothing_is_cut_or_folded_on_80_columns(capsys, monkeypatch, codecs):
    lines = shown(capsys, monkeypatch, 80, *codecs)
    assert all(sum(codec in line for line in lines) >= 1 for codec in codecs), lines
    assert [line for line in lines if "…" in line] == []
    rows = [line.split() for line in lines if "->" in line]
    assert len(rows) == len(codecs)
    assert all(row[-5:] == ["1,234", "9,876", "8", "32.12", "100"] for row in rows), rows
    assert max(len(line) for line in lines if LONG[1] not in line) <= 80


def test_the_exchange_of_replicas_has_its_seconds(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    sent = {"codec": "ef(q(4))", "bytes": 1_234_000_000, "uncompressed": 9_876_000_000, "bits_per_element": 4.03}
    found = summary("q(4)", "q(8)") | {"timed": "replica 0", "samples": [4000, 4000]}
    found["replicas"] = [
        {"stage": stage, "channel": channel, **sent} for stage in (0, 1) for channel in ("parts", "sums")
    ]
    spent = dict.fromkeys(SECTIONS, 0.0) | {"encode": 100.0, "decode": 50.0, "neighbour": 25.0, "wire": 300.0}
    for stage in found["stages"]:
        stage["exchange"] = spent | {"other": 25.0}
    show_summary(found)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "exchange between replicas of replica 0" in " ".join(lines)
    assert "each of 2 replicas took 4000 samples" in lines
    rows = [" ".join(line.split()) for line in lines]
    assert "0 500 s 150 s 30% 25.0 s 5% 300 s 60% 25.0 s 5%" in rows
    assert "1 500 s 150 s 30% 25.0 s 5% 300 s 60% 25.0 s 5%" in rows


def test_replicas_that_took_no_step_have_exchanged_for_no_second(capsys):
    """`--training.steps 0` ended in a traceback after everything was saved."""
    found = summary("q(4)", "q(8)") | {"steps": 0}
    found["replicas"] = [
        {"stage": 0, "channel": "parts", "codec": "none", "bytes": 0, "uncompressed": 0, "bits_per_element": 0.0}
    ]
    for stage in found["stages"]:
        stage["exchange"] = {}
    show_summary(found)
    out = capsys.readouterr().out
    assert "1 0.0 s 0.0 s 0% 0.0 s 0% 0.0 s 0% 0.0 s 0%" in [" ".join(line.split()) for line in out.splitlines()]


def test_a_run_without_held_out_data_says_its_steps_in_one_line(capsys):
    """The title of a table without columns was folded after each third letter."""
    show_summary(summary("q(4)", "q(8)") | {"held_out": {}})
    assert capsys.readouterr().out.startswith("long: 100,000 steps in 2 h 46 min\nevaluations: ")


def test_evaluations_and_saves_are_apart_from_the_steps(capsys, monkeypatch):
    said = [line.strip() for line in shown(capsys, monkeypatch, 80, "q(4)", "q(8)")]
    assert "long: 100,000 steps in 2 h 46 min" in said
    assert "evaluations: 20 min 34 s and 222 MB; saves: 5.2 s; the whole run: 3 h 20 min" in said


def test_a_step_says_what_it_waited_for(capsys):
    sections = {**dict.fromkeys(SECTIONS, 0.0), "neighbour": 3.0, "wire": 1.0}
    record = StepRecord(
        step=0, epoch=0, loss=1.0, lr=0.1, grad_norm=None, seconds=10.0, samples=4, sections=sections, bytes=1,
        uncompressed=8,
    )  # fmt: skip
    with ProgressLine(1) as line:
        line.step(record)
    assert "30% waiting for stages, 10% for the wire" in " ".join(capsys.readouterr().out.split())


def test_long_codecs_are_named_once_below_the_table(capsys, monkeypatch):
    lines = shown(capsys, monkeypatch, 80, LONG[0], "q(8)", LONG[0], LONG[1])
    assert [line.split()[4] for line in lines if "->" in line] == ["(1)", "(2)", "(1)", "(3)"]
    assert [line for line in lines if line.startswith(" (")] == [f" (1) {LONG[0]}", " (2) q(8)", f" (3) {LONG[1]}"]


def test_a_wide_terminal_has_them_in_the_table(capsys, monkeypatch):
    lines = shown(capsys, monkeypatch, 160, *LONG)
    assert all(codec in line for codec, line in zip(LONG, (line for line in lines if "->" in line), strict=True))
    assert not any(line.startswith(" (") for line in lines)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "0.000999"), (1500, "0.0015"), (640_000, "0.64"), (1_234_000_000, "1,234")],
)
def test_no_bytes_are_shown_as_none(capsys, monkeypatch, count, text):
    """Small runs sent 0 MB of 0 MB."""
    given = summary("q(4)")
    given["channels"][0] |= {"bytes": count, "uncompressed": count}
    monkeypatch.setenv("COLUMNS", "80")
    show_summary(given)
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "->" in line]
    assert " ".join(row.split()).startswith(f"0 -> 1 activations q(4) {text} {text} ")


def test_what_stores_will_take_is_said_in_bytes(capsys, monkeypatch):
    """A store of less than half a megabyte once took 0 MB."""
    monkeypatch.setenv("COLUMNS", "80")
    show_stores({(0, 3): {"memory": 384_000, "disk": 0}, (1,): {"memory": 0}, (2,): {"memory": 12, "disk": 1234567890}})
    assert capsys.readouterr().out.splitlines() == [
        "stages 0 and 3: stores of codecs will take 384 kB (384000 bytes) in memory",
        "stage 2: stores of codecs will take 0.012 kB (12 bytes) in memory and 1.23 GB (1234567890 bytes) on disk",
    ]


def record(step):
    """A step of a run over a slow link."""
    return StepRecord(
        step=step,
        epoch=0,
        loss=5.1234,
        lr=0.1,
        grad_norm=None,
        seconds=2.0,
        samples=16,
        sections=dict.fromkeys(SECTIONS, 0.4),
        bytes=100,
        uncompressed=800,
    )


def test_without_a_terminal_there_is_a_line_every_30_seconds(capsys):
    """A run of long steps said nothing for a tenth of its time, which may be hours."""
    seconds = iter(range(0, 10_000, 7))
    line = ProgressLine(1000, clock=lambda: next(seconds))
    for step in range(10):
        line.step(record(step))
    lines = capsys.readouterr().out.splitlines()
    assert [said.split()[1] for said in lines] == ["1/1000", "6/1000"]
    assert lines[1].startswith("step 6/1000  loss 5.123  lr 1.0e-01  8.0 samples/s  8.0x fewer bytes")
    assert lines[1].endswith("  1 h 55 min left"), "6 steps took 42 s, 994 are to come"


@pytest.mark.parametrize(
    ("seconds", "tokens", "said"),
    [
        (2.0, 0, "8.0 samples/s"),
        (2.0, 128, "1,024 tokens/s"),
        (400.0, 0, "6 min 40 s a step"),
        (400.0, 128, "6 min 40 s a step  5 tokens/s"),
    ],
)
def test_the_speed_is_a_number_one_can_read(capsys, seconds, tokens, said):
    """A large model trained 0.0 samples/s."""
    ProgressLine(1, tokens=tokens).step(replace(record(0), seconds=seconds))
    assert f"loss 5.123  lr 1.0e-01  {said}  8.0x fewer bytes" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [80, 200])
def test_the_step_and_the_time_left_stay_in_sight(monkeypatch, capsys, columns):
    """At 80 columns the words pushed the time left out."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with ProgressLine(123_456) as line:
        for step in (7000, 7001):
            line.step(record(step))
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out).strip().splitlines()[-1].split("\r")[-1]
    assert "7002/123456" in last and re.search(r"\d+ (s|min|h|days) left", last), last
    assert "loss 5.123" in last and len(last) <= columns


def test_scores_are_shown_while_training(capsys):
    scores = {mode: Score(1.5, 30, {"accuracy": 0.25}) for mode in ("on", "off")}
    ProgressLine(10).evaluation(4, scores)
    said = "held out after step 4, compression on loss 1.5000, accuracy 0.2500; off loss 1.5000, accuracy 0.2500\n"
    assert capsys.readouterr().out == said


def test_the_peak_on_a_gpu_has_a_column_where_there_is_a_gpu(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    found = summary("q(4)", "q(8)")
    show_summary(found)
    assert "on GPU" not in capsys.readouterr().out
    found["stages"][1] |= {"peak_on_gpu": 7_890_000_000, "device": "cuda:0 (NVIDIA H200)"}
    show_summary(found)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {line[0]: line for line in lines if line[:1] in (["0"], ["1"]) and "->" not in line}
    assert rows["1"][-2:] == ["12,345", "7,890"]
    assert rows["0"][-2:] == ["12,345", "-"]
