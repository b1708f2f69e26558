import errno
import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from support.own_code import add_module
from support.run_files import digest, weights_of
from support.tiny_run import STEPS_PER_EPOCH, alone, prepared, ran, write_recipe
from thinwire.errors import ThinwireWarning
from thinwire.launch import cli
from thinwire.launch.comparison.runs import read, training_bytes
from thinwire.launch.plan.places import simulated_placement
from thinwire.launch.processes.worker import Worker
from thinwire.launch.results.summary import carried, channel_rows
from thinwire.launch.run import run as run_module
from thinwire.launch.run.parts import equality_check, results
from thinwire.launch.run.parts.results import Results
from thinwire.launch.run.run import Run
from thinwire.launch.shared.exit_codes import StoppedError
from thinwire.models.data.texts import TextBlocks
from thinwire.models.digest import tensor_lines, weights_digest
from thinwire.models.tasks import IGNORE
from thinwire.pipeline.errors import NonFiniteError, PipelineError
from thinwire.pipeline.measuring.meters import SECTIONS
from thinwire.pipeline.options import CompressionOptions
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.saving.checkpoint import WeightsCheckpoint

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    return tmp_path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("spoiled", [2, 3])
def test_weights_that_a_finite_step_has_spoiled_are_not_saved(spoiled, here, monkeypatch):
    after_step = Run._after_step

    def spoil(run, record):
        if record.step + 1 == spoiled:
            run.checkpoints.saver.wait()
            next(run.assembly.trainer.stages[1].submod.parameters()).data.view(-1)[3] = torch.inf
        after_step(run, record)

    monkeypatch.setattr(Run, "_after_step", spoil)
    words = ["--training.steps", "3", "--checkpoint.every", "1 step", "--output", "run"]
    with pytest.raises(NonFiniteError, match=rf"step {spoiled} left NaN or infinity in \S+ of stage 1, and is not "):
        ran(*words)
    newest = max((here / "run" / "checkpoints").glob("*/manifest.json"))
    assert newest.parent.name == f"step-{spoiled - 1:08d}"
    assert not list((here / "run" / "weights").rglob("*.safetensors"))


def test_a_step_that_trains_on_nothing_is_told(here, monkeypatch):
    """A kind of data of one's own whose questions filled all samples had a loss of 0, and ended as if well."""
    monkeypatch.setattr(TextBlocks, "targets", lambda samples, ids: torch.full((len(ids), 16), IGNORE))
    with pytest.warns(ThinwireWarning, match="a step has no target that counts, so it trains nothing"):
        ran("--data.held_out", "0")


def test_the_summary_is_about_the_weights_and_bytes_of_the_run(here):
    folder = ran("--output", "run").recipe.folder
    summary = json.loads((folder / "summary.json").read_text())
    weights = {}
    for stage in range(2):
        weights |= weights_of(folder, stage)
    assert summary["weights_digest"] == weights_digest(tensor_lines(weights))
    assert [row["frames"] for row in summary["channels"]] == [4, 4], "2 steps of 2 micro-batches"
    # 2 x 16 rows of 16: bits, a bf16 scale for each row, 64 bytes of header
    assert [row["bytes"] for row in summary["channels"]] == [4 * (256 + 64 + 64), 4 * (512 + 64 + 64)]
    trained = sum(row["bytes"] for row in summary["channels"])
    evaluated = [summary["traffic"][phase]["bytes"] for phase in ("eval-on", "eval-off")]
    assert 0 < evaluated[0] < evaluated[1]
    assert (summary["traffic"]["train"]["bytes"], summary["bytes_sent"]) == (trained, trained + sum(evaluated))
    assert sum(stage["parameters"] for stage in summary["stages"]) > 0
    assert summary["train_loss"] == lines(folder / "metrics.jsonl")[-1]["loss"]


