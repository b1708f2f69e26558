"""The tables and the picture of what a bit buys: bits really sent in one direction against the loss, on and off.

    python docs/measured/what_a_bit_buys.py PICTURE.png NAME=REPORT.json[,REPORT.json ...] ..     # and PICTURE.svg

Reports are those of the study what-a-bit-buys.yaml: a name has those of one scale, one for each seed. Each row of it
compresses activations or gradients, not both. The picture shows the first name.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from documents import read_document
from matplotlib.axes import Axes
from matplotlib.figure import Figure


class Point(NamedTuple):
    """A codec, the bits of a value that it sent, and of each seed the loss more than `none` of that seed."""

    codec: str
    bits: float
    on: list[float]
    off: list[float]


FAMILIES = {
    "q(8, step=": ("q(8, step=..)", "#d95f02"),
    "aqsgd(": ("AQ-SGD, coded first visits", "#1b9e77"),
    "q(": ("q(b), a scale a channel", "#7a7a7a"),
    "topk(": ("TopK", "#1b6ca8"),
    "": ("low rank", "#9467bd"),
}
"""How the expressions of a family begin, the first that fits: its label and its colour."""
LEAST = 0.001
"""Differences below are drawn there, as the axis has no 0."""


def points(paths: Sequence[str]) -> dict[str, list[Point]]:
    """The codecs of each channel, by bits."""
    found: dict[str, dict[str, Point]] = {"activations": {}, "gradients": {}}
    for path in paths:
        table = read_document(Path(path).read_text())[1][0]
        rows: list[dict[str, Any]] = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        [none] = [row for row in rows if row["row"] == "none"]
        for row in rows:
            channel, _, codec = str(row["row"]).partition(" ")
            if codec and row["seeds"]:
                point = found[channel].setdefault(codec, Point(codec, row[f"bits, {channel}"], [], []))
                for mode in ("on", "off"):
                    getattr(point, mode).append(row[f"loss {mode}, mean"] - none[f"loss {mode}, mean"])
    return {channel: sorted(each.values(), key=lambda point: point.bits) for channel, each in found.items()}


def tables(found: dict[str, dict[str, list[Point]]]) -> str:
    """The codecs as Markdown, and for each name the means over its seeds; gradients cost the same on and off."""
    lines = []
    for channel, mode in (("activations", "on"), ("activations", "off"), ("gradients", "on")):
        columns = [f"{channel}, {mode}" if channel == "activations" else channel, "bits", *found]
        lines += ["", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
        scales = [{point.codec: point for point in each[channel]} for each in found.values()]
        for codec, bits, *_ in next(iter(found.values()))[channel]:
            means = (round(mean(getattr(scale[codec], mode)), 3) + 0 if codec in scale else None for scale in scales)
            cells = ("" if each is None else f"{each:+.3f}" for each in means)
            lines.append(f"| `{codec}` | {bits:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines[1:])


def spread(found: dict[str, dict[str, list[Point]]]) -> Iterator[str]:
    """How far the seeds of a name differ at most, in rows that cost little and in all."""
    for name, each in found.items():
        differences = [
            (max(seeds) - min(seeds), f"{mode} {point.codec}", mean(seeds))
            for channel in each.values()
            for point in channel
            for mode, seeds in (("on", point.on), ("off", point.off))
            if len(seeds) > 1
        ]
        for bound in (0.2, math.inf):
            if of_these := [each for each in differences if abs(each[2]) < bound]:
                most, where, _ = max(of_these)
                yield f"{name}, rows below {bound}: seeds differ by at most {most:.3f}, {where}"


def draw(axes: Axes, channel: str, each: Sequence[Point]) -> None:
    """Loss over bits: a line for each family with compression on, crosses for compression off."""
    families: dict[str, list[Point]] = {}
    for point in each:
        families.setdefault(next(begin for begin in FAMILIES if point.codec.startswith(begin)), []).append(point)
    for begin, own in families.items():
        label, colour = FAMILIES[begin]
        bits = [point.bits for point in own]
        axes.plot(bits, [max(LEAST, mean(point.on)) for point in own], "o-", ms=4, lw=1, color=colour, label=label)
        axes.plot(bits, [max(LEAST, mean(point.off)) for point in own], "x", ms=5, color=colour)
    axes.set(title=f"{channel} alone", xlabel="bits a value, as sent", xscale="log", yscale="log")
    axes.set_xticks([1, 2, 3, 4, 6, 8], ["1", "2", "3", "4", "6", "8"])
    axes.set_yticks([LEAST, 0.01, 0.1, 1], [f"{LEAST:g} or less", "0.01", "0.1", "1"])
    axes.minorticks_off()
    axes.axhline(0.01, color="#7a7a7a", lw=0.8, ls=":")
    axes.grid(alpha=0.3)


def main() -> None:
    """Print the tables, and draw both channels side by side."""
    picture, *named = sys.argv[1:]
    found = {name: points(reports.split(",")) for name, _, reports in (each.partition("=") for each in named)}
    print(tables(found), *spread(found), sep="\n")
    figure = Figure(figsize=(11, 4.5), dpi=110, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (channel, each) in zip(panels, next(iter(found.values())).items(), strict=True):
        draw(axes, channel, each)
    panels[0].set_ylabel("held-out loss more than none, nats")
    panels[1].legend(*panels[0].get_legend_handles_labels(), frameon=False, fontsize=8)  # it has all families
    figure.suptitle("SmolLM2, fine-tuned in 4 stages: compression on (points) and off (crosses)", fontsize=11)
    for kind in (".png", ".svg"):
        figure.savefig(Path(picture).with_suffix(kind))


if __name__ == "__main__":
    main()
