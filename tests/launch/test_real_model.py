"""A pretrained language model of 135 M parameters, as people have it: a few of its values are thousands of times the
median, which no model has that is trained in a test."""

import sys

import pytest

from support import real_model
from support.commands import THINWIRE
from support.run_files import summary
from support.scripts import said
from support.tiny_run import alone
from thinwire.launch.plan.places import simulated_placement
from thinwire.launch.plan.prepare import prepare
from thinwire.launch.recipe import recipe
from thinwire.launch.run.assembly import assemble
from thinwire.models.data.sampler import evaluation_batches
from thinwire.pipeline.evaluation import look
from thinwire.pipeline.options.compression import MILD, BoundaryOptions, CompressionOptions

pytestmark = [pytest.mark.slow, pytest.mark.real_model]

FEW = ["--data.limit", "1400", "--data.block_size", "32"]
ANSWER = """
from transformers import pipeline

answer = pipeline("text-generation", model="tuned")
print(answer("The capital of France is", max_new_tokens=8, do_sample=False)[0]["generated_text"])
"""
"""As in docs/start/fine-tune.md."""


@pytest.fixture(scope="module", autouse=True)
def smollm2():
    return real_model.folder()


@pytest.fixture(scope="module")
def looks():
    """What a look at the untrained model says of the codecs of activations, at all boundaries or at single ones."""
    with alone():
        prepared = prepare(recipe.parse(["smollm2-tiny", *FEW, "--codec", "none"]))
        trainer = assemble(prepared, simulated_placement(prepared.recipe), rank=0).trainer
        held_out = prepared.data.held_out

        def look_with(everywhere, **boundaries):
            single = {int(name[1:]): BoundaryOptions(activations=codec) for name, codec in boundaries.items()}
            trainer.stages[0].wire.switch(CompressionOptions(activations=everywhere, boundaries=single))
            for stage in trainer.stages:
                stage.reconnect()
            return look(trainer, held_out, lambda: evaluation_batches(len(held_out), 4))

        yield look_with


def test_a_grid_without_zero_breaks_it_and_is_told_before_the_first_step(looks):
    found = looks('q(4, grid="midrise")')
    assert found.scores["on"].loss > found.scores["off"].loss + 3, found
    assert found.advice.startswith("the codecs cost too much: ") and found.advice.endswith(" and ".join(MILD))
    assert "alone" not in found.advice, "each boundary costs too much by itself"


def test_one_boundary_that_is_at_fault_is_named(looks):
    found = looks(MILD[1], _1='q(4, grid="midrise")')
    assert f"; boundary 1 alone is at fault, with {found.alone[1].loss:.4f} by itself" in found.advice


@pytest.mark.parametrize("codec", MILD)
def test_the_codecs_that_are_advised_cost_it_next_to_nothing(looks, codec):
    found = looks(codec)
    assert found.advice is None
    on, off = (found.scores[mode].loss for mode in ("on", "off"))
    assert off != on < 1.01 * off


@pytest.mark.processes
def test_from_nothing_to_an_answering_model(tmp_path):
    short = [*FEW, "--training.steps", "1", "--pipeline.num_stages", "2"]
    train = said([*THINWIRE, "train", "smollm2-tiny", *short], tmp_path)
    assert "one held-out batch before training, compression on loss " in train
    off = summary(tmp_path / "runs" / "smollm2-tiny")["held_out"]["off"]["loss"]
    assert 2 < off < 4.5, "it was trained on much more than this text"
    said([*THINWIRE, "export", "runs/smollm2-tiny", "--to", "tuned"], tmp_path)
    (tmp_path / "answer.py").write_text(ANSWER)
    assert said([sys.executable, "answer.py"], tmp_path).startswith("The capital of France is Paris")
