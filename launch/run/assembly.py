"""From what is prepared to a trainer: the stages of this process, built and connected."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter

from thinwire.compress import Progress, SlotCounts
from thinwire.launch.plan.agreement import agreed, agreed_by_replicas
from thinwire.launch.plan.places import real_placement, simulated_placement
from thinwire.launch.plan.prepared import Prepared
from thinwire.launch.plan.shared_weights import method_of_shared
from thinwire.launch.recipe.recipe import Recipe
from thinwire.launch.run.compile import compile_stages
from thinwire.launch.shared.progress import counting
from thinwire.launch.shared.rank import own_local_rank
from thinwire.models.data.samples import Data
from thinwire.pipeline.devices.device import choose, use
from thinwire.pipeline.generation import Generator
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.replicas.exchange import connect
from thinwire.pipeline.replicas.shared import SharedWeights
from thinwire.pipeline.saving.state import trained
from thinwire.pipeline.schedules import actions, build, build_merged, merge
from thinwire.pipeline.stages.compressed_stage import CompressedStage
from thinwire.pipeline.training.optimization import Update, WholeBatchLoss
from thinwire.pipeline.training.runner import Runner
from thinwire.pipeline.training.sync import sync_of
from thinwire.pipeline.training.trainer import Trainer
from thinwire.pipeline.wire import nccl
from thinwire.pipeline.wire.wire import Wire


@dataclass(frozen=True)
class Assembly:
    """A trainer, and the facts about it that the summary of the run needs."""

    trainer: Trainer
    prepared: Prepared
    generator: Generator | None
    """Answers prompts; None without any."""

    def close(self) -> None:
        """Close the stages of this process, and delete the files of their stores."""
        for stage in self.trainer.stages:
            stage.close()
        self.discard_stores()

    def discard_stores(self) -> None:
        """Delete the files of this process's stores, if the disk allows it. Call it at the end, after errors too."""
        with suppress(OSError):
            self.trainer.stages[0].wire.maker.files.discard()


def assemble(prepared: Prepared, where: Placement, rank: int) -> Assembly:
    """Build and connect the stages of process `rank`. Collective over the default process group."""
    recipe, data = prepared.recipe, prepared.data
    pipeline, training = recipe.pipeline, recipe.training
    torch.set_num_threads(training.threads)
    # on an error torch's runtime logs the whole schedule, which buries the error
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)
    # a simulation is one process, whatever torchrun sets for other programs
    use(device := choose(training.device, own_local_rank() if dist.get_world_size() > 1 else 0))
    agreement = agreed(recipe, data, prepared.blueprint)
    of_all = agreement | agreed_by_replicas(recipe)
    wire = _make_wire(recipe, data, where.replica_of(rank), agreement, where.pipeline)
    stages = _stages(prepared, where, rank, device, wire)
    loss = WholeBatchLoss(data.task, stages[-1].meter)
    shared = _shared_weights(prepared, stages, where)

    def in_full(progress: Progress) -> bool:
        """Whether what replicas exchange in a step goes uncompressed."""
        return recipe.compression.warms_up(progress) or recipe.optimizer.sends_in_full(progress)

    replicas = connect(stages, where, recipe.replicas, of_all, in_full)
    trainer = Trainer(
        runner=Runner(stages, _schedule(recipe, where, stages, loss), loss),
        placement=where,
        samples=data.training,
        sampler=prepared.sampler,
        task=data.task,
        sync=sync_of(stages, where, replicas, pipeline, recipe.optimizer, shared, training.steps),
        update=Update(stages, where, recipe.optimizer, training.steps, shared),
        causal=prepared.blueprint.compare is not None and data.num_labels is None,
    )
    generator = None
    if prepared.prompts is not None:
        generator = Generator(stages, where, prepared.outputs, remembers=prepared.prompts.remembers)
    # last of all groups: torch 2.11 names one by how many its process is in, and of these each is in others
    wire.maker.gpus = nccl.connect(recipe.wire.transport, where, device, wire.timeout)
    for stage in stages:
        stage.connect()
    if training.compile:
        compile_stages(stages, prepared, where)
    return Assembly(trainer, prepared, generator)


