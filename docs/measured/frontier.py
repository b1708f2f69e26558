"""The table and the picture of frontier.md: bits really sent against held-out loss, from the reports of two studies.

    python docs/measured/frontier.py REPORT.json .. PICTURE.png     # and PICTURE.svg beside it

A pair of codecs is on the frontier if no pair with fewer bits has a lower loss. Bits are the mean of both directions.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from thinwire.launch.shared.tables import read_document

_TRAINED = {"frontier": "quickstart, a GPT", "frontier-resnet": "resnet-tiny"}
"""What each study trains, by the name of its report."""
WORSE = 0.05
"""Pairs that lose more nats are in the report alone."""


@dataclass(frozen=True)
class Pair:
    """A row of a study, over its finished seeds."""

    name: str
    activations: float
    """Bits an activation, as sent."""
    gradients: float
    """Bits a gradient, as sent."""
    on: float
    """Mean held-out loss with compression on."""
    off: float
    """Mean held-out loss with compression off."""
    more: list[float]
    """Loss with compression on beyond that of `none` with the same seed, for each seed that both have."""
    seeds: int

    @property
    def bits(self) -> float:
        """Bits an element, the mean of both directions."""
        return (self.activations + self.gradients) / 2

    @property
    def mean(self) -> float | None:
        """The mean of `more`."""
        return fmean(self.more) if self.more else None

    @property
    def spread(self) -> float | None:
        """The standard deviation of `more`; None for one seed."""
        return stdev(self.more) if len(self.more) > 1 else None


def pairs_of(path: str) -> tuple[str, list[Pair]]:
    """The title of a study's report, and its rows with results, by bits."""
    title, tables = read_document(Path(path).read_text())
    scores, cells = (
        [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        for table in tables
        if {"seeds", "seed"} & set(table.columns) and "why" not in table.columns
    )
    losses = {(cell["row"], cell["seed"]): cell["loss on"] for cell in cells}
    found = [
        Pair(
            *(row[name] for name in ("row", "bits, activations", "bits, gradients", "loss on, mean", "loss off, mean")),
            more=[
                loss - losses["none", seed]
                for (name, seed), loss in losses.items()
                if name == row["row"] and ("none", seed) in losses
            ],
            seeds=row["seeds"],
        )
        for row in scores
        if row["seeds"]
    ]
    return title, sorted(found, key=lambda pair: pair.bits)


def frontier(pairs: list[Pair]) -> list[Pair]:
    """The pairs, ascending in bits, that no pair with fewer bits beats."""
    best: list[Pair] = []
    for pair in pairs:
        if not best or pair.on < best[-1].on:
            best.append(pair)
    return best


def table(pairs: list[Pair]) -> str:
    """The pairs as Markdown, without those that are off the frontier and lose more than `WORSE`."""
    best = frontier(pairs)
    lines = [
        "| activations/gradients | bits | loss, on | off | more than none | spread | frontier |",
        "|---" * 7 + "|",
    ]
    for pair in pairs:
        if pair not in best and pair.mean is not None and pair.mean > WORSE:
            continue
        more, spread = (
            "" if value is None else text.format(value)
            for value, text in ((pair.mean, "{:+.3f}"), (pair.spread, "{:.3f}"))
        )
        bits = f"{pair.activations:.2f} / {pair.gradients:.2f}"
        marked = "yes" if pair in best else ""
        lines.append(f"| `{pair.name}` | {bits} | {pair.on:.3f} | {pair.off:.3f} | {more} | {spread} | {marked} |")
    return "\n".join(lines)


def draw(axes: Axes, title: str, pairs: list[Pair]) -> None:
    """Loss over bits: a point a pair, a line through the frontier, whose pairs are numbered and named."""
    best = frontier(pairs)
    axes.step([pair.bits for pair in best], [pair.on for pair in best], where="post", color="#d95f02", lw=1)
    for pair in pairs:
        colour = "#d95f02" if pair in best else "#7a7a7a"
        axes.errorbar(pair.bits, pair.on, pair.spread, fmt="o", ms=4, color=colour, capsize=3)
        axes.plot(pair.bits, pair.off, "x", ms=4, color=colour)
    for number, pair in enumerate(best, 1):
        axes.annotate(str(number), (pair.bits, pair.on), xytext=(-12, -4), textcoords="offset points", color="#d95f02")
    names = [f"{number}  {pair.name}" for number, pair in enumerate(best, 1)]
    below = "\n".join(["bits an element, mean of both directions", "", *names])
    axes.set_xlabel(below, fontsize=8)
    axes.set(title=title, ylabel="held-out loss", xscale="log", yscale="log")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="y", which="minor", labelsize=8)
    axes.set_xticks([1, 2, 3, 4, 6, 8, 16, 32], ["1", "2", "3", "4", "6", "8", "16", "32"])
    axes.grid(alpha=0.3)


def main() -> None:
    """Print a table for each report, and draw them side by side."""
    *reports, picture = sys.argv[1:]
    figure = Figure(figsize=(8 * len(reports), 5.5), dpi=100, layout="constrained")
    panels = figure.subplots(1, len(reports), squeeze=False)[0]
    for axes, report in zip(panels, reports, strict=True):
        title, pairs = pairs_of(report)
        print(f"\n{title}\n\n{table(pairs)}")
        draw(axes, _TRAINED[Path(report).stem], pairs)
    for kind in (".png", ".svg"):
        figure.savefig(Path(picture).with_suffix(kind))


if __name__ == "__main__":
    main()
