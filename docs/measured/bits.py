"""The numbers and pictures of bits.md: bits really sent against signal to noise, for tensors of several kinds.

    python docs/measured/bits.py [TENSORS]

It writes bits.json and three pictures beside itself, each also as SVG, and prints the tables of bits.md. It trains two
recipes for their tensors. If TENSORS, a file, exists, it takes them from there; else it keeps them there.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from thinwire.compress import Codec, parse
from thinwire.launch.bench.codecs.capture import snapshots
from thinwire.launch.bench.codecs.trial import Quality, quality
from thinwire.launch.run import recipe
from thinwire.pipeline.frames import CHANNELS

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "codecs"))  # auto_grid, normal, rotated, short_scales
FAMILIES = {
    "q": [f"q({bits})" for bits in (1, 2, 3, 4, 5, 6)],
    "q, minmax": [f'q({bits}, scale="minmax")' for bits in (1, 2, 3, 4, 5, 6)],
    "q, clip": [f'q({bits}, clip="mse")' for bits in (1, 2, 3, 4, 5)],
    "q, auto, clip": [f'auto_grid.Auto({bits}, clip="mse")' for bits in (1, 2, 3, 4, 5)],
    "q, groups, clip": [f'short_scales.ByteScales({bits}, group=32, clip="mse")' for bits in (1, 2, 3, 4, 5)],
    "q, rotated": [f'rotated.Rotated("q({bits})")' for bits in (2, 3, 4, 5, 6)],
    "q, outliers": [f"q({bits}, outliers=0.01)" for bits in (1, 2, 3, 4, 5)],
    "q, coded": [f'q({bits}, code="entropy")' for bits in (2, 3, 4, 5, 6)],
    "q, midtread, a sample, coded": [
        f'q({bits}, per="sample", grid="midtread", code="entropy")' for bits in (2, 3, 4, 5, 6, 7, 8)
    ],
    "q, auto, clip, coded": [f'auto_grid.Auto({bits}, clip="mse", code="entropy")' for bits in (2, 3, 4, 5)],
    "nf": [f"normal.Normal({bits})" for bits in (1, 2, 3, 4)],
    "nf, rotated": [f'rotated.Rotated("normal.Normal({bits})")' for bits in (1, 2, 3, 4)],
    "nf, coded": [f'normal.Normal({bits}, code="entropy")' for bits in (3, 4)],
    "fp8, coded": ['fp8(code="entropy")'],
    "topk": [f'topk({share}, values="q(4)", code="entropy")' for share in (0.02, 0.1, 0.3, 0.5, 0.7)],
    "randk": [f'randk({share}, values="q(4)")' for share in (0.1, 0.3, 0.5)],
    "lowrank": [f'lowrank({rank}, values="q(8)")' for rank in (8, 16, 32, 48, 64)],
}
"""Expressions by method, ascending in bits."""
WHOLE = ("none", 'none(code="entropy")', "fp16", 'fp16(code="entropy")', "bf16", 'bf16(code="entropy")', "q(8)")
"""Codecs of many bits: in a table, not in the pictures."""
GROUPS = ("short_scales.ByteScales(4, group=32)",)
"""Codecs of small groups: in a table, not in the pictures."""
IN_TABLE = (
    *(
        "q(2)",
        "q(4)",
        'q(2, clip="mse")',
        'q(4, clip="mse")',
        'auto_grid.Auto(4, clip="mse")',
        "normal.Normal(2)",
        "normal.Normal(4)",
    ),
    *GROUPS,
    *(
        'rotated.Rotated("normal.Normal(4)")',
        "q(4, outliers=0.01)",
        'q(4, code="entropy")',
        'q(5, code="entropy")',
    ),
    *('q(5, per="sample", grid="midtread", code="entropy")', 'topk(0.3, values="q(4)", code="entropy")'),
    *('lowrank(16, values="q(8)")', 'lowrank(32, values="q(8)")', 'lowrank(48, values="q(8)")'),
    *('none(code="entropy")', 'bf16(code="entropy")'),
)
TRAINED = {"quickstart": ("GPT-2", (40, 350)), "resnet-tiny": ("ResNet", (40, 75))}
"""Recipes that give tensors: what they are called, and after how many steps."""
PICTURES = {
    "bits-distributions.png": ("Gaussian", "after ReLU", "heavy tails"),
    "bits-gpt2.png": tuple(f"GPT-2 {channel}, {when}" for channel in CHANNELS for when in ("early", "late")),
    "bits-resnet.png": tuple(f"ResNet {channel}, {when}" for channel in CHANNELS for when in ("early", "late")),
}
BOUND = 20 * torch.tensor(2.0).log10().item()
"""dB a bit: the rate-distortion bound of a Gaussian."""
MOST = 6.5
"""Bits an element at the right edge of a picture."""

Found = dict[str, dict[str, Quality]]
"""Quality by kind of tensor and expression."""


def kinds(kept: Path | None) -> dict[str, list[Tensor]]:
    """Tensors [512, 1024] of three distributions, and what crosses the boundaries of the recipes."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(512, 1024, generator=generator)
    # Student's t with 3 degrees of freedom: a Gaussian over the root of a mean of 3 squares
    heavy = (
        torch.randn(512, 1024, generator=generator)
        / torch.randn(3, 512, 1024, generator=generator).square().mean(0).sqrt()
    )
    if kept is not None and kept.exists():
        trained = torch.load(kept)
    else:
        trained = {key: messages for name in TRAINED for key, messages in captured(name).items()}
        if kept is not None:
            torch.save(trained, kept)
    return {"Gaussian": [noise], "after ReLU": [noise.relu()], "heavy tails": [heavy], **trained}


