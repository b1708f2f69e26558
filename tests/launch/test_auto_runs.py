"""Runs in which auto chooses, as a user starts them."""

import pytest

from support.commands import THINWIRE, completed
from support.run_files import summary
from thinwire.launch import cli
from thinwire.launch.report.page import render
from thinwire.launch.report.reading import read
from thinwire.launch.run import recipe
from thinwire.pipeline.frames import CHANNELS

RECIPE = """
model:
  config:
    {vocab_size: 256, n_layer: 2, n_embd: 32, n_head: 2, n_positions: 32, resid_pdrop: 0, embd_pdrop: 0, attn_pdrop: 0}
data: {name: text, block_size: 32, held_out: 0}
pipeline: {num_stages: 2, num_microbatches: 2, microbatch_size: 4}
compression: {activations: auto, gradients: auto, candidates: [none, q(8), q(2)], measure: 2 steps}
training: {steps: 4}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    (tmp_path / "text").write_bytes(b"some words, many times; " * 83)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def chosen_in(folder):
    return {channel["channel"]: channel["codec"] for channel in summary(folder)["channels"]}


@pytest.mark.slow
def test_a_simulation_chooses_the_mildest_says_so_and_keeps_auto_in_the_recipe(folder, capsys):
    assert cli.main(["simulate", "tiny.yaml", "--compression.candidates", '["q(6)", "q(2)"]', "--output", "run"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("auto: ")]
    reason = "q(6), 3,392 bytes a frame: the mildest, because both ends are in one process"
    assert lines == [f"auto: boundary {route}: {reason}" for route in ("0 -> 1 activations", "1 -> 0 gradients")]
    told = summary(folder / "run")
    assert chosen_in(folder / "run") == {"activations": "q(6)", "gradients": "q(6)"}
    assert [(choice["codec"], choice["nbytes"], choice["hides"]) for choice in told["choices"]] == [
        ("q(6)", 3392, True)
    ] * 2
    shown = render(*read([folder / "run"]))
    assert "The codecs that auto chose, and why" in shown and shown.count("<td>q(6)</td>") == 4  # channels, and choices
    in_full = 4 * 32 * 32 * 4 + 64
    assert told["channels"][0]["bytes"] == 2 * 2 * in_full + 2 * 2 * 3392
    assert "activations: auto" in (folder / "run/recipe.yaml").read_text()
    assert cli.main(["export", "run", "--to", "exported"]) == 0
    exported = recipe.parse(["exported/recipe.yaml"]).compression
    assert [str(exported.method(0, channel)) for channel in CHANNELS] == ["q(6)", "q(6)"]
    assert exported.automatic == []


@pytest.mark.slow
def test_a_run_too_short_to_choose_is_noted(folder, capsys):
    assert cli.main(["simulate", "tiny.yaml", "--training.steps", "2", "--output", "short"]) == 0
    note = "auto compresses nothing: compression.measure of 2 steps is as long as all 2 steps"
    assert note in capsys.readouterr().out
    assert chosen_in(folder / "short") == {"activations": "none", "gradients": "none"}
    assert summary(folder / "short")["choices"] == []
    assert "The codecs that auto chose" not in render(*read([folder / "short"]))


@pytest.mark.slow
@pytest.mark.parametrize("saved_after", [1, 3], ids=["before the choice", "after it"])
def test_a_run_with_another_cut_measures_and_chooses_again(folder, capsys, saved_after):
    """Before the choice it ended in a KeyError; after it, a boundary that the old cut has not sent everything."""
    candidates = ["--compression.candidates", '["q(8)"]']
    options = ["--training.steps", str(saved_after), "--checkpoint.every", "1 steps", "--output", "run", *candidates]
    assert cli.main(["simulate", "tiny.yaml", *options]) == 0
    capsys.readouterr()
    more = ["--pipeline.num_stages", "3", "--training.steps", "6", "--checkpoint.resume", "always"]
    assert cli.main(["simulate", "tiny.yaml", *options, *more]) == 0
    said = capsys.readouterr().out
    note = "auto measures and chooses again, because the cut or the processes have changed"
    assert note in " ".join(said.split())
    assert [line.split(": ")[1] for line in said.splitlines() if line.startswith("auto: ")] == [
        "boundary 0 -> 1 activations",
        "boundary 1 -> 0 gradients",
        "boundary 1 -> 2 activations",
        "boundary 2 -> 1 gradients",
    ]
    told = summary(folder / "run")["channels"]
    assert [row["codec"] for row in told] == ["q(8)"] * 4
    assert all(row["bytes"] > 0 for row in told)


@pytest.mark.processes
def test_a_run_with_the_same_cut_in_other_processes_measures_again(folder, capsys):
    """A process has measured its own stages: the others ended in a KeyError."""
    options = ["--compression.candidates", '["q(8)"]', "--checkpoint.every", "1 steps", "--output", "run"]
    trained = completed([*THINWIRE, "train", "tiny.yaml", *options, "--training.steps", "1"], folder)
    assert trained.status == 0, trained.stderr
    assert cli.main(["simulate", "tiny.yaml", *options, "--training.steps", "5", "--checkpoint.resume", "always"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "auto measures and chooses again, because the cut or the processes have changed" in said
    assert chosen_in(folder / "run") == {"activations": "q(8)", "gradients": "q(8)"}


@pytest.mark.slow
def test_an_evaluation_wants_codecs_by_name(folder, capsys):
    assert cli.main(["eval", "tiny.yaml", "--data.held_out", "0.2"]) == 2
    assert capsys.readouterr().err == (
        "an evaluation needs the names of codecs, because only thinwire train measures links and chooses; got auto for "
        "compression.activations, compression.gradients; name codecs such as q(4)/q(8), or those in a run's "
        "summary.json\n"
    )


@pytest.mark.namespaces
@pytest.mark.usefixtures("can_make_hosts")
def test_a_slow_direction_gets_no_milder_codec_than_a_fast_one(folder):
    where = ["cluster", "run", "--hosts", 2, "--link", "0>1:3mbit", "--"]
    command = completed([*THINWIRE, *where, "thinwire", "train", "tiny.yaml", "--output", "run"], folder)
    assert command.status == 0, command.stderr
    forward, back = summary(folder / "run")["choices"]
    # the slow direction is no faster than its link, the other one is by far; which codecs hide, the machine decides
    assert 8 * forward["goodput"] < 3.5e6 < 2 * 3.5e6 < 8 * back["goodput"]
    mildest_first = ["none", "q(8)", "q(2)"]
    assert mildest_first.index(back["codec"]) <= mildest_first.index(forward["codec"])
    for choice in (forward, back):
        assert choice["hides"] or choice["codec"] == mildest_first[-1]
        assert choice["milder_wire"] is None or choice["milder_wire"] > choice["hidden"]
