"""From a recipe to a trainer: read the data, cut the model, build and connect the stages of this process.

`prepare` needs no process group. So the launcher calls it first, and finds every mistake before a process starts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from thinwire.compress import Method, Progress, parse
from thinwire.compress.transfer import put
from thinwire.errors import attempt
from thinwire.errors.names import first_of
from thinwire.launch.run import parent
from thinwire.launch.run.compile import compile_stages
from thinwire.launch.run.host_data import data_of
from thinwire.launch.run.logs.hooks import check_hooks
from thinwire.launch.run.prompts import Prompts, read_prompts
from thinwire.launch.run.recipe import Recipe
from thinwire.launch.run.weights import with_run_weights
from thinwire.launch.run.wire import agreed, agreed_by_replicas, make_wire
from thinwire.launch.shared.progress import counting, showing
from thinwire.launch.shared.rank import own_local_rank
from thinwire.launch.shared.tables import size_text
from thinwire.models.checkpoint import Checkpoint
from thinwire.models.compiled import check_compiler
from thinwire.models.costs import operations
from thinwire.models.data.chats import require_positions
from thinwire.models.data.clients import Turns, divide, some_ids
from thinwire.models.data.load import more_samples
from thinwire.models.data.pairs import require_ends
from thinwire.models.data.sampler import Sampler
from thinwire.models.data.samples import Data
from thinwire.models.errors import ModelError, require
from thinwire.models.layers import Blueprint, Stage, build_stage, check_weights, stage_output_examples
from thinwire.models.model import blueprint, check_fits, check_name, check_reads, note_on_tokenizer
from thinwire.models.options import ModelOptions, Tied
from thinwire.models.partition import cut_after, explicit, partition
from thinwire.models.precision import check_precision
from thinwire.models.tasks import Classification, TaskName, own_task
from thinwire.pipeline.devices.device import CPU, choose, put_all, use
from thinwire.pipeline.devices.memory import told_if_full
from thinwire.pipeline.generation import Generator
from thinwire.pipeline.options import TrainingOptions
from thinwire.pipeline.options.durations import in_steps
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.replicas.exchange import check_fit, connect
from thinwire.pipeline.replicas.shared import SharedWeights, bytes_of_step
from thinwire.pipeline.saving.state import trained
from thinwire.pipeline.schedules import actions, build, build_merged, merge, process_of_stages
from thinwire.pipeline.stages.compressed_stage import CompressedStage
from thinwire.pipeline.training.optimization import Update, WholeBatchLoss
from thinwire.pipeline.training.runner import Runner
from thinwire.pipeline.training.sync import sync_of
from thinwire.pipeline.training.trainer import Trainer
from thinwire.pipeline.wire import nccl
from thinwire.pipeline.wire.boundary import Observer
from thinwire.pipeline.wire.wire import Wire

_DEAR = 10
"""How many times more bytes than the gradient of a tied head a step must send through a boundary, uncompressed."""


@dataclass(frozen=True)
class Prepared:
    """The model and the data of a recipe, found and checked against each other. The stages are not built yet."""

    recipe: Recipe
    blueprint: Blueprint
    cuts: tuple[range, ...]
    data: Data

    outputs: tuple[tuple[Tensor, ...], ...]
    """The output of each stage for a micro-batch, as meta tensors."""
    prompts: Prompts | None = None
    """What is answered at each evaluation; None without prompts."""

    @cached_property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass through the training data, of all clients."""
        return make_sampler(self).steps_per_epoch

    @property
    def inputs(self) -> Tensor:
        """A micro-batch of the model's input, as a meta tensor."""
        return self.data.training.example(self.recipe.pipeline.microbatch_size)

    @property
    def side(self) -> dict[str, Tensor]:
        """A micro-batch of the side inputs, as meta tensors by name."""
        return self.data.training.side_example(self.recipe.pipeline.microbatch_size)

    def build(self, index: int, device: torch.device) -> Stage:
        """A stage with its first weights."""
        training = self.recipe.training
        how: dict[str, Any] = {name: getattr(training, name) for name in ("seed", "precision", "recompute")}
        return build_stage(self.blueprint, self.cuts[index], device=device, **how)

    def stage_inputs(self, index: int, device: torch.device) -> tuple[Tensor, tuple[Tensor, ...], dict[str, Tensor]]:
        """What a stage is given where it runs by itself: to be timed or compiled before the first step.

        One micro-batch of it: the ids of its samples, its inputs, and the side inputs by name. The inputs are samples
        for the first stage, Gaussian values for the others.
        """
        samples = self.data.training
        ids = some_ids(samples, self.recipe.pipeline.microbatch_size)
        given = (samples.inputs(ids, 0),) if index == 0 else tuple(map(_values, self.outputs[index - 1]))
        # a moved tensor is no leaf, and needs its gradient asked for again
        inputs = tuple(put(x, device).detach().requires_grad_(x.requires_grad) for x in given)
        return ids, inputs, put_all(samples.side(ids), device)