def captured(name: str) -> dict[str, list[Tensor]]:
    """The messages of a recipe, by kind: both channels, early and late."""
    title, after = TRAINED[name]
    wanted = recipe.parse([name, "--training.threads", "1"], prog="bits.py")
    found = snapshots(replace(wanted, training=replace(wanted.training, epochs=None)), after)
    return {
        f"{title} {channel}, {when}": [tensor for passage, tensor in found[step].items() if passage.channel == channel]
        for when, step in zip(("early", "late"), after, strict=True)
        for channel in CHANNELS
    }


def fitting(expression: str, messages: Sequence[Tensor]) -> Codec:
    """A codec for these messages: of images it has one scale a sample, because a channel's map has few elements."""
    codec: Any = parse(expression).codec
    by_row = getattr(codec, "per", None) == "row" and codec.group is None
    return replace(codec, per="sample") if messages[0].dim() == 4 and by_row else codec


def measure(data: Mapping[str, Sequence[Tensor]]) -> Found:
    """Every codec on every kind."""
    expressions = [*(expression for family in FAMILIES.values() for expression in family), *WHOLE, *GROUPS]
    return {
        kind: {expression: quality(fitting(expression, messages), messages) for expression in expressions}
        for kind, messages in data.items()
    }


def main() -> None:
    """Measure, print the tables, and write the JSON and the pictures."""
    torch.set_num_threads(1)
    found = measure(kinds(Path(sys.argv[1]) if sys.argv[1:] else None))
    here = Path(__file__).parent
    numbers = {
        kind: {name: [round(one.bits_per_element, 3), one.snr_db and round(one.snr_db, 2)] for name, one in row.items()}
        for kind, row in found.items()
    }
    (here / "bits.json").write_text(json.dumps(numbers, indent=1) + "\n")
    print_best(found)
    print_some(found)
    for name, shown in PICTURES.items():
        draw({kind: found[kind] for kind in shown}, here / name)


def print_best(found: Found) -> None:
    """The codec with the best signal to noise below each number of bits."""
    most = (1.1, 2.1, 3.1, 4.1, 5.1)
    print("| tensor |", *(f" at most {bits} bits |" for bits in most), sep="")
    print("|---" * (1 + len(most)), "|", sep="")
    for kind, row in found.items():
        cells = []
        for bits in most:
            fitting = {name: one for name, one in row.items() if one.bits_per_element <= bits and one.snr_db}
            name = max(fitting, key=lambda name: fitting[name].snr_db)
            cells.append(f" `{name}` {fitting[name].snr_db:.1f} |")
        print(f"| {kind} |", *cells, sep="")


def print_some(found: Found) -> None:
    """Bits and signal to noise of some codecs on every kind."""
    print("\n| codec |", *(f" {kind} |" for kind in found), sep="")
    print("|---" * (1 + len(found)), "|", sep="")
    for expression in IN_TABLE:
        cells = [row[expression] for row in found.values()]
        print(
            f"| `{expression}` |",
            *(f" {one.bits_per_element:.2f}: {f'{one.snr_db:.1f}' if one.snr_db else 'exact'} |" for one in cells),
            sep="",
        )


def draw(found: Found, path: Path) -> None:
    """A panel for each kind: a line a method, and the bound."""
    columns = 3 if len(found) == 3 else 2
    rows = -(-len(found) // columns)
    figure = Figure(figsize=(5.2 * columns + 2.2, 4.6 * rows), dpi=80, layout="constrained")
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flat
    for panel, (kind, row) in zip(panels, found.items(), strict=True):
        draw_kind(panel, row)
        panel.set_title(kind)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    for kind in (".png", ".svg"):
        figure.savefig(path.with_suffix(kind), metadata={"Date": None} if kind == ".svg" else None)


def draw_kind(panel: Axes, row: Mapping[str, Quality]) -> None:
    """The lines of one kind."""
    colours = colormaps["tab20"].colors  # type: ignore[attr-defined]
    for index, (family, expressions) in enumerate(FAMILIES.items()):
        points = [(row[name].bits_per_element, row[name].snr_db) for name in expressions]
        panel.plot(*zip(*points, strict=True), "o-", ms=3, lw=1.2, color=colours[index], label=family)
    panel.plot([0, MOST], [0, MOST * BOUND], "k--", lw=1, label="bound of a Gaussian")
    panel.set(xlabel="bits an element", ylabel="signal to noise, dB", xlim=(0, MOST), ylim=(-5, 40))
    panel.grid(alpha=0.3)


if __name__ == "__main__":
    main()
