"""The picture of Tables 1 to 5 of 2401.07788: what each row costs beside `none`, here by seed, and as published.

    python docs/studies/tables.py docs/studies/compression-tables-small.csv PICTURE.png     # and PICTURE.svg beside it

A difference is that to `none` of the same seed. Published costs of Table 5 are left out: they have another unit.
"""

import sys
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thinwire.launch.study.definition import read_study

HERE = {"on": "#d95f02", "off": "#1b6ca8"}
PUBLISHED = "#7a7a7a"


def costs(results: pd.DataFrame) -> pd.DataFrame:
    """What each row and seed of a table loses beside `none`, with compression on and off."""
    scores = results.set_index(["row", "seed"])[["on", "off"]]
    lost = scores.xs("none").sub(scores, level="seed")
    return lost.drop("none", level="row")


def draw(axes: Axes, number: int, results: pd.DataFrame) -> None:
    """One table: a line a row, a dot a seed, a stroke for the mean."""
    study = read_study(f"compression-table{number}")
    falls = study.score == "loss"
    lost = -costs(results) if falls else costs(results)
    rows = list(dict.fromkeys(lost.index.get_level_values("row")))
    none = study.rows["none"].published or read_study("compression-table1").rows["none"].published
    for place, row in enumerate(rows):
        for way, at in (("on", place - 0.16), ("off", place + 0.16)):
            seeds = lost.loc[row][way]
            axes.plot(seeds, [at] * len(seeds), "o", ms=3.5, color=HERE[way], alpha=0.6, lw=0)
            axes.plot([seeds.mean()] * 2, [at - 0.13, at + 0.13], color=HERE[way], lw=2)
            published = study.rows[row].published
            if not falls and way in published and way in none:
                axes.plot(none[way] - published[way], at, "D", ms=4.5, mfc="none", color=PUBLISHED)
    axes.axvline(0, color="black", lw=0.8)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set(title=f"Table {number}", xlabel="nats a byte more than none" if falls else "points less than none")
    axes.grid(axis="x", alpha=0.3)


def main() -> None:
    """Draw all five."""
    source, picture = sys.argv[1:]
    tables = pd.read_csv(source).groupby("table")
    figure = Figure(figsize=(14, 7), dpi=100, layout="constrained")
    panels = figure.subplots(2, 3).ravel()
    for axes, (number, results) in zip(panels, tables, strict=False):
        draw(axes, number, results)
    legend = panels[-1]
    legend.axis("off")
    for way, colour in HERE.items():
        legend.plot([], [], "o-", ms=3.5, color=colour, label=f"here, compression {way}: seeds and mean")
    legend.plot([], [], "D", ms=4.5, mfc="none", color=PUBLISHED, label="published, on the line of on and of off")
    legend.legend(loc="center", frameon=False)
    for kind in (".png", ".svg"):
        figure.savefig(Path(picture).with_suffix(kind))


if __name__ == "__main__":
    main()