def _values(example: Tensor) -> Tensor:
    """A tensor like the example: Gaussian values for a floating-point tensor, else zeros."""
    if not example.is_floating_point():
        return torch.zeros(example.shape, dtype=example.dtype)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(example.shape, generator=generator).to(example.dtype).requires_grad_(example.requires_grad)


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
        for wire, _ in self.trainer.stages[0].all_ends:
            wire.discard_stores()


def prepare(recipe: Recipe, given: Data | None = None, *, rank: int | None = None) -> Prepared:
    """Read the data and cut the model. The epochs of the recipe become steps.

    `given` are the data where they are read already; `rank` is that of a stage process, None for a launcher and for
    what runs in one process. A stage process may have an outline in place of the data, and shares them on its host.

    Raises:
        ModelError: the data cannot be read or does not fit the model, or the model cannot be cut in this way. One error
            names as many mistakes as possible.
        OptionsError: there is no GPU where one is wanted.
    """
    device = choose(recipe.training.device)
    with showing("reading the data"):
        data, *_ = attempt(
            lambda: with_own_task(given or data_of(recipe, rank), recipe.training),
            lambda: check_name(recipe.model),
            lambda: check_hooks(recipe.logging),
            lambda: check_precision(recipe.training.precision, device),
            lambda: check_compiler(device) if recipe.training.compile else None,
        )
    with showing("cutting the model"):
        prepared = _cut_model(recipe, data)
    require(
        (
            bool(prepared.blueprint.shared) or parse(recipe.compression.shared) == parse("none"),
            f"compression.shared must be none where no two stages hold the same weights, got "
            f"{recipe.compression.shared}; drop it, or set model.tied: sum where the head is the embedding",
        )
    )
    if prepared.blueprint.compare is not None and (rank is None or parent.VARIABLE not in os.environ):
        with showing("comparing a tiny copy of the model, cut, with the uncut one"):
            found = prepared.blueprint.compare(packed=recipe.data.packing)
        shared = _notes_on_shared(prepared) if recipe.model.lora.rank is None else []  # frozen
        other = note_on_tokenizer(recipe.model, recipe.data.tokenizer)
        notes = [*prepared.data.notes, found, *filter(None, [other])]
        if inside := prepared.blueprint.inside:
            notes.append(
                f"{inside} reads more than text: its text model trains, as AutoModelForCausalLM loads it, and is "
                "exported by itself"
            )
        prepared = replace(prepared, data=replace(prepared.data, notes=(*notes, *shared)))
    epochs, steps_per_epoch = recipe.training.epochs, prepared.steps_per_epoch  # clients without a batch are refused
    if epochs is not None:
        training = replace(recipe.training, steps=epochs * steps_per_epoch, epochs=None)
        prepared = replace(prepared, recipe=replace(prepared.recipe, training=training))
    return prepared


def with_own_task(data: Data, training: TrainingOptions) -> Data:
    """The data with the loss and metrics of the user's own. ModelError if there are none such, or no best score."""
    task = own_task(data.task, training.loss, training.metrics)
    known, best = ("loss", *task.scores), training.best
    require(
        (
            best is None or (data.held_out is not None and best.split()[1] in known),
            f"training.best must be min or max of {', '.join(known)}, and needs held-out data, got {best!r}",
        )
    )
    return replace(data, task=task)


