"""What crosses the cuts of a cell: how much of its energy the largest values hold, and how large its channels are.

TopK keeps the largest values. So it loses much where the energy is spread over all of them, and little where a few
values or channels hold most. Measured is one step from the first weights of a cell, and one from the last. The numbers
are kept in `energy.json` in the cell's folder, until the cell has other weights.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from thinwire.compress.stores.durable import write_durably
from thinwire.launch.run import recipe
from thinwire.launch.shared.strict_json import dumps, without_nan
from thinwire.launch.study.cells import Cell
from thinwire.launch.study.definition import Signal
from thinwire.launch.study.progress import read_json, weights_digest
from thinwire.pipeline.frames import CHANNELS

if TYPE_CHECKING:
    from torch import Tensor

Measures = dict[str, float | None]
"""Of one signal, the median over all cuts: energy, kurtosis and the largest channel, by name."""


def energy_of(cell: Cell, percent: float, prog: str) -> dict[Signal, Measures]:
    """The measures of a finished cell: kept ones, or new ones, which are written into its folder.

    Raises:
        ThinwireError: the recipe, its data or its weights cannot be read.
    """
    path, digest = cell.folder / "energy.json", weights_digest(cell.folder)
    kept = read_json(path)
    if (kept.get("weights"), kept.get("percent")) != (digest, percent):
        # as the cell ran: options of the command line, such as the data, are in its recipe alone
        weights = ["--model.weights", str(cell.base)] if cell.base else []
        first = recipe.parse([str(cell.folder / "recipe.yaml"), *weights], prog=prog)
        last = replace(first, model=replace(first.model, weights=str(cell.folder)))
        signals = {
            f"{channel} at the {when}": measures
            for when, wanted in (("start", first), ("end", last))
            for channel, measures in _measured(wanted, percent).items()
        }
        kept = {"weights": digest, "percent": percent, "signals": signals}
        try:
            write_durably(path, f"{dumps(kept, indent=1)}\n".encode())
        except OSError as error:
            print(f"{path} cannot be written, so the next report measures again: {error.strerror}", file=sys.stderr)
    found: dict[Signal, Measures] = kept["signals"]
    return found


def _measured(wanted: recipe.Recipe, percent: float) -> dict[str, Measures]:
    """The measures of each channel in the first step of a recipe."""
    from thinwire.launch.shared.capture import capture

    one_step = replace(wanted, training=replace(wanted.training, epochs=None))
    by_cut: dict[tuple[str, int], list[Tensor]] = {}
    for passage, tensor in capture(one_step, 1).items():
        by_cut.setdefault((passage.channel, passage.boundary), []).append(tensor)
    found = {cut: measured(tensors, percent) for cut, tensors in by_cut.items()}
    by_channel = {channel: [one for (name, _), one in found.items() if name == channel] for channel in CHANNELS}
    return {
        channel: without_nan({name: median(one[name] for one in own) for name in own[0]})
        for channel, own in by_channel.items()
    }


def measured(tensors: Sequence[Tensor], percent: float) -> dict[str, float]:
    """How few values hold how much of the energy, of the micro-batches of one cut; sizes are relative to the rms.

    Args:
        tensors: samples first; of images channels second, else channels last.
        percent: how many of the values of each sample are taken, the largest first.
    """
    import torch

    samples_BN = torch.cat([tensor.flatten(1).double() for tensor in tensors])
    last = [tensor.movedim(1, -1) if tensor.dim() == 4 else tensor for tensor in tensors]
    channels = torch.cat([tensor.flatten(0, -2).double() for tensor in last]).square().mean(0).sqrt()
    squares_BN = samples_BN.square()
    count = max(1, round(samples_BN.shape[1] * percent / 100))
    centred = samples_BN - samples_BN.mean()
    return {
        "energy": float(100 * squares_BN.topk(count).values.sum() / squares_BN.sum()),
        "excess kurtosis": float(centred.pow(4).mean() / centred.square().mean().square() - 3),
        "largest channel / median": float(channels.max() / channels.median()),
    }
