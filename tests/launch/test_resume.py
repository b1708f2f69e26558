"""Runs that stop and go on, as a user starts them: they end as the run that never stopped."""

import json
import shutil
from dataclasses import replace

import pytest

from support.data_files import png, random_pixels
from support.recipe_runs import simulate
from support.run_files import losses, numbers, summary
from thinwire.launch import cli
from thinwire.launch.folder.weights import find_checkpoint
from thinwire.launch.run import resume
from thinwire.launch.run.parts import evaluation
from thinwire.launch.run.run import Run
from thinwire.pipeline.saving.checkpoint_folder import Manifest, SavedStage

pytestmark = pytest.mark.slow

CONFIG = {"vocab_size": 256, "n_layer": 3, "n_embd": 16, "n_head": 2, "n_positions": 16}
UNDROPPED = json.dumps(CONFIG | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0))
"""Without dropout, which is drawn by the first layer of a stage."""
TINY = [
    *("gpt2-tiny", "--model.config", json.dumps(CONFIG), "--training.steps", "7"),
    *("--data.block_size", "16", "--data.limit", "1000", "--data.held_out", "0.3"),
    *("--pipeline.num_stages", "3", "--pipeline.layers", "[block 0, block 1]"),
    *("--pipeline.num_microbatches", "2", "--pipeline.microbatch_size", "8"),
]
"""An epoch has two steps, an evaluation two batches."""
OFTEN = ["--training.evaluate_every", "2 steps", "--checkpoint.every", "2 steps"]
CODECS = {
    "plain": ["--codec", "q(4)/q(8)"],
    "quantized-adam": [
        *("--codec", "q(4)/q(8)", "--replicas.count", "2", "--replicas.gradients", "ef(q(4))"),
        *("--optimizer.name", "quantized-adam", "--optimizer.freeze_after", "2 steps"),
    ],
    "codebook": ["--codec", "q(8, step=0.2, codebook=8)/q(8)"],
    "aqsgd on disk": ["--codec", 'aqsgd(q(3), store="disk", store_bits=8)/ef(topk(0.2))'],
}


class Stopped(BaseException):
    """As Ctrl-C, but no signal handler sees it."""


def stopped_behind(done, *words):
    """Simulate; the run ends behind a step, with its checkpoints written."""
    real = Run._after_step

    def after_step(run, record):
        real(run, record)
        if record.step + 1 == done:
            run.checkpoints.saver.wait()
            raise Stopped

    with pytest.MonkeyPatch.context() as patched, pytest.raises(Stopped):
        patched.setattr(Run, "_after_step", after_step)
        cli.main(["simulate", *map(str, words)])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run that stopped behind its fifth step, with checkpoints of steps 2 and 4."""
    stopped = tmp_path_factory.mktemp("made") / "stopped"
    stopped_behind(5, *TINY, *OFTEN, "--output", stopped)
    return stopped


@pytest.fixture
def stopped_run(made, tmp_path):
    """A copy of it."""
    return shutil.copytree(made, tmp_path / "stopped")


def evaluations(run):
    return [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]


def checkpoints(run):
    return sorted(path.name for path in (run / "checkpoints").glob("step-*") if (path / "manifest.json").exists())


SELDOM = [*TINY, "--codec", "q(4)/q(8)", "--training.evaluate_every", "2 steps", "--checkpoint.every", "6 steps"]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A run of `SELDOM` that nothing stopped."""
    return simulate(SELDOM[0], tmp_path_factory.mktemp("made") / "whole", *SELDOM[1:])


@pytest.mark.parametrize("done", [4, 7])
def test_a_run_that_is_stopped_in_an_evaluation_has_it_again_and_ends_as_one_that_was_not(
    whole_run, tmp_path, monkeypatch, done
):
    """A stop waited for the end of the evaluation, longer than schedulers wait before they kill."""
    batches, evaluate = evaluation.evaluation_batches, evaluation.Evaluation.evaluate

    def evaluated(one, after):
        def stopping(*given):
            for index, batch in enumerate(batches(*given)):
                if index == 1:
                    assert one._asked.__self__.save_and_stop()
                assert index < 2, "the evaluation went on"
                yield batch

        monkeypatch.setattr(evaluation, "evaluation_batches", stopping if after == done else batches)
        evaluate(one, after)

    monkeypatch.setattr(evaluation.Evaluation, "evaluate", evaluated)
    assert cli.main(["simulate", *SELDOM, "--output", str(tmp_path / "stopped")]) == 130
    monkeypatch.setattr(evaluation.Evaluation, "evaluate", evaluate)
    monkeypatch.setattr(evaluation, "evaluation_batches", batches)
    assert checkpoints(tmp_path / "stopped")[-1] == f"step-{done:08d}"
    assert [line["step"] for line in evaluations(tmp_path / "stopped")] == list(range(2, done, 2))
    assert cli.main(["simulate", "--resume", str(tmp_path / "stopped")]) == 0
    assert numbers(tmp_path / "stopped") == numbers(whole_run)