def _notes_on_shared(prepared: Prepared) -> list[str]:
    """What weights cost that several stages hold, and which are one weight in the library's model and two here."""
    blueprint = prepared.blueprint
    if not blueprint.tied and not blueprint.shared:
        return []
    layers, method = blueprint.on_meta, _method_of_shared(prepared.recipe)
    weights = {name: parameter for layer in layers for name, parameter in layer.full_parameters().items()}
    process_of = real_placement(prepared.recipe).process_of

    def sends(parameters: Iterable[Parameter], holders: Sequence[int]) -> str:
        processes = [process_of[stage] for stage in holders]
        return size_text(bytes_of_step(sum(each.numel() for each in parameters), processes, method))

    ends = [0, len(process_of) - 1]
    untied = [
        f"the library's model has one weight for {name} and {other}; here the two train apart, so the exported model "
        f"has two; set model.tied: sum to keep one, which sends {sends([weights[name]], ends)} each step"
        for name, other in blueprint.tied.items()
    ]
    parts = {name: part for layer in layers for name, part in layer.parts.items() if name in blueprint.shared}
    holders = [
        stage for stage, cut in enumerate(prepared.cuts) if any(layers[index].parts.keys() & parts for index in cut)
    ]
    size = sends((parameter for part in parts.values() for parameter in part.parameters()), holders)
    codec = "" if method == parse("none") else f" through {method}"
    summed = f"{len(holders)} stages hold {', '.join(parts)}: each step sends {size} to sum its gradients over them"
    return [*untied, *([f"{summed}{codec}"] if len(holders) > 1 else [])]


def _cut_model(recipe: Recipe, data: Data) -> Prepared:
    """The model of a recipe, cut and checked."""
    model = make_blueprint(recipe, data)
    if recipe.model.tied is None and model.tied:
        tied: Tied = "sum" if _ties(model, recipe) else "untie"
        recipe = replace(recipe, model=replace(recipe.model, tied=tied))
        model = make_blueprint(recipe, data) if tied == "sum" else model
    cuts, _, unread = attempt(
        lambda: _cut(model, recipe, data), lambda: _check_samples(data, recipe), lambda: check_weights(model)
    )
    if unread:
        note = f"the files of the weights hold tensors that this model does not read: {first_of(unread)}"
        data = replace(data, notes=(*data.notes, note))
    prepared = Prepared(recipe, model, cuts, data, outputs=())
    outputs = _outputs(prepared)
    check_fit(prepared.blueprint, recipe.replicas)
    prompts = read_prompts(recipe, model, outputs) if recipe.training.prompts else None
    return replace(prepared, outputs=outputs, prompts=prompts)


def _ties(model: Blueprint, recipe: Recipe) -> bool:
    """Whether a tied head costs little: its gradient has a row for each word, a boundary's frames one for each token.

    Neither the cut nor the codecs count, so that runs that differ in them train the same model. A head of its own in
    the weights to start with, as a run that untied it saves, stays one.
    """
    if not model.tied or recipe.model.lora.rank is not None:
        return False
    if isinstance(model.checkpoint, Checkpoint) and model.checkpoint.stored.keys() & model.tied.keys():
        return False
    return _DEAR * (model.vocab_size or 0) <= min(recipe.batch_sizes) * recipe.data.block_size


def make_blueprint(recipe: Recipe, data: Data) -> Blueprint:
    """The model of a recipe, built for its data. ModelError if the model is unknown or does not fit the data."""
    tokens = recipe.data.block_size if data.vocab_size is not None else None
    if tokens is None:
        check_reads(recipe.model, kind="images", channels=data.training.example(1).shape[1])
    else:
        check_reads(recipe.model, kind="text")
    model = model_of(recipe.model, recipe.data.task, data.num_labels, tokens)
    check_fits(model, vocab_size=data.vocab_size, block_size=tokens)
    require_positions(model.side, data.training.side_example(1))
    for samples in filter(None, (data.training, data.held_out)):
        require_ends(model.padding, samples)
    return model


def model_of(options: ModelOptions, task: TaskName, num_labels: int | None, block_size: int | None = None) -> Blueprint:
    """The model of a recipe for a task, which holds its weights in the dtype of the options."""
    model = blueprint(with_run_weights(options), task=task, num_labels=num_labels, block_size=block_size)
    return replace(model, weights_dtype=torch.float32 if options.dtype == "fp32" else torch.bfloat16)


def _outputs(prepared: Prepared) -> tuple[tuple[Tensor, ...], ...]:
    """The outputs of the stages. ModelError if the model cannot read such samples, or if its layers do not fit."""
    try:
        found = stage_output_examples(
            prepared.blueprint, prepared.cuts, prepared.inputs, prepared.recipe.training.precision, side=prepared.side
        )
    except ModelError:
        raise
    except Exception as error:
        example, reason = prepared.inputs, str(error).strip().partition("\n")[0].rstrip() or type(error).__name__
        raise ModelError(
            f"the model must be able to read samples such as {str(example.dtype).removeprefix('torch.')} of shape "
            f"{list(example.shape)}, and each layer the output of the layer before; it fails with: {reason}"
        ) from error
    if isinstance(task := prepared.data.task, Classification):  # without a loss of the user's own
        width = found[-1][0].shape[-1]
        require(
            (
                width >= task.num_labels,
                f"the model must have an output for each of the {task.num_labels} classes of the data, got {width}",
            )
        )
    return tuple(found)


