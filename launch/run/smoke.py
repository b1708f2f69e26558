"""The end of a smoke run: its model is exported and loaded again, before a long run ends in what cannot be."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from thinwire.launch.folder.exports import export
from thinwire.launch.folder.saved_run import read_run
from thinwire.launch.plan.places import simulated_placement
from thinwire.launch.plan.prepare import prepare
from thinwire.launch.recipe.recipe import Recipe, parse
from thinwire.models.data.parts import BYTES
from thinwire.models.data.tokenizer import make_tokenizer


def check_export(trained: Recipe) -> None:
    """Export what a smoke run has trained to a folder that is removed again, and load its model and its tokenizer.

    Raises:
        ThinwireError: the model cannot be exported, or the export not be loaded.
    """
    # where its weights have had room; a temporary folder may be in memory
    with TemporaryDirectory(prefix="thinwire-", dir=trained.folder, ignore_cleanup_errors=True) as folder:
        target = Path(folder, "export")
        export(read_run(trained.folder, "thinwire export"), target)
        loaded = prepare(parse([str(target / "recipe.yaml")]))
        loaded.build_all(simulated_placement(loaded.recipe), rank=0)
        if trained.data.tokenizer != BYTES:
            make_tokenizer(str(target))
    print("its model was exported and loaded again")
