"""The numbers and pictures of distributions.md: activations and gradients at every cut, by epoch, of four small models.

    python docs/measured/distributions.py CIFAR10 WIKITEXT

CIFAR10 is a folder of train.parquet and test.parquet, WIKITEXT one of train.txt and test.txt. It trains, uncompressed,
the models of the scale `small` of four packaged studies, writes distributions.json and a picture for each model beside
itself, and prints the table.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor

from thinwire.launch.bench.codecs.capture import Passage, snapshots
from thinwire.launch.run import recipe
from thinwire.launch.shared.strict_json import without_nan
from thinwire.launch.study.cells import cells_of
from thinwire.launch.study.definition import read_study
from thinwire.pipeline.frames import CHANNELS

SCALE = "small"
TINY = 1e-12


def models(cifar10: str, wikitext: str) -> dict[str, tuple[str, list[str]]]:
    """What each model is called: the study of its recipe, and options that cut it at every layer or block."""
    every = ["--pipeline.num_stages", "10", "--pipeline.layers", json.dumps([1] * 10)]
    images = ["--data.name", cifar10]
    text = [
        "--data.name",
        f"{wikitext}/train.txt",
        "--data.evaluation",
        f"{wikitext}/test.txt",
        "--data.subset",
        "null",
    ]
    return {
        "ResNet": ("compression-table1", [*every, *images]),
        "ViT": ("open-questions", ["--pipeline.num_stages", "8", *images]),
        "BERT": ("open-questions-text", ["--pipeline.num_stages", "8"]),
        "GPT-2": ("aqsgd-convergence", text),
    }


EPOCHS = (0.0, 1.0, 3.0)
"""When tensors are kept; 0 is the first step."""


def captured(study: str, options: Sequence[str]) -> dict[float, dict[tuple[str, int], Tensor]]:
    """By epoch: what crosses each boundary in one step, [N, C] with the channel last, by (channel name, boundary)."""
    name, scale = read_study(study).scaled(SCALE)
    assert name == SCALE
    plain = cells_of(read_study(study), scale, Path("unused"), [*options, "--codec", "none/none"])[0]
    wanted = recipe.parse([*plain.arguments, "--training.threads", "1"], prog="distributions.py")
    per_epoch = steps_per_epoch(wanted)
    after = {epoch: max(1, round(epoch * per_epoch)) for epoch in EPOCHS}
    found = snapshots(replace(wanted, training=replace(wanted.training, epochs=None)), sorted(after.values()))
    return {epoch: joined(found[step]) for epoch, step in after.items()}


def steps_per_epoch(wanted: recipe.Recipe) -> int:
    """Optimizer steps of an epoch."""
    from thinwire.models.data.load import load

    return len(load(wanted.data).training) // wanted.batch_size


def joined(passages: Mapping[Passage, Tensor]) -> dict[tuple[str, int], Tensor]:
    """The micro-batches of each boundary and channel in one matrix, values by channel of the model."""
    parts: dict[tuple[str, int], list[Tensor]] = {}
    for passage, tensor in passages.items():
        last = tensor.movedim(1, -1) if tensor.dim() == 4 else tensor
        parts.setdefault((passage.channel, passage.boundary), []).append(last.reshape(-1, last.shape[-1]).double())
    return {key: torch.cat(tensors) for key, tensors in parts.items()}


def measured(values_NC: Tensor) -> dict[str, float]:
    """How far from a Gaussian: heavy tails, few large values, large channels."""
    values_NC = values_NC / values_NC.square().mean().sqrt().clamp_min(TINY)
    centred = values_NC - values_NC.mean()
    energy, largest = values_NC.square().sum(), values_NC.square().flatten().sort(descending=True).values
    channels = values_NC.square().mean(0).sqrt()
    return {
        "excess kurtosis": float(centred.pow(4).mean() / centred.square().mean().square() - 3),
        "largest / rms": float(values_NC.abs().max()),
        "zeros, %": float(100 * (values_NC == 0).double().mean()),
        "energy of the largest 1 %": float(100 * largest[: max(1, len(largest) // 100)].sum() / energy),
        "energy of the largest 10 %": float(100 * largest[: len(largest) // 10].sum() / energy),
        "largest channel / median": float(channels.max() / channels.median().clamp_min(TINY)),
    }


Numbers = dict[float, dict[tuple[str, int], dict[str, float]]]


def table(found: Mapping[str, Numbers]) -> str:
    """The last epoch: of each model and channel the boundary in the middle and the last one."""
    shown: list[str] = []
    lines: list[str] = []
    for model, numbers in found.items():
        rows = numbers[EPOCHS[-1]]
        last = max(boundary for _, boundary in rows)
        for (channel, boundary), row in sorted(rows.items()):
            if boundary in (last // 2, last):
                shown = list(row)
                lines.append(f"| {model}, {boundary} | {channel} | {' | '.join(map(_cell, row.values()))} |")
    head = [f"| cut after stage | channel | {' | '.join(shown)} |", "|---|---" + "|---:" * len(shown) + "|"]
    return "\n".join([*head, *lines])


def _cell(value: float) -> str:
    """A number in a table; a tensor of zeros has no kurtosis."""
    return "-" if math.isnan(value) else f"{value:.3g}"


def draw(title: str, tensors: Mapping[tuple[str, int], Tensor], numbers: Numbers, path: Path) -> None:
    """For each channel: how many values exceed a size, the size of each channel, and kurtosis by epoch."""
    figure = Figure(figsize=(13, 7), dpi=80, layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(2, 3)
    boundaries = sorted({boundary for _, boundary in tensors})
    colours = colormaps["viridis"](torch.linspace(0, 0.9, len(boundaries)).tolist())
    for channel, (tails, sizes, epochs) in zip(CHANNELS, panels, strict=True):
        for boundary, colour in zip(boundaries, colours, strict=True):
            values = tensors[channel, boundary]
            rms = values.square().mean().sqrt().clamp_min(TINY)
            sorted_ = (values.abs().flatten() / rms).sort(descending=True).values
            at = torch.unique(torch.logspace(0, torch.tensor(float(len(sorted_))).log10().item(), 200).long()) - 1
            tails.loglog(sorted_[at].clamp_min(1e-3), (at + 1) / len(sorted_), color=colour, lw=1.2)
            width = values.square().mean(0).sqrt().sort(descending=True).values / rms
            sizes.semilogy(torch.linspace(0, 1, len(width)), width.clamp_min(1e-3), color=colour, lw=1.2)
            line = [numbers[epoch][channel, boundary]["excess kurtosis"] for epoch in EPOCHS]
            epochs.plot(EPOCHS, line, "o-", ms=3, lw=1.2, color=colour, label=f"after stage {boundary}")
        gaussian = torch.linspace(0.1, 6, 200)
        tails.loglog(gaussian, torch.special.erfc(gaussian / 2**0.5), "k--", lw=1)
        tails.set(xlabel="size over rms", ylabel="share that exceeds it", title=f"{channel}: tails", ylim=(1e-6, 1.5))
        sizes.set(xlabel="channels, the largest first", ylabel="rms over rms of all", title=f"{channel}: channels")
        epochs.set(xlabel="epoch", title=f"{channel}: excess kurtosis", yscale="symlog")
        for panel in (tails, sizes, epochs):
            panel.grid(alpha=0.3)
    figure.legend(*panels[0][2].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    for kind in (".png", ".svg"):
        figure.savefig(path.with_suffix(kind), metadata={"Date": None} if kind == ".svg" else None)


def main() -> None:
    """Train, measure, write and print."""
    here, found = Path(__file__).parent, dict[str, Numbers]()
    for title, (study, options) in models(*sys.argv[1:3]).items():
        tensors = captured(study, options)
        found[title] = {
            epoch: {key: measured(values) for key, values in kept.items()} for epoch, kept in tensors.items()
        }
        draw(title, tensors[EPOCHS[-1]], found[title], here / f"distributions-{title.lower()}.png")
    print(table(found))
    told = {
        title: {
            str(epoch): {f"{channel} {boundary}": without_nan(row) for (channel, boundary), row in rows.items()}
            for epoch, rows in numbers.items()
        }
        for title, numbers in found.items()
    }
    (here / "distributions.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