def _cut(blueprint: Blueprint, recipe: Recipe, data: Data) -> tuple[range, ...]:
    """The layers of each stage."""
    wanted, layers = recipe.pipeline.layers, blueprint.layers
    if wanted is None:
        return partition(_costs(blueprint, recipe, data), recipe.pipeline.num_stages)
    if any(isinstance(entry, str) for entry in wanted):
        return cut_after([str(entry) for entry in wanted], [layer.name for layer in layers])
    return explicit([int(entry) for entry in wanted], len(layers))


def _costs(blueprint: Blueprint, recipe: Recipe, data: Data) -> Sequence[float]:
    """The cost of each layer, counted: every process gets the same numbers."""
    rows = recipe.pipeline.microbatch_size
    try:
        samples = data.training.example(rows), recipe.training.precision, data.training.side_example(rows)
        return operations(blueprint, *samples)
    except Exception:  # the code of the model fails; `_outputs` runs it again and reports the error
        return [layer.cost for layer in blueprint.layers]


def _check_samples(data: Data, recipe: Recipe) -> None:
    """Raise ModelError if training or evaluation has fewer samples than one batch needs."""
    pipeline = recipe.pipeline
    one_pass = pipeline.pass_size
    fewer = "lower pipeline.num_microbatches or microbatch_size"
    fewer_replicas = ", or replicas.count" if recipe.replicas.count > 1 else ""
    require(
        (
            len(data.training) >= recipe.batch_size,
            f"a batch must not hold a sample twice: a step needs {recipe.batch_size} samples, and there are "
            f"{len(data.training)} to train on; "
            + ", or ".join([*more_samples(recipe.data), f"{fewer} or accumulation{fewer_replicas}"]),
        ),
        (
            data.held_out is None or len(data.held_out) >= one_pass,
            f"an evaluation pass is as large as a training pass, and must not hold a sample twice: it needs {one_pass} "
            f"samples, and there are {len(data.held_out or ())} held out; "
            + ", or ".join([*more_samples(recipe.data, held_out=True), fewer]),
        ),
    )


def real_placement(recipe: Recipe, rank: int = 0) -> Placement:
    """The process of each stage in a real run, as the process of a rank of its process group sees it."""
    pipeline = recipe.pipeline
    replica = rank // pipeline.num_processes
    alone = process_of_stages(pipeline.schedule, pipeline.num_stages, pipeline.num_processes)
    process_of = {stage: process + replica * pipeline.num_processes for stage, process in alone.items()}
    return Placement(process_of, replica, recipe.replicas.count)


def simulated_placement(recipe: Recipe) -> Placement:
    """All stages on process 0, which does the work of all replicas."""
    return Placement(dict.fromkeys(range(recipe.pipeline.num_stages), 0))


def assemble(
    prepared: Prepared,
    where: Placement,
    rank: int,
    observer: Observer | None = None,
) -> Assembly:
    """Build and connect the stages of process `rank`. Collective over the default process group.

    `observer` is called with every tuple of tensors that these stages send.
    """
    recipe, data = prepared.recipe, prepared.data
    pipeline, training = recipe.pipeline, recipe.training
    torch.set_num_threads(training.threads)
    # on an error torch's runtime logs the whole schedule, which buries the error
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)
    # a simulation is one process, whatever torchrun or a cluster sets for other programs
    use(device := choose(training.device, own_local_rank() if dist.get_world_size() > 1 else 0))
    agreement = agreed(recipe, data, prepared.blueprint)
    of_all = agreement | agreed_by_replicas(recipe)
    wire = make_wire(recipe, data, where.replica_of(rank), agreement, observer, where.pipeline)
    stages = _stages(prepared, where, rank, device, wire)
    loss = WholeBatchLoss(data.task, stages[-1].meter, training.label_smoothing)
    shared = _shared_weights(prepared, stages, where)

    def in_full(progress: Progress) -> bool:
        """Whether what replicas exchange in a step goes uncompressed."""
        warms_up = recipe.compression.warms_up(progress.step, progress.steps_per_epoch)
        return warms_up or recipe.optimizer.sends_in_full(progress)

    replicas = connect(stages, where, recipe.replicas, of_all, in_full)
    trainer = Trainer(
        runner=Runner(stages, _schedule(recipe, where, stages, loss), loss),
        placement=where,
        samples=data.training,
        sampler=make_sampler(prepared),
        task=data.task,
        sync=sync_of(stages, where, replicas, pipeline, recipe.optimizer, shared, training.steps),
        update=Update(stages, where, recipe.optimizer, training, shared),
        causal=prepared.blueprint.compare is not None and data.num_labels is None,
        trace=recipe.debug.trace,
    )
    generator = None
    if prepared.prompts is not None:
        generator = Generator(stages, where, prepared.outputs, remembers=prepared.prompts.remembers)
    # last of all groups: torch 2.11 names one by how many its process is in, and of these each is in others
    wire.gpus = nccl.connect(recipe.wire.transport, where, device, timedelta(seconds=recipe.wire.timeout))
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
        modules = build_modules(prepared, where, rank, device)
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


