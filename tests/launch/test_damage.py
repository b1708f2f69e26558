"""Damaged checkpoints: the run goes on from the newest that is whole, or says in a sentence what is wrong."""

import os
import random
import shutil
from pathlib import Path

import pytest

from support.damage import damage
from support.tiny_run import alone, prepared, write_recipe
from thinwire.errors import ThinwireError
from thinwire.launch.folder.weights import find_checkpoint
from thinwire.launch.plan.places import simulated_placement
from thinwire.launch.run.assembly import assemble
from thinwire.launch.run.parts.checkpoints import Checkpointing
from thinwire.launch.run.resume import resumption_of
from thinwire.launch.run.run import Run
from thinwire.models.digest import tensor_lines, weights_digest
from thinwire.pipeline.saving.state import module_of

DAMAGED = int(os.environ.get("THINWIRE_DAMAGED", "16"))
"""How many checkpoints are damaged; `make damage` asks for more."""
OPTIONS = ["--training.steps", "8", "--checkpoint.every", "2 steps", "--checkpoint.keep", "3", "--output", "run"]
CODECS = ["--compression.activations", 'aqsgd(q(3), store="disk")', "--compression.gradients", "ef21(topk(0.2))"]


def digest(trainer):
    return weights_digest(line for stage in trainer.stages for line in tensor_lines(module_of(stage).full_state()))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the checkpoints of steps 4, 6 and 8 of a run, and the digest of its weights after every step."""
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
    """Where a run begins, its weights' digest then, and what it says; an error where it looks for a checkpoint."""
    with alone():
        assembly = assemble(ready, simulated_placement(ready.recipe), 0)
        trainer = assembly.trainer
        try:
            try:
                resumption = resumption_of(assembly)
            except ThinwireError as error:
                return None, None, [str(error)]
            Checkpointing(assembly, [""], None, dict).restore(resumption)
            return resumption.first, digest(trainer), resumption.notes
        finally:
            for stage in trainer.stages:
                stage.close()
            trainer.stages[0].wire.maker.files.discard()


@pytest.mark.slow
def test_damage_is_told_or_the_checkpoint_before_is_taken(trained, tmp_path, monkeypatch):
    original, ready, digests = trained
    monkeypatch.chdir(tmp_path)
    begun = []
    for seed in range(DAMAGED):
        shutil.rmtree("run", ignore_errors=True)
        shutil.copytree(original / "run", "run")
        damage(tmp_path / "run/checkpoints", random.Random(seed))
        first, found, told = resumed(ready)
        assert first in (None, 0, 4, 6, 8), seed
        assert not first or found == digests[first], seed
        assert first != 0 or not told, seed
        assert first in (0, 8) or any("checkpoint" in sentence for sentence in told), seed
        begun.append(first)
    assert {4, 6, 8} <= set(begun), "some damage was to older files, and some to the newest"
    print({first: begun.count(first) for first in (8, 6, 4, 0, None)}, "began there; None: a sentence")


@pytest.mark.slow
def test_a_checkpoint_that_lacks_rows_is_passed_over_and_the_run_says_so(trained, tmp_path, monkeypatch):
    """It was taken, and the run ended with the row that it could not restore."""
    original, ready, digests = trained
    monkeypatch.chdir(tmp_path)
    shutil.copytree(original / "run", "run")
    shutil.rmtree("run/checkpoints/step-00000004")  # the others are whole without it
    next(Path("run/checkpoints/step-00000008").rglob("*.00000008.rows")).unlink()
    shutil.rmtree("run/weights")
    assert find_checkpoint(tmp_path / "run").manifest.step == 8, "weights need no rows"
    first, found, told = resumed(ready)
    assert (first, found) == (6, digests[6])
    assert "the checkpoint of step 8 is passed over" in told[0] and ".rows cannot be read" in told[0]
    assert not (tmp_path / "run/checkpoints/step-00000008").exists()
    next(Path("run/checkpoints/step-00000006").rglob("*.rows")).unlink()
    first, _, [told] = resumed(ready)
    assert first is None and "none that is whole in all stages" in told
    assert "the checkpoint of step 6 is passed over" in told
