"""A model cut into stages: the layers of each, and what each hands on for a micro-batch of samples."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from thinwire.models.costs import operations
from thinwire.models.data.samples import Samples
from thinwire.models.errors import ModelError, require
from thinwire.models.layers import Blueprint, stage_output_examples
from thinwire.models.partition import cut_after, explicit, partition
from thinwire.models.precision import Precision
from thinwire.models.tasks import Classification, Task


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
        reason = str(error).strip().partition("\n")[0].rstrip() or type(error).__name__
        raise ModelError(
            f"the model must be able to read samples such as {str(example.dtype).removeprefix('torch.')} of shape "
            f"{list(example.shape)}, and each layer the output of the layer before; it fails with: {reason}"
        ) from error
    if isinstance(task, Classification):  # without a loss of the user's own
        width = found[-1][0].shape[-1]
        require(
            (
                width >= task.num_labels,
                f"the model must have an output for each of the {task.num_labels} classes of the data, got {width}",
            )
        )
    return tuple(found)
