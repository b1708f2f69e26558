"""The model of a recipe in layers, cut into stages, and checked against its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from thinwire.errors import attempt
from thinwire.errors.names import first_of
from thinwire.launch.plan.prepared import Prepared
from thinwire.launch.plan.prompts import read_prompts
from thinwire.launch.recipe.recipe import Recipe
from thinwire.models.costs import operations
from thinwire.models.data.chats import require_positions
from thinwire.models.data.endings import missing
from thinwire.models.data.kinds import more_samples
from thinwire.models.data.pairs import require_ends
from thinwire.models.data.samples import Data, Samples
from thinwire.models.errors import ModelError, require
from thinwire.models.layers import Blueprint, check_weights, stage_output_examples
from thinwire.models.partition import cut_after, explicit, partition
from thinwire.models.source import ModelSource, Use
from thinwire.models.tasks import Classification
from thinwire.pipeline.replicas.exchange import check_fit
from thinwire.pipeline.wire.channel import AS_IT_IS


def cut(recipe: Recipe, source: ModelSource, data: Data) -> Prepared:
    """The model of a recipe, cut into its stages. The recipe says whether a tied head stays one weight.

    Raises:
        ModelError: the model does not fit the data, or cannot be cut in this way. One error names as many mistakes as
            possible.
    """
    model = source.blueprint(_use(recipe, data))
    require_positions(model.side, data.training.side_example(1))
    for samples in filter(None, (data.training, data.held_out)):
        require_ends(model.padding, samples)
        require_one_way(model.switch, samples)
    if recipe.model.tied is None and model.head is not None:
        recipe = replace(recipe, model=replace(recipe.model, tied=model.head))
    cuts, _, unread = attempt(
        lambda: _cut(model, recipe, data), lambda: _check_samples(data, recipe), lambda: check_weights(model)
    )
    if unread:
        note = f"the files of the weights hold tensors that this model does not read: {first_of(unread)}"
        data = replace(data, notes=(*data.notes, note))
    if more := missing(model.ends(), data.ends):
        note = (
            f"answers end by token {' and '.join(map(str, more))}, which the generation settings of the model do not "
            "name: those of this run and its exports do"
        )
        model, data = replace(model, more_ends=tuple(more)), replace(data, notes=(*data.notes, note))
    prepared = Prepared(recipe, source, model, cuts, data, outputs=())
    outputs = _outputs(prepared)
    check_fit(model, recipe.replicas)
    require(
        (
            bool(model.shared) or recipe.compression.method_of_shared == AS_IT_IS,
            f"compression.shared must be none where no two stages hold the same weights, got "
            f"{recipe.compression.shared}; drop it, or set model.tied: sum where the head is the embedding",
        )
    )
    prompts = read_prompts(recipe, model, outputs) if recipe.training.prompts else None
    return replace(prepared, outputs=outputs, prompts=prompts)


def require_one_way(switch: int | None, samples: Samples) -> None:
    """Raise ModelError if a model computes short texts in another way than long ones, and sees both in one block."""
    length = samples.example(1).shape[1]
    if switch is None or length <= switch:
        return
    packed, shortest = "position_ids" in samples.side_example(1), samples.lengths
    require(
        (
            not packed and (shortest is None or int(shortest.min()) > switch),
            f"data.block_size must be at most {switch}, because this model turns longer texts by other factors "
            f"(longrope), and takes a short one for long beside {'another' if packed else 'padding'}, got {length}",
        )
    )


def _use(recipe: Recipe, data: Data) -> Use:
    """What a recipe and its data ask of the model."""
    common = Use(task=recipe.data.task, num_labels=data.num_labels)
    if data.vocab_size is None:
        return replace(common, channels=data.training.example(1).shape[1])
    length = recipe.data.block_size
    tokens = recipe.pipeline.batch_size * length
    return replace(common, vocab_size=data.vocab_size, block_size=length, step_tokens=tokens)


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