def test_the_closing_tables_and_a_report_have_what_stages_sent_of_a_tied_head(here, capsys):
    """They left it out, and said that a run had sent fewer bytes than it had."""
    ran("--model.tied", "sum", "--compression.shared", "ef(q(4))")
    assert "gradients of weights that several stages hold, as sent, ef(q(4))" in capsys.readouterr().out
    [run] = read([Path("runs/tiny")])
    assert training_bytes(run.sent) == sum(step["bytes"] for step in run.steps)
    assert run.codecs == "q(4)/q(8), shared ef(q(4))"


def test_seconds_of_training_are_those_of_its_steps(here):
    """They once held every evaluation: 112.8 samples a second were reported where steps made 173.1."""
    folder = ran("--output", "run", "--training.evaluate_every", "1 steps", "--save_every", "1").recipe.folder
    summary, steps = json.loads((folder / "summary.json").read_text()), lines(folder / "metrics.jsonl")
    assert summary["training_seconds"] == pytest.approx(sum(step["seconds"] for step in steps))
    for section in SECTIONS:
        spent = sum(stage["seconds"][section] for stage in summary["stages"])
        assert spent == pytest.approx(sum(step["sections"][section] for step in steps), abs=1e-3), section
    apart = [summary[f"{purpose}_seconds"] for purpose in ("training", "evaluation", "saving")]
    assert min(apart) > 0
    assert sum(apart) <= summary["seconds"]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ([], [3]),
        (["--training.evaluate_every", "1 steps"], [1, 2, 3]),
        (["--training.evaluate_every", "2 steps"], [2, 3]),
        (["--data.held_out", "0"], []),
    ],
)
def test_evaluations_follow_the_steps_of_the_recipe_and_the_last_step_once(options, steps):
    folder = ran("--output", "run", "--training.steps", "3", *options).recipe.folder
    assert [line["step"] for line in lines(folder / "evaluations.jsonl")] == steps


@pytest.mark.parametrize("every", ["2 steps", "3 steps"])
def test_a_run_that_has_ended_and_is_started_again_changes_nothing(here, every):
    """It evaluated once more, and wrote its last checkpoint again without the rows that had not changed since."""
    options = ("--output", "run", "--training.steps", "4", "--checkpoint.every", every, "--checkpoint.keep", "1")
    codecs = ("--compression.activations", "aqsgd(q(2))", "--compression.gradients", "ef(q(2))")

    def outcome():
        run = ran(*options, *codecs)
        summary = json.loads((here / "run" / "summary.json").read_text())
        parts = {path: path.read_bytes() for path in (here / "run/checkpoints").rglob("*") if path.is_file()}
        return run.resumption.first, [lines(run.recipe.folder / "evaluations.jsonl"), summary["held_out"], parts]

    began, whole = outcome()
    assert began == 0
    assert outcome() == (4, whole)
    assert outcome() == (4, whole)


def stopped_after(step, *options):
    """A run in the folder `run` that ends in an error behind a step, as if it were killed."""
    with alone():
        ready = prepared("--output", "run", *options)
        run = Run(ready, simulated_placement(ready.recipe))
        after_step = run._after_step

        def killed(record):
            after_step(record)
            if record.step + 1 == step:
                raise KeyboardInterrupt

        run._after_step = killed
        with pytest.raises(KeyboardInterrupt):
            run.go()