def _stages(prepared: Prepared, where: Placement, rank: int, device: torch.device, wire: Wire) -> list[CompressedStage]:
    """The stages of process `rank` with their first weights, not connected yet."""
    outputs = prepared.outputs
    inputs = [(prepared.inputs,), *outputs[:-1]]
    with counting(rank == where.reporter):
        modules = prepared.build_all(where, rank, device)
    return [
        CompressedStage(
            module,
            index,
            prepared.recipe.pipeline.num_stages,
            device,
            input_args=inputs[index],
            output_args=outputs[index],
            group=where.pipeline,
            wire=wire,
            first_layer=prepared.cuts[index].start,
        )
        for index, module in modules.items()
    ]


def _shared_weights(prepared: Prepared, stages: Sequence[CompressedStage], where: Placement) -> SharedWeights:
    """The weights that several stages hold and train. Collective if the model has some that they may hold."""
    names, recipe = prepared.blueprint.shared, prepared.recipe
    inside, copies = tuple(f"{name}." for name in names), dict[int, dict[str, Parameter]]()
    for stage in stages:
        own = sorted(trained(stage).items())  # in an order that all holders have
        copies[stage.stage_index] = {name: parameter for name, parameter in own if name.startswith(inside)}
    here = {stage: len(parameters) for stage, parameters in copies.items()}
    counts = collectives.gather_numbers(where, here) if names else []
    holders = [stage for stage, count in enumerate(counts) if count]
    if len(holders) < 2:
        holders, copies = [], {}
    return SharedWeights(
        stages,
        {stage: parameters for stage, parameters in copies.items() if parameters},
        holders,
        where,
        method_of_shared(recipe),
        recipe.compression.warms_up,
        real_placement(recipe) if where == simulated_placement(recipe) else None,
    )


def _schedule(recipe: Recipe, where: Placement, stages: Sequence[CompressedStage], loss: WholeBatchLoss) -> Any:
    """The schedule: torch's own in a real run; in one process, torch's order merged into one list."""
    pipeline = recipe.pipeline
    if where.process_of == real_placement(recipe, dist.get_rank()).process_of:
        return build(pipeline.schedule, stages, pipeline.num_microbatches, loss)
    order = actions(pipeline.schedule, pipeline.num_stages, pipeline.num_processes, pipeline.num_microbatches)
    return build_merged(merge(order), stages, pipeline.num_microbatches, loss)


def _make_wire(
    recipe: Recipe,
    data: Data,
    replica: int | None,
    agreement: Mapping[str, Any],
    group: dist.ProcessGroup | None,
) -> Wire:
    """The wire of one process; collective over its pipeline.

    `replica` is that of this process; None without replicas, or in a simulation of all. `agreement` is what `agreed`
    returns.
    """
    positions = recipe.batch_size if replica is None else recipe.pipeline.batch_size
    # the rows that fill up the last pass of an evaluation have slots, too
    scored = math.ceil(len(data.held_out or ()) / recipe.pipeline.pass_size) * recipe.pipeline.pass_size
    return Wire(
        replace(recipe.compression, store_folder=_store_folder(recipe, replica)),
        recipe.wire,
        seed=recipe.training.seed,
        agreement=agreement,
        slots=SlotCounts(positions=positions, samples=len(data.training), evaluation_samples=scored),
        group=group,
    )


def _store_folder(recipe: Recipe, replica: int | None) -> str:
    """The folder for the stores of this run, or of this replica. No other run or replica shares it."""
    chosen = recipe.compression.store_folder
    folder = Path(chosen, recipe.name) if chosen else recipe.folder / "stores"
    return str(folder if replica is None else folder / f"replica-{replica}")