@pytest.mark.parametrize("codec", CODECS)
def test_a_run_that_stopped_ends_as_one_that_did_not(tmp_path, codec):
    options = [*TINY, *OFTEN, *CODECS[codec]]
    whole = simulate(*options[:1], tmp_path / "whole", *options[1:])
    stopped_behind(5, *options, "--output", tmp_path / "stopped")
    assert not (tmp_path / "stopped/summary.json").exists()
    assert checkpoints(tmp_path / "stopped") == ["step-00000002", "step-00000004"]
    assert cli.main(["simulate", "--resume", str(tmp_path / "stopped")]) == 0
    assert numbers(tmp_path / "stopped") == numbers(whole)
    assert checkpoints(tmp_path / "stopped") == ["step-00000006", "step-00000007"]


def test_the_same_command_goes_on_by_itself_and_says_so(stopped_run, capsys):
    assert cli.main(["simulate", *TINY, *OFTEN, "--output", str(stopped_run)]) == 0
    assert "goes on from the checkpoint of step 4" in capsys.readouterr().out
    assert len(losses(stopped_run)) == 7


def test_what_may_change_may_and_what_may_not_is_a_list(stopped_run, capsys):
    again = ["simulate", "--resume", str(stopped_run)]
    assert cli.main([*again, "--codec", "q(2)/q(8)", "--training.seed", "3"]) == 2
    told = capsys.readouterr().err
    assert "compression.activations: 'topk(0.3)' there, 'q(2)' here" in told
    assert "training.seed: 0 there, 3 here" in told
    assert cli.main([*again, "--training.steps", "9", "--optimizer.lr", "0.003", "--checkpoint.keep", "1"]) == 0
    assert len(losses(stopped_run)) == 9 and checkpoints(stopped_run) == ["step-00000009"]
    said = capsys.readouterr().out
    assert "from here on, optimizer.lr is 0.003 in place of 0.002 and training.steps is 9 in place of 7" in said


@pytest.mark.parametrize(("more", "newest"), [([], 7), (["--optimizer.lr", "0.1"], 5)])
def test_weights_of_steps_that_come_again_in_another_way_are_not_the_newest(tmp_path, more, newest):
    """A run that was stopped again before its next save was exported as it had been before."""
    options = [*TINY, "--output", str(tmp_path / "run")]
    stopped_behind(7, *options, "--checkpoint.every", "4 steps", "--save_every", "7")
    stopped_behind(5, *options, "--checkpoint.every", "1 steps", *more)
    assert find_checkpoint(tmp_path / "run").manifest.step == newest
    assert (tmp_path / "run/summary.json").exists() == (not more)
    assert cli.main(["simulate", *options, *more]) == 0
    assert [path.name for path in (tmp_path / "run/weights").glob("*-*[0-9]")] == ["step-00000007"]
    assert summary(tmp_path / "run")["steps"] == 7


def test_another_cut_resumes_weights_and_optimizer_and_says_that_feedback_starts_anew(stopped_run, capsys, monkeypatch):
    """A second stop, before the first checkpoint of the new cut, left the run without any checkpoint.

    Parts of a run went on with the state of the first stage, whose process knows no loss.
    """
    taken = []
    monkeypatch.setattr(resume, "SavedStage", lambda *which: taken.append(which[2]) or SavedStage(*which))
    again = ["--resume", str(stopped_run), "--pipeline.num_stages", "2", "--pipeline.layers", "null"]
    stopped_behind(5, *again)
    assert taken == [2]
    assert checkpoints(stopped_run) == ["step-00000002", "step-00000004"]
    assert cli.main(["simulate", *again]) == 0
    assert len(losses(stopped_run)) == 7 and checkpoints(stopped_run) == ["step-00000006", "step-00000007"]
    parts = [part.name for part in stopped_run.glob("checkpoints/step-*/stage-*")]
    assert sorted(parts) == ["stage-0"] * 2 + ["stage-1"] * 2
    said = " ".join(capsys.readouterr().out.split())
    assert "so feedback starts empty" in said
    assert "all but other is counted since step 4, where the cut changed" in said
    seven = summary(stopped_run)
    assert cli.main(["simulate", "--resume", str(stopped_run), "--training.steps", "8"]) == 0
    eight = summary(stopped_run)
    assert seven["metered_from"] == eight["metered_from"] == 4
    assert 4 * seven["channels"][0]["frames"] == 3 * eight["channels"][0]["frames"] > 0


