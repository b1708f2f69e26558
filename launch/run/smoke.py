"""The smoke run of a recipe: three steps that try every part, before somebody spends hours on the whole run.

At its end its model is exported and loaded again, before a long run ends in what cannot be.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from thinwire.launch.run.recipe import Recipe
from thinwire.models.data.options import BYTES, DataOptions
from thinwire.pipeline.options import ClientOptions
from thinwire.pipeline.options.durations import read_duration

STEPS = 3
SUFFIX = "-smoke"


def smoke(recipe: Recipe) -> Recipe:
    """The recipe as a smoke run; the recipe of a smoke run stays as it is.

    Model, cut, batch, codecs and optimizer stay. A warm-up or the measurement of `auto` takes the first step. The run
    has its own folders, because it replaces the smoke run before it. Clients with data of their own share those at
    hand, because no outline describes a part of the data.
    """
    compression = recipe.compression
    warmup = "1 step" if read_duration(compression.warmup)[0] else compression.warmup
    return replace(
        recipe,
        name=_marked(recipe.name),
        output=recipe.output and _marked(recipe.output.rstrip("/")),
        save_every=0,
        data=_little(recipe),
        clients=replace(recipe.clients, turn="1 step", outlines=[]) if recipe.clients.count > 1 else ClientOptions(),
        compression=replace(compression, measure="1 step", warmup=warmup),
        training=replace(recipe.training, steps=STEPS, epochs=None, evaluate_every="0 steps"),
        checkpoint=replace(recipe.checkpoint, every=f"{STEPS} steps", folder="", resume="never"),
        debug=replace(recipe.debug, trace=STEPS),
    )


def _marked(name: str) -> str:
    return name if name.endswith(SUFFIX) else name + SUFFIX


def _little(recipe: Recipe) -> DataOptions:
    """As much of the data as three different batches and one evaluation need."""
    data, pipeline = recipe.data, recipe.pipeline
    shared = data.held_out if data.evaluation is None else 0.0
    training = max(STEPS, recipe.clients.count) * recipe.batch_size / (1 - shared)
    one_pass = pipeline.pass_size
    # one sample more than the held-out share, because shares are rounded
    held_out = (one_pass + 1) / shared if shared else one_pass
    samples = math.ceil(max(training, held_out)) + 1
    tokens = data.block_size if data.chosen_kind in ("text", "chat") else 1
    wanted = samples * tokens + 1
    return replace(data, limit=wanted if data.limit is None else min(wanted, data.limit))


def check_export(trained: Recipe) -> None:
    """Export what a smoke run has trained to a folder that is removed again, and load its model and its tokenizer.

    Raises:
        ThinwireError: the model cannot be exported, or the export not be loaded.
    """
    from thinwire.launch.run import recipe
    from thinwire.launch.run.assembly import build_modules, prepare, simulated_placement
    from thinwire.launch.run.export import export
    from thinwire.launch.run.saved import read_run
    from thinwire.models.data.tokenizer import make_tokenizer

    # where its weights have had room; a temporary folder may be in memory
    with TemporaryDirectory(prefix="thinwire-", dir=trained.folder, ignore_cleanup_errors=True) as folder:
        target = Path(folder, "export")
        export(read_run(trained.folder, "thinwire export"), target)
        loaded = prepare(recipe.parse([str(target / "recipe.yaml")]))
        build_modules(loaded, simulated_placement(loaded.recipe), rank=0)
        if trained.data.tokenizer != BYTES:
            make_tokenizer(str(target))
    print("its model was exported and loaded again")
