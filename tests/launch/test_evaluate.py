import json
import logging
import re
import shutil

import pytest

from support.recipe_runs import simulate
from support.small_disk import mounted
from thinwire.compress import StoreError
from thinwire.launch import cli
from thinwire.launch import evaluate as command
from thinwire.launch.folder.model_files import check_classes
from thinwire.pipeline.errors import OptionsError

RECIPE = """
model: {name: gpt2, config: {vocab_size: 256, n_layer: 2, n_embd: 16, n_head: 2, n_positions: 16}}
data: {name: pydoc, limit: 1000, block_size: 16, held_out: 0.2}
pipeline: {num_stages: 2, num_microbatches: 2, microbatch_size: 2}
compression: {activations: 'aqsgd(q(2), store="disk")'}
training: {steps: 1}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    return tmp_path


@pytest.mark.slow
def test_any_recipe_is_scored_as_it_stands(here, capsys):
    """Where the curves of its run go need not be on this machine."""
    (here / "tiny.yaml").write_text(f"{RECIPE}logging: [not_on_this_machine:send]")
    assert cli.main(["eval", "tiny.yaml"]) == 0
    title, *lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip(" ─")]
    assert title == ["tiny,", "held", "out"]
    assert lines[0] == ["compression", "loss", "perplexity", "targets"]
    assert [line[0] for line in lines[1:]] == ["on", "off"]
    assert {line[3] for line in lines[1:]} == {"192"}
    assert 5 < float(lines[1][1]) < 6


@pytest.mark.slow
def test_what_reading_has_shown_is_said_as_a_run_says_it(here, capsys):
    """Only train said it: a stray weight, another tokenizer, fewer layers than the file has."""
    notes = "a tiny copy of gpt2 computes the same, cut after every block and uncut"
    for given in (["eval", "tiny.yaml"], ["predict", "tiny.yaml"], ["generate", "tiny.yaml", "--prompt", "a"]):
        assert cli.main(given) == 0
        told = capsys.readouterr()
        assert notes in told.err and notes not in told.out, given


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--compression.store_folder", "here"], ["--compression.store_folder", "no"]])
def test_nothing_is_written_not_even_by_stores_on_disk(here, options):
    (here / "here").mkdir()
    before = sorted(here.rglob("*"))
    assert cli.main(["eval", "tiny.yaml", *options]) == 0
    assert sorted(here.rglob("*")) == before


@pytest.mark.slow
def test_a_store_that_fails_is_a_sentence(here, capsys, monkeypatch):
    def full(*arguments):
        raise StoreError("no space left for slot 3")

    monkeypatch.setattr("thinwire.pipeline.evaluation.evaluate", full)
    assert cli.main(["eval", "tiny.yaml"]) == 1
    assert capsys.readouterr() == ("", "no space left for slot 3\n")


@pytest.mark.slow
def test_a_full_disk_of_stores_is_one_sentence(here, capfd):
    """torch's log of the whole schedule stood before it."""
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.NOTSET)
    with mounted(here / "disk", "size=4k"):
        assert cli.main(["eval", "tiny.yaml", "--compression.store_folder", "disk"]) == 1
    assert re.fullmatch("cannot write disk/.*: No space left on device; free some space.*\n", capfd.readouterr().err)


@pytest.mark.slow
def test_samples_that_were_trained_on_are_told(here, capsys):
    """With a smaller limit the last samples of those trained on were held out, without a word."""
    simulate("tiny.yaml", here / "run")
    (here / "other.txt").write_text("some words " * 40)
    said = "data.limit is not as in training, so the model may have been trained on what is held out here; name other"
    asked = [["--data.limit", "500"], ["--data.limit", "1000"], ["--data.evaluation", "other.txt"]]
    for told, options in zip([True, False, False], asked, strict=True):
        capsys.readouterr()
        assert cli.main(["eval", "run", *options]) == 0
        assert (said in capsys.readouterr().err) == told


@pytest.mark.slow
def test_a_run_without_weights_is_told(here, capsys):
    run = simulate("tiny.yaml", here / "unsaved")
    shutil.rmtree(run / "weights")
    capsys.readouterr()
    assert cli.main(["eval", "unsaved"]) == 2
    assert capsys.readouterr().err.startswith("unsaved must be an export, or the folder of a run with saved weights")


RULE = (
    "RUN|RECIPE must be the folder of a run, a checkpoint or an export, a packaged recipe, or the path of a YAML file, "
    "got "
)


@pytest.mark.parametrize(
    ("place", "hint"), [("nothing", ""), ("quickstat", " (did you mean quickstart?)")], ids=["nothing", "nearly"]
)
def test_what_is_neither_a_folder_nor_a_recipe_is_told_what_it_may_be(here, capsys, place, hint):
    assert cli.main(["eval", place]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"{RULE}'{place}'{hint}; thinwire recipes lists the packaged ones\n"


def test_a_folder_that_holds_no_run_is_told_before_the_long_imports(here, capsys, monkeypatch):
    (here / "bare").mkdir()
    monkeypatch.setattr(command, "showing", lambda doing: pytest.fail(doing))
    assert cli.main(["eval", "bare"]) == 2
    assert capsys.readouterr().err.startswith(f"{RULE}'bare'")


@pytest.mark.parametrize(
    ("of_facts", "place"), [("run/model", "run"), ("run/model", "run/weights/step-1"), ("run", "run")]
)
def test_a_model_is_scored_on_the_classes_it_was_trained_on(tmp_path, of_facts, place):
    """A folder with as many classes of other names was scored as if the names were the same, for an export too."""
    for folder in (of_facts, place):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    facts = {"num_labels": 3, "tied": {}, "dtype": "float32", "classes": ["cat", "dog", "fox"]}
    (tmp_path / of_facts / "facts.json").write_text(json.dumps(facts))
    for classes in ((), ("cat", "dog", "fox")):
        check_classes(tmp_path / place, classes)
    with pytest.raises(OptionsError, match="was trained on, cat, dog, fox, got cat, fox, owl; name other data only as"):
        check_classes(tmp_path / place, ("cat", "fox", "owl"))
    check_classes(tmp_path / "elsewhere", ("cat", "fox", "owl"))
