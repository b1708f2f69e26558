"""Whether a model and the samples of a run fit each other, beyond the numbers of tokens and classes."""

from __future__ import annotations

from dataclasses import replace

from thinwire.models.data.chats import require_positions
from thinwire.models.data.endings import missing
from thinwire.models.data.pairs import require_ends
from thinwire.models.data.samples import Data, Samples
from thinwire.models.errors import require
from thinwire.models.layers import Blueprint


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
    require(
        (
            not packed and (shortest is None or int(shortest.min()) > switch),
            f"data.block_size must be at most {switch}, because this model turns longer texts by other factors "
            f"(longrope), and takes a short one for long beside {'another' if packed else 'padding'}, got {length}",
        )
    )