@pytest.mark.parametrize("asked", ["before it is built", "before its first step is done", "later"])
def test_a_process_that_is_asked_to_stop_before_its_first_step_is_done_takes_no_part_in_a_checkpoint(here, asked):
    """It said that it saves while it was ending: the others waited for its part until `wire.timeout`."""

    class Leaving:
        """A lock that fails where it would wait."""

        def __init__(self):
            self.held = False

        def acquire(self):
            if self.held:
                raise KeyboardInterrupt
            self.held = True

        def release(self):
            self.held = False

        __enter__ = acquire

        def __exit__(self, *_):
            self.release()

    leaving = Leaving()

    def saves_and_stops(run):
        return Worker.saves_and_stops(SimpleNamespace(run=run, leaving=leaving))

    with alone():
        ready = prepared("--output", "run", "--training.steps", "3", "--checkpoint.every", "2 steps")
        if asked == "before it is built":
            assert not saves_and_stops(None)
        run = Run(ready, simulated_placement(ready.recipe), leaving=leaving)
        if asked == "before its first step is done":
            assert not saves_and_stops(run)
        if asked == "later":
            logged = run.log.after_step

            def log(done, record):
                logged(done, record)
                assert saves_and_stops(run)

            run.log.after_step = log  # the first step is done, so the step under way is the second
        with pytest.raises(StoppedError if asked == "later" else KeyboardInterrupt):
            run.go()
    steps = [int(path.name.removeprefix("step-")) for path in (here / "run" / "checkpoints").glob("step-*")]
    assert steps == ([2] if asked == "later" else [])


