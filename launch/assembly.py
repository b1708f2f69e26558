"""From a recipe to a trainer: the model cut, the data read, the stages of this process built and connected.

`prepare` needs no process group, so the launcher runs it first and every mistake is told before anything starts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from thinwire.compress import SlotCounts
from thinwire.launch.recipe import Recipe
from thinwire.models.data import TextBlocks, check_vocabulary, load_blocks
from thinwire.models.errors import ModelError
from thinwire.models.gpt2 import gpt2
from thinwire.models.layers import Blueprint, build_stage, stage_output_examples
from thinwire.models.partition import explicit, partition
from thinwire.models.sampler import Sampler
from thinwire.models.tasks import LanguageModeling
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.process import Placement
from thinwire.pipeline.schedules import actions, build, build_merged, merge, placement
from thinwire.pipeline.stage import CompressedStage
from thinwire.pipeline.trainer import Trainer, WholeBatchLoss
from thinwire.pipeline.wire import Wire


@dataclass(frozen=True)
class Prepared:
    """What a recipe names, found and fitted together, but not built."""

    recipe: Recipe
    blueprint: Blueprint
    cuts: tuple[range, ...]
    training: TextBlocks
    held_out: TextBlocks | None


@dataclass(frozen=True)
class Assembly:
    """A trainer, and what the reports about it need."""

    trainer: Trainer
    prepared: Prepared
    placement: Placement


def prepare(recipe: Recipe) -> Prepared:
    """Read the data and cut the model.

    Raises:
        OptionsError: the run's folder cannot be written.
        ModelError: the data cannot be read, does not fit the model, or the model cannot be cut so.
    """
    training, held_out = load_blocks(recipe.data)
    for blocks in (training, held_out):
        if blocks is not None:
            check_vocabulary(blocks, recipe.model.vocab_size)
    if len(training) < recipe.pipeline.batch_size:
        raise ModelError(
            f"a batch holds no sample twice: pipeline asks for {recipe.pipeline.batch_size} samples a step, the "
            f"training text has {len(training)} blocks of {recipe.data.block_size}"
        )
    blueprint = gpt2(recipe.model)
    sizes, num_stages = recipe.pipeline.layers, recipe.pipeline.num_stages
    cuts = (
        explicit(sizes, len(blueprint.layers))
        if sizes is not None
        else partition([layer.cost for layer in blueprint.layers], num_stages)
    )
    one_pass = recipe.pipeline.num_microbatches * recipe.pipeline.microbatch_size
    if held_out is not None and len(held_out) < one_pass:
        raise ModelError(
            f"evaluation runs in the shape of training and a batch holds no sample twice: a pass has {one_pass} "
            f"samples, the held-out text {len(held_out)} blocks of {recipe.data.block_size}; raise data.held_out"
        )
    _check_output(recipe.folder)
    return Prepared(recipe, blueprint, cuts, training, held_out)


def _check_output(folder: Path) -> None:
    """Raise OptionsError unless the run can write where it is told to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise OptionsError([f"output must name a folder that can be written, got {folder}: {reason}"]) from error


def real_placement(recipe: Recipe) -> Placement:
    """Where the stages of a real run live."""
    pipeline = recipe.pipeline
    return Placement(placement(pipeline.schedule, pipeline.num_stages, pipeline.num_processes))


def simulated_placement(recipe: Recipe) -> Placement:
    """All stages on process 0."""
    return Placement(dict.fromkeys(range(recipe.pipeline.num_stages), 0))


def assemble(prepared: Prepared, where: Placement, rank: int) -> Assembly:
    """Build and connect the stages that process `rank` holds. Collective over the default process group."""
    recipe = prepared.recipe
    pipeline, training = recipe.pipeline, recipe.training
    torch.set_num_threads(training.threads)
    wire = Wire(
        recipe.compression,
        recipe.wire,
        seed=training.seed,
        agreement=_agreement(prepared),
        slots=SlotCounts(
            positions=pipeline.batch_size,
            samples=len(prepared.training),
            evaluation_samples=len(prepared.held_out or ()),
        ),
        store_folder=_store_folder(recipe),
    )
    example = torch.empty(pipeline.microbatch_size, recipe.data.block_size, dtype=torch.int64, device="meta")
    outputs = stage_output_examples(prepared.blueprint, prepared.cuts, example, training.precision)
    inputs = [(example,), *outputs[:-1]]
    stages = [
        CompressedStage(
            build_stage(prepared.blueprint, prepared.cuts[index], seed=training.seed, precision=training.precision),
            index,
            pipeline.num_stages,
            torch.device("cpu"),
            input_args=inputs[index],
            output_args=outputs[index],
            wire=wire,
            first_layer=prepared.cuts[index].start,
        )
        for index in where.stages_of(rank)
    ]
    task = LanguageModeling()
    loss = WholeBatchLoss(task, stages[-1].meter)
    trainer = Trainer(
        stages=stages,
        schedule=_schedule(recipe, where, stages, loss),
        loss=loss,
        placement=where,
        samples=prepared.training,
        sampler=Sampler(len(prepared.training), pipeline.batch_size, training.seed),
        task=task,
        pipeline=pipeline,
        optimizer=recipe.optimizer,
        training=training,
        trace=recipe.debug.trace,
    )
    for stage in stages:
        stage.connect()
    return Assembly(trainer, prepared, where)


def _schedule(recipe: Recipe, where: Placement, stages: Sequence[CompressedStage], loss: WholeBatchLoss) -> Any:
    """Torch's own schedule where stages live as it wants them; its order merged where they share one process."""
    pipeline = recipe.pipeline
    if where == real_placement(recipe):
        return build(pipeline.schedule, stages, pipeline.num_microbatches, loss)
    order = actions(pipeline.schedule, pipeline.num_stages, pipeline.num_processes, pipeline.num_microbatches)
    return build_merged(merge(order), stages, pipeline.num_microbatches, loss)


def _store_folder(recipe: Recipe) -> Path:
    chosen = recipe.compression.store_folder
    return Path(chosen, recipe.name) if chosen else recipe.folder / "stores"


def _agreement(prepared: Prepared) -> dict[str, Any]:
    """What all stages must share beside codecs and shapes, by dotted name."""
    recipe = prepared.recipe
    groups: dict[str, Any] = {
        "model": recipe.model,
        "data": recipe.data,
        "pipeline": recipe.pipeline,
        "optimizer": recipe.optimizer,
        "training": recipe.training,
        "debug": recipe.debug,
    }
    dotted = {f"{group}.{name}": value for group, part in groups.items() for name, value in asdict(part).items()}
    dotted["optimizer.betas"] = list(recipe.optimizer.betas)
    return {**dotted, "text": prepared.training.digest}
