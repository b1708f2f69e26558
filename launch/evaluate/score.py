"""The held-out scores of a model, with compression on and off. All stages run in this process."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from thinwire.launch.run.assembly import Prepared, assemble, simulated_placement
from thinwire.launch.shared.interfaces import alone
from thinwire.launch.shared.tables import Table
from thinwire.models.data.sampler import evaluation_batches
from thinwire.models.tasks import mask_padding
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.evaluation import Compression, Score, advice, evaluate


def score(prepared: Prepared) -> dict[Compression, Score]:
    """The held-out scores with compression on and off. This process must not have a default process group.

    Only stores on disk are written, in a temporary folder.

    Raises:
        OptionsError: the data has no held-out samples, or a codec is auto.
    """
    held_out = prepared.data.held_out
    if held_out is None:
        raise OptionsError("an evaluation needs held-out samples; raise data.held_out, or name data.evaluation")
    prepared.recipe.compression.without_auto("an evaluation")
    pipeline = prepared.recipe.pipeline
    size, count = pipeline.num_microbatches * pipeline.microbatch_size, len(held_out)
    chosen = prepared.recipe.compression.store_folder
    with alone(), _temporary_folder(chosen) as stores:
        passing = _with_stores_in(stores, prepared)
        trainer = assemble(passing, simulated_placement(passing.recipe), rank=0).trainer
        trainer.done = passing.recipe.training.steps  # codecs that change are those of the end
        scores = evaluate(trainer, held_out, lambda: evaluation_batches(count, size), mask_padding)
        for stage in trainer.stages:
            stage.close()
        for wire, _ in trainer.stages[0].all_ends:
            wire.discard_stores()
    assert scores is not None, "the last stage lives here"
    return scores


def _temporary_folder(chosen: str) -> tempfile.TemporaryDirectory[str]:
    """A temporary folder for stores, in `chosen` if that exists."""
    try:
        return tempfile.TemporaryDirectory(dir=chosen if chosen and Path(chosen).is_dir() else None)
    except OSError as error:
        raise OptionsError(
            f"compression.store_folder must name a folder that can be written, got {chosen or tempfile.gettempdir()}: "
            f"{error.strerror}"
        ) from error


def _with_stores_in(folder: str, prepared: Prepared) -> Prepared:
    wanted = prepared.recipe
    return replace(prepared, recipe=replace(wanted, compression=replace(wanted.compression, store_folder=folder)))


def table_of(name: str, scores: dict[Compression, Score]) -> Table:
    """The scores as a table, a row for each mode of compression, with advice if the codecs cost too much."""
    metrics = list(scores["on"].metrics)
    return Table(
        f"{name}, held out",
        ["compression", "loss", *metrics, "targets"],
        [
            [mode, score.loss, *(score.metrics[name] for name in metrics), score.num_targets]
            for mode, score in scores.items()
        ],
        note=advice(scores["on"].loss, scores["off"].loss) or "",
    )
