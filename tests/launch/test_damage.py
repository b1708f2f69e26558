"""Damaged checkpoints: the run goes on from the newest that is whole, or says in a sentence what is wrong."""

import os
import random
import shutil

import pytest

from support.damage import damage
from support.tiny_run import alone, prepared, write_recipe
from thinwire.errors import ThinwireError
from thinwire.launch.run.assembly import assemble, simulated_placement
from thinwire.launch.run.resume import Resumption
from thinwire.launch.run.run import Run
from thinwire.launch.run.summary import module_of
from thinwire.models.digest import tensor_lines, weights_digest

DAMAGED = int(os.environ.get("THINWIRE_DAMAGED", "24"))
"""How many checkpoints are damaged; `make damage` asks for more."""
OPTIONS = ["--training.steps", "6", "--checkpoint.every", "2 steps", "--checkpoint.keep", "2", "--output", "run"]
CODECS = ["--compression.activations", 'aqsgd(q(3), store="disk")', "--compression.gradients", "ef21(topk(0.2))"]


def digest(trainer):
    return weights_digest(line for stage in trainer.stages for line in tensor_lines(module_of(stage).full_state()))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the checkpoints of steps 4 and 6 of a run, and the digest of its weights after every step."""
    folder, digests = tmp_path_factory.mktemp("damage"), {}
    with pytest.MonkeyPatch.context() as patch, alone():
        patch.chdir(folder)
        write_recipe(folder)
        ready = prepared(*OPTIONS, *CODECS)
        run = Run(ready, simulated_placement(ready.recipe))
        after_step = run._after_step

        def noted(record):
            after_step(record)
            digests[record.step + 1] = digest(run.trainer)

        patch.setattr(run, "_after_step", noted)
        run.go()
    return folder, ready, digests


def resumed(ready):
    """Where a run begins, and the digest of its weights then."""
    with alone():
        where = simulated_placement(ready.recipe)
        trainer = assemble(ready, where, 0).trainer
        try:
            resumption = Resumption(ready, where, trainer)
            resumption.begin()
            return resumption.first, digest(trainer)
        finally:
            for stage in trainer.stages:
                stage.close()
            trainer.stages[0].wire.discard_stores()


@pytest.mark.slow
def test_damage_is_told_or_the_checkpoint_before_is_taken(trained, tmp_path, monkeypatch):
    original, ready, digests = trained
    monkeypatch.chdir(tmp_path)
    begun = []
    for seed in range(DAMAGED):
        shutil.rmtree("run", ignore_errors=True)
        shutil.copytree(original / "run", "run")
        damage(tmp_path / "run/checkpoints", random.Random(seed))
        try:
            first, found = resumed(ready)
        except ThinwireError as error:
            assert str(error) and "Traceback" not in str(error), seed
            begun.append(None)
            continue
        assert first in (0, 4, 6), seed
        assert first == 0 or found == digests[first], seed
        begun.append(first)
    assert {4, 6} <= set(begun), "some damage was to older files, and some to the newest"
    print({first: begun.count(first) for first in (6, 4, 0, None)}, "began there; None: a sentence")
