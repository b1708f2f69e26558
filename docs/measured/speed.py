"""Draw samples/s over bandwidth from what `thinwire bench links --json` printed.

    thinwire bench links --like aqsgd --json > speed.json
    python docs/measured/speed.py speed.json speed.png

`bench-links.json` holds the two tables that the picture needs, as `bench-links.md` has them.
"""

import sys
from pathlib import Path

from matplotlib.figure import Figure

from thinwire.launch.shared.tables import Table, read_document

LINES = {
    "torch fp32": ("plain torch, fp32", "#7a7a7a"),
    "none": ("Thinwire, uncompressed", "#1f77b4"),
    "q(4)/q(8)": ("Thinwire, q(4)/q(8)", "#d95f02"),
    "q(3)/q(6)": ("Thinwire, q(3)/q(6)", "#1b9e77"),
}
"""By contender: its label and its colour."""


def column(table: Table, name: str) -> list:
    """The cells of a column."""
    return [row[table.columns.index(name)] for row in table.rows]


def draw(document: str) -> Figure:
    """The measured speed of each contender as a line with points, and its LIMIT as a dashed line."""
    tables = read_document(document)[1]
    speeds = next(table for table in tables if "samples/s" in table.columns)
    links = next(table for table in tables if "goodput, Mbit/s" in table.columns)
    goodput = dict(zip(column(links, "links"), column(links, "goodput, Mbit/s"), strict=True))
    measured = list(zip(*(column(speeds, name) for name in ("links", "who", "samples/s", "LIMIT")), strict=True))

    figure = Figure(figsize=(8, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for contender, (label, colour) in LINES.items():
        points = sorted((goodput[link], speed, limit) for link, who, speed, limit in measured if who == contender)
        if not points:
            continue
        bandwidths, reached, limits = zip(*points, strict=True)
        axes.plot(bandwidths, reached, "o-", color=colour, label=label, markersize=4)
        if None not in limits:
            axes.plot(bandwidths, limits, "--", color=colour, linewidth=1)
    axes.plot([], [], "--", color="black", linewidth=1, label="LIMIT of each")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("measured bandwidth of the link, Mbit/s")
    axes.set_ylabel("samples/s")
    axes.set_ylim(bottom=0)
    axes.grid(color="#e0e0e0")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    return figure


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    draw(source.read_text()).savefig(target)