def make_sampler(prepared: Prepared) -> Sampler | Turns:
    """The order of the samples of all replicas, or of all clients."""
    recipe, seed = prepared.recipe, prepared.recipe.training.seed
    if (clients := recipe.clients).count > 1:
        return Turns(
            divide(prepared.data, clients.count, clients.division, seed),
            recipe.batch_size,
            seed,
            shuffle=recipe.data.shuffle,
            turn=partial(in_steps, clients.turn),
        )
    shares = recipe.batch_sizes if recipe.replicas.shuffle == "within" else [recipe.batch_size]
    return Sampler(len(prepared.data.training), recipe.batch_size, seed, shuffle=recipe.data.shuffle, shares=shares)


def build_modules(prepared: Prepared, where: Placement, rank: int, device: torch.device = CPU) -> dict[int, Stage]:
    """The stages of process `rank` with their first weights, by index."""
    modules = {}
    for index in where.stages_of(rank):
        with told_if_full(index, device):
            modules[index] = prepared.build(index, device)
    return modules


def _shared_weights(prepared: Prepared, stages: Sequence[CompressedStage], where: Placement) -> SharedWeights | None:
    """The weights that several stages hold and train; None if the model has no such weights. Collective if it has."""
    names, recipe = prepared.blueprint.shared, prepared.recipe
    if not names:
        return None
    copies = {stage.stage_index: _copies(stage.submod, names) for stage in stages}
    counts = collectives.gather_numbers(where, {stage: len(parameters) for stage, parameters in copies.items()})
    holders = [stage for stage, count in enumerate(counts) if count]
    if len(holders) < 2:
        return None
    return SharedWeights(
        stages,
        {stage: parameters for stage, parameters in copies.items() if parameters},
        holders,
        where,
        _method_of_shared(recipe),
        # gradients of fp16 may overflow, and then no stage steps
        recipe.wire if recipe.training.precision != "fp16" else replace(recipe.wire, nonfinite="send"),
        lambda progress: recipe.compression.warms_up(progress.step, progress.steps_per_epoch),
        real_placement(recipe) if where == simulated_placement(recipe) else None,
    )


def _method_of_shared(recipe: Recipe) -> Method:
    """What the gradients of shared weights go through; those of weights in bfloat16 are no wider than these."""
    method = parse(recipe.compression.shared)
    return parse("bf16") if recipe.model.dtype != "fp32" and method == parse("none") else method


def _copies(module: Any, shared: Sequence[str]) -> dict[str, Parameter]:
    """The parameters of a stage's shared parts that train, in the order of their names."""
    assert isinstance(module, Stage)
    found = trained(module)
    return {name: found[name] for name in sorted(found) if name.startswith(tuple(f"{part}." for part in shared))}


def _schedule(recipe: Recipe, where: Placement, stages: Sequence[CompressedStage], loss: WholeBatchLoss) -> Any:
    """The schedule: torch's own in a real run; in one process, torch's order merged into one list."""
    pipeline = recipe.pipeline
    if where.process_of == real_placement(recipe, dist.get_rank()).process_of:
        return build(pipeline.schedule, stages, pipeline.num_microbatches, loss)
    order = actions(pipeline.schedule, pipeline.num_stages, pipeline.num_processes, pipeline.num_microbatches)
    return build_merged(merge(order), stages, pipeline.num_microbatches, loss)