def test_without_compression_another_cut_changes_nothing_but_rounding(tmp_path):
    options = [*TINY, *OFTEN, "--codec", "none", "--model.config", UNDROPPED]
    whole = simulate(*options[:1], tmp_path / "whole", *options[1:])
    stopped_behind(5, *options, "--output", tmp_path / "stopped")
    again = ["--resume", str(tmp_path / "stopped"), "--pipeline.num_stages", "2", "--pipeline.layers", "null"]
    assert cli.main(["simulate", *again]) == 0
    assert losses(tmp_path / "stopped") == pytest.approx(losses(whole), abs=1e-4)
    # they began again at 0, and so did the random numbers that follow from them
    there, here = (SavedStage(run / "checkpoints", 7, 0).values for run in (whole, tmp_path / "stopped"))
    assert there["passes"] == here["passes"]


def test_fewer_steps_than_the_checkpoint_has_done_are_refused(stopped_run, capsys):
    """The weights of step 4 were saved as those of step 3, and in place of what was there."""
    before = sorted(path.relative_to(stopped_run) for path in stopped_run.rglob("*") if path.is_file())
    assert cli.main(["simulate", "--resume", str(stopped_run), "--training.steps", "3"]) == 2
    assert "training.steps must be at least 4, because the checkpoint in" in capsys.readouterr().err
    assert sorted(path.relative_to(stopped_run) for path in stopped_run.rglob("*") if path.is_file()) == before
    assert cli.main(["simulate", "--resume", str(stopped_run), "--training.steps", "4"]) == 0


def test_resume_never_starts_anew(stopped_run):
    assert cli.main(["simulate", *TINY, "--output", str(stopped_run), "--checkpoint.resume", "never"]) == 0
    assert checkpoints(stopped_run) == []


def test_checkpoints_that_are_all_damaged_are_not_replaced_unasked(stopped_run, capsys):
    """The run started anew without a word, and removed what could have been copied back."""
    for manifest in stopped_run.glob("checkpoints/step-*/manifest.json"):
        manifest.write_text(manifest.read_text().replace("topk(0.3)", "topk(0.4)"))
    again = ["simulate", *TINY, *OFTEN, "--output", str(stopped_run)]
    assert cli.main(again) == 2
    assert "has checkpoints, but none that is whole in all stages" in capsys.readouterr().err
    assert checkpoints(stopped_run) == ["step-00000002", "step-00000004"]
    assert cli.main([*again, "--overwrite"]) == 0


def test_checkpoints_of_the_release_before_are_refused_in_a_sentence(stopped_run, capsys):
    """Their manifests have other digests of files, in fields of the same names, and format 2."""
    for path in stopped_run.glob("checkpoints/step-*/manifest.json"):
        path.write_text(replace(Manifest.parse(path.read_text(), "it"), format=2).text())
    assert cli.main(["simulate", "--resume", str(stopped_run)]) == 2
    said = capsys.readouterr().err
    assert said.count("is damaged, or of another release") == 2 and "Traceback" not in said, said
    assert checkpoints(stopped_run) == ["step-00000002", "step-00000004"]


def test_other_samples_for_evaluation_are_another_run(folder, capsys):
    """Scores of both were in one log, and the best weights were the best of both."""
    options = ["tiny.yaml", "--data.evaluation", "./held", "--output", "run", "--checkpoint.every", "1 steps"]
    (folder / "held").write_bytes(bytes(range(32, 112)) * 5)
    assert cli.main(["simulate", *options]) == 0
    (folder / "held").write_bytes(bytes(range(40, 120)) * 5)
    capsys.readouterr()
    assert cli.main(["simulate", *options, "--training.steps", "3"]) == 2
    said = capsys.readouterr().err
    assert "is of another run" in said and "  held-out samples: '" in said


def test_a_run_of_a_class_that_has_another_name_by_now_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for index in range(20):
        place = tmp_path / "pictures" / ("cat", "dog")[index % 2]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{index}.png").write_bytes(png(random_pixels(1, (8, 8, 3))[0]))
    (tmp_path / "pets.yaml").write_text(PETS)
    run = simulate("pets.yaml", tmp_path / "run", "--checkpoint.every", "1 step")
    (tmp_path / "pictures" / "dog").rename(tmp_path / "pictures" / "wolf")
    capsys.readouterr()
    assert cli.main(["simulate", "--resume", str(run), "--training.steps", "2"]) == 0
    said = capsys.readouterr().out
    assert "from here on, classes.1 is 'wolf' in place of 'dog' and training.steps is 2 in place of 1" in said


PETS = """
model: {name: resnet18, config: {stem: cifar, width: 4}}
data: {name: pictures, kind: images, held_out: 0}
pipeline: {num_stages: 2, num_microbatches: 2, microbatch_size: 2}
training: {steps: 1}
"""
