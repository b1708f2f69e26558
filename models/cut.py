"""A model cut into stages for the samples of a run: whether they fit, the layers of each stage, what each hands on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from thinwire.errors.calls import message_of
from thinwire.models.costs import operations
from thinwire.models.data.chats import require_positions
from thinwire.models.data.endings import missing
from thinwire.models.data.pairs import require_ends
from thinwire.models.data.samples import Data, Samples
from thinwire.models.errors import ModelError
from thinwire.models.layers import Blueprint, stage_output_examples
from thinwire.models.partition import cut_after, explicit, partition
from thinwire.models.precision import Precision
from thinwire.models.tasks import Classification, Task


def fitted(model: Blueprint, data: Data) -> tuple[Blueprint, Data]:
    """The model, which ends its answers as the data do, and the data with a sentence if it did not.

    Raises:
        ModelError: samples would not go through the model as they would by themselves.
    """
    require_positions(model.side, data.training.side_example(1))
    for samples in filter(None, (data.training, data.held_out)):
        require_ends(model.padding, samples)
        require_one_way(model.switch, samples)
    more = missing(model.ends(), data.ends)
    if not more:
        return model, data
    note = (
        f"answers end by token {' and '.join(map(str, more))}, which the generation settings of the model do not "
        "name: those of this run and its exports do"
    )
    return replace(model, more_ends=tuple(more)), replace(data, notes=(*data.notes, note))


def require_one_way(switch: int | None, samples: Samples) -> None:
    """Raise ModelError if a model computes short texts in another way than long ones, and sees both in one block."""
    length = samples.example(1).shape[1]
    if switch is None or length <= switch:
        return
    packed, shortest = "position_ids" in samples.side_example(1), samples.lengths
    if packed or (shortest is not None and int(shortest.min()) <= switch):
        raise ModelError(
            f"data.block_size must be at most {switch}, because this model turns longer texts by other factors "
            f"(longrope), and takes a short one for long beside {'another' if packed else 'padding'}, got {length}"
        )


def layers_of_stages(
    model: Blueprint,
    wanted: Sequence[int | str] | None,
    num_stages: int,
    samples: Samples,
    rows: int,
    precision: Precision,
) -> tuple[range, ...]:
    """The layers of each stage: as many as `wanted` says, up to the layers that it names, or of equal costs if None.

    Costs are counted for a micro-batch of so many `rows`: every process gets the same numbers.

    Raises:
        ModelError: the model cannot be cut in this way.
    """
    if wanted is None:
        try:
            costs = operations(model, samples.example(rows), precision, samples.side_example(rows))
        except Exception:  # the code of the model fails; `outputs_of_stages` runs it again and reports the error
            costs = tuple(layer.cost for layer in model.layers)
        return partition(costs, num_stages)
    if any(isinstance(entry, str) for entry in wanted):
        return cut_after([str(entry) for entry in wanted], [layer.name for layer in model.layers])
    return explicit([int(entry) for entry in wanted], len(model.layers))


def outputs_of_stages(
    model: Blueprint, cuts: Sequence[range], samples: Samples, rows: int, precision: Precision, task: Task
) -> tuple[tuple[Tensor, ...], ...]:
    """The outputs of the stages for a micro-batch of so many `rows`, as meta tensors.

    Raises:
        ModelError: the model cannot read such samples, its layers do not fit, or it has too few outputs for the task.
    """
    example = samples.example(rows)
    try:
        found = stage_output_examples(model, cuts, example, precision, side=samples.side_example(rows))
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"the model must be able to read samples such as {str(example.dtype).removeprefix('torch.')} of shape "
            f"{list(example.shape)}, and each layer the output of the layer before; it fails with: {message_of(error)}"
        ) from error
    if isinstance(task, Classification):  # without a loss of the user's own
        width = found[-1][0].shape[-1]
        if width < task.num_labels:
            raise ModelError(
                f"the model must have an output for each of the {task.num_labels} classes of the data, got {width}"
            )
    return tuple(found)
