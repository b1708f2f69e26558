"""A smoke run: short, in a folder of its own, and of every part."""

import json
from dataclasses import replace

import pytest

from support.data_files import write_tokenizer
from support.recipe_runs import TINY
from thinwire.errors.files import MARK
from thinwire.launch import cli
from thinwire.launch.plan.prepare import prepare
from thinwire.launch.recipe.recipe import SMOKE_STEPS, dump, parse

pytestmark = pytest.mark.usefixtures("folder")


def test_it_is_three_steps_of_the_same_model_cut_and_codecs():
    long, short = parse(["quickstart"]), parse(["quickstart", "--smoke"])
    assert (short.training.steps, short.name, str(short.folder)) == (3, "quickstart-smoke", "runs/quickstart-smoke")
    assert (short.model, short.pipeline, short.optimizer) == (long.model, long.pipeline, long.optimizer)
    assert (short.compression.activations, short.compression.gradients) == (
        "q(8, step=0.2, codebook=4096)",
        "q(8, step=0.2)",
    )
    assert short.data == replace(long.data, limit=short.data.limit)
    assert short.data.limit < 30_000


def test_the_recipe_that_it_leaves_is_the_same_smoke_run(folder):
    short = parse(["tiny.yaml", "--smoke", "--output", "out/", "--compression.warmup", "3 epochs"])
    assert (short.output, short.compression.warmup) == ("out-smoke", "1 step")
    (folder / "again.yaml").write_text(dump(short))
    assert parse(["again.yaml"]) == short


def test_checkpoints_of_the_recipe_stay_out_of_it():
    """A smoke run starts anew, which removes the checkpoints in its folder."""
    short = parse(["tiny.yaml", "--smoke", "--checkpoint.folder", "kept", "--checkpoint.every", "1 epoch"])
    assert (short.checkpoint.folder, short.checkpoint.every) == ("", f"{SMOKE_STEPS} steps")


@pytest.mark.parametrize("held_out", ["0", "0.1", "0.9"])
def test_little_data_is_enough_for_every_batch_and_an_evaluation(held_out):
    short = parse(["tiny.yaml", "--smoke", "--data.name", "pydoc", "--data.held_out", held_out])
    data = prepare(short).data
    assert SMOKE_STEPS * short.pipeline.batch_size <= len(data.training) < 100 * short.pipeline.batch_size
    assert (data.held_out is None) == (held_out == "0")


@pytest.mark.slow
def test_every_part_leaves_what_it_makes(folder, capsys):
    assert cli.main(["simulate", "tiny.yaml", "--smoke"]) == 0
    run = folder / "runs/tiny-smoke-simulated"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["smoke"], summary["steps"], summary["running"]) == (True, 3, False)
    assert {"on", "off"} == set(summary["held_out"])
    assert list(run.glob("weights/step-00000003/stage-*")) and list(run.glob("checkpoints/step-00000003/manifest.json"))
    assert (run / "loss.png").exists()
    said = capsys.readouterr().out
    assert "a smoke run: every part has worked" in said
    assert cli.main(["report", str(run)]) == 0
    assert cli.main(["simulate", "tiny.yaml", "--smoke", "--codec", "none"]) == 0, "it replaces the smoke run before"


@pytest.mark.slow
def test_a_tokenizer_with_several_chat_templates_is_exported(folder, capsys):
    """It trained, and could never be exported: `Is a directory; free some space`. A smoke run did not show it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(write_tokenizer(folder / "words"))
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(folder / "words")
    assert (folder / "words/additional_chat_templates").is_dir()
    (folder / "text.txt").write_text("a b c d " * 2000)
    options = ["--data.name", "text.txt", "--data.tokenizer", "words", "--output", "run"]
    assert cli.main(["simulate", "tiny.yaml", *options, "--smoke"]) == 0
    assert "its model was exported and loaded again" in capsys.readouterr().out
    assert not list((folder / "run-smoke").glob("thinwire-*"))
    assert cli.main(["export", "run-smoke", "--to", "exported"]) == 0
    exported = AutoTokenizer.from_pretrained(folder / "exported")
    assert exported.chat_template == tokenizer.chat_template
    assert MARK not in [path.name for path in (folder / "exported").iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TINY, "quickstart", "convergence"])
def test_a_packaged_recipe_that_downloads_nothing_has_one(name):
    if name in ("resnet-tiny", "split-tiny", "vit-tiny"):
        pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    short = parse([name, "--smoke"])
    assert short.smoke == short
    found = prepare(short).recipe
    assert replace(found, model=short.model) == short, "there is data enough"