def test_what_a_stopped_run_saved_can_be_exported_evaluated_reported_and_started_from(here, capsys):
    stopped_after(3, "--training.steps", "9", "--save_every", "2", "--training.evaluate_every", "1 steps")
    summary = json.loads((here / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["planned_steps"], summary["running"]) == (2, 9, True)
    assert len(lines(here / "run" / "metrics.jsonl")) == 3
    assert cli.main(["export", "run", "--to", "exported"]) == 0
    assert weights_digest(tensor_lines(load_file("exported/model.safetensors"))) == summary["weights_digest"]
    capsys.readouterr()
    assert cli.main(["eval", "run", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["tables"][0]["rows"]
    assert [row[:2] for row in rows] == [[mode, score["loss"]] for mode, score in summary["held_out"].items()]
    assert cli.main(["report", "run"]) == 0
    assert "2 of 9, not finished," in Path("report.html").read_text()
    folder = ran("--output", "next", "--model.weights", "run", "--training.steps", "0").recipe.folder
    assert json.loads((folder / "summary.json").read_text())["weights_digest"] == summary["weights_digest"]


def test_the_end_of_a_run_counts_its_seconds(monkeypatch):
    """Evaluation, weights and picture took seconds in silence, after the last step."""
    said, end = [], Results.end

    @contextmanager
    def counting(shown):
        said.append(f"counts {shown}")
        yield
        said.append("counts no more")

    def ended(self, done):
        said.append("ends")
        end(self, done)

    monkeypatch.setattr(run_module, "counting", counting)
    monkeypatch.setattr(Results, "end", ended)
    ran()
    assert said == ["counts True", "ends", "counts no more"]


def test_weights_are_saved_as_often_as_the_recipe_says(monkeypatch):
    saved, write = [], WeightsCheckpoint.write

    def noted(saving, stage, *state):
        saved.append((stage, saving._step))
        return write(saving, stage, *state)

    monkeypatch.setattr(WeightsCheckpoint, "write", noted)
    ran("--output", "run", "--training.steps", "3", "--save_every", "2")
    assert saved == [(0, 2), (1, 2), (0, 3), (1, 3)], "stage, step"
    saved.clear()
    ran("--output", "even", "--training.steps", "4", "--save_every", "2")
    assert saved == [(0, 2), (1, 2), (0, 4), (1, 4)], "a kill during a second save of step 4 would have lost the first"


@pytest.mark.parametrize("replicas", ["1", "2"])
def test_stores_on_disk_are_gone_after_the_run(here, capsys, replicas):
    ran("--output", "run", "--replicas.count", replicas, "--compression.activations", 'aqsgd(q(4), store="disk")')
    assert "stores of codecs will take" in capsys.readouterr().out
    assert not (here / "run" / "stores").exists()


def test_a_run_says_what_it_waits_for(here):
    with alone():
        ready = prepared("--output", "run")
        run = Run(ready, simulated_placement(ready.recipe))
        assert run.doing == "between two sections of its work"
        run.go()


def test_a_run_says_when_all_of_it_is_a_warm_up(capsys):
    ran("--output", "run", "--compression.warmup", "1 epoch")
    told = "nothing is compressed in training: compression.warmup of 1 epoch is as long as all 2 steps"
    assert told in capsys.readouterr().out
    assert CompressionOptions(warmup="1 step").note_on_warmup(2, 5) is None


def test_buffers_of_both_ends_are_compared_after_epochs_and_at_the_end(monkeypatch):
    compared = []
    options = ["--debug.check_buffers", "true", "--training.steps", str(STEPS_PER_EPOCH + 1)]
    with alone():
        ready = prepared("--output", "run", "--compression.activations", "aqsgd(q(4))", *options)
        run = Run(ready, simulated_placement(ready.recipe))
        monkeypatch.setattr(collectives, "compare", lambda where, digests: compared.append(digests))
        monkeypatch.setattr(equality_check, "compare_replicas", lambda trainer: compared.append("replicas"))
        run.go()
    assert compared[1::2] == ["replicas"] * 2
    assert [sorted(digests) for digests in compared[::2]] == [[0, 1]] * 2


def test_rows_of_channels_leave_evaluations_out_and_fill_silent_channels():
    traffic = {"frames": 2, "bytes": 100, "uncompressed": 400, "elements": 100, "rows": 4, "full_rows": 1}
    stages = [{"traffic": [((0, "activations", "train"), traffic), ((0, "activations", "eval-on"), traffic)]}]
    rows = channel_rows(carried(stage["traffic"] for stage in stages), 1, lambda boundary, channel: f"{channel} codec")
    assert [(row["channel"], row["codec"], row["frames"]) for row in rows] == [
        ("activations", "activations codec", 2),
        ("gradients", "gradients codec", 0),
    ]
    assert rows[0]["full_share"] == 0.25
    assert rows[0]["bits_per_element"] == 8 * 100 / 100


def test_a_disk_that_is_full_after_the_weights_costs_the_picture_alone(here, monkeypatch, capsys):
    """A run whose weights and numbers were saved ended as one that had failed."""

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(results, "save_picture", full)
    folder = ran("--output", "run").recipe.folder
    assert "the picture is left out: run must have room" in " ".join(capsys.readouterr().out.split())
    assert json.loads((folder / "summary.json").read_text())["running"] is False


OTHER_ROWS = """
from torch import nn, tanh


class Turn(nn.Module):
    def forward(self, x):
        return x.transpose(0, 1).contiguous()


class Count(nn.Module):
    def forward(self, x):
        return x.mean(), x


class Drop(nn.Module):
    def forward(self, mean, x):
        return tanh(x - mean)


def turned():
    return [nn.Embedding(259, 4), Turn(), nn.Linear(4, 4), nn.Tanh(), Turn(), nn.Linear(4, 259)]


def counted():
    return [nn.Embedding(259, 4), Count(), Drop(), nn.Linear(4, 4), Count(), Drop(), nn.Linear(4, 259)]
"""


@pytest.mark.parametrize(("name", "layers"), [("turned", "[2, 2, 2]"), ("counted", "[2, 3, 2]")])
def test_what_crosses_may_begin_with_tokens_or_a_number(here, monkeypatch, name, layers):
    """Even with none, sample_ids had to name as many samples as there were tokens."""
    add_module(monkeypatch, "other_rows", OTHER_ROWS)
    given = ["--model.name", f"other_rows:{name}", "--model.config", "{}", "--pipeline.microbatch_size", "2"]
    cut = [*given, "--pipeline.num_stages", "3", "--pipeline.layers", layers]
    ran(*given, "--pipeline.num_stages", "1", "--output", "whole")
    ran(*cut, "--codec", "none", "--output", "cut")
    assert digest(Path("cut")) == digest(Path("whole"))
    ran(*cut, "--codec", "q(4)", "--output", "coded")
    assert digest(Path("coded")) != digest(Path("cut"))
    with pytest.raises(PipelineError, match="so the first dimension of what crosses boundary 0 must be the 2 samples"):
        ran(*cut, "--codec", "ef(q(4))", "--output", "fed")
