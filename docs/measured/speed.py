"""Draw samples/s over bandwidth, and the held-out loss of the same codecs.

    thinwire bench links --like aqsgd --json > speed.json
    thinwire study docs/measured/codecs.yaml
    thinwire study report docs/measured/codecs.yaml
    python docs/measured/speed.py speed.json studies/codecs/all/report.json speed.png      # and speed.svg

`bench-links.json` holds the two tables of the first command that the picture needs, and `codecs.json` the report of the
study. It prints the table of `bench-links.md`.
"""

import sys
from pathlib import Path

from matplotlib.axes import Axes
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


def draw(bench: str, study: str) -> Figure:
    """Speed over bandwidth, and beside it the held-out loss of the same codecs."""
    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    speeds, losses = figure.subplots(1, 2, width_ratios=[3, 1])
    draw_speed(speeds, bench)
    draw_loss(losses, study)
    for axes in (speeds, losses):
        axes.grid(color="#e0e0e0")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_loss(axes: Axes, document: str) -> None:
    """The mean held-out loss of each row of the study, with a point for each mode and its spread over seeds."""
    scores = read_document(document)[1][0]
    rows = {row: index for index, row in enumerate(name for name in LINES if name in column(scores, "row"))}
    for mode, marker in (("on", "o"), ("off", "x")):
        means, spreads = (column(scores, f"loss {mode}, {what}") for what in ("mean", "std"))
        for row, mean, spread in zip(column(scores, "row"), means, spreads, strict=True):
            axes.errorbar(rows[row], mean, spread, fmt=marker, color=LINES[row][1], capsize=4)
        axes.plot([], [], marker, color="black", label=f"compression {mode} in evaluation")
    axes.set_xticks(list(rows.values()), [row.replace("/", "/\n") for row in rows])
    axes.set_xlim(-0.5, len(rows) - 0.5)
    axes.set_ylabel("held-out loss, nats a byte")
    axes.legend(frameon=False, fontsize="small")


def read_speeds(document: str) -> tuple[Table, dict[str, float]]:
    """The speeds of a bench, and the goodput of each of its links in Mbit/s."""
    tables = read_document(document)[1]
    speeds = next(table for table in tables if "samples/s" in table.columns)
    links = next(table for table in tables if "goodput, Mbit/s" in table.columns)
    return speeds, dict(zip(column(links, "links"), column(links, "goodput, Mbit/s"), strict=True))


def speed_table(document: str) -> str:
    """Samples/s of each contender over each link, and in brackets the share of its LIMIT, as Markdown."""
    speeds, goodput = read_speeds(document)
    heads = (f"{link.removeprefix('as at ')}: {mbits:,g}" for link, mbits in goodput.items())
    lines = [f"| samples/s (of LIMIT) | {' | '.join(heads)} | MB a step |", "|---" * (len(goodput) + 2) + "|"]
    found = {(row[0], row[1]): dict(zip(speeds.columns, row, strict=True)) for row in speeds.rows}
    for who in dict.fromkeys(column(speeds, "who")):
        own = [found[link, who] for link in goodput]
        cells = (f"{row['samples/s']:.2f}" + (f" ({row['of LIMIT']:.2f})" if row["LIMIT"] else "") for row in own)
        sent = own[0]["MB a step"]
        lines.append(f"| {who if who.startswith('torch') else f'`{who}`'} | {' | '.join(cells)} | {sent or ''} |")
    return "\n".join(lines)


def draw_speed(axes: Axes, document: str) -> None:
    """The measured speed of each contender as a line with points, and its LIMIT as a dashed line."""
    speeds, goodput = read_speeds(document)
    measured = list(zip(*(column(speeds, name) for name in ("links", "who", "samples/s", "LIMIT")), strict=True))
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
    axes.legend(frameon=False, loc="lower right")


if __name__ == "__main__":
    bench, study, target = map(Path, sys.argv[1:])
    print(speed_table(bench.read_text()))
    figure = draw(bench.read_text(), study.read_text())
    for kind in (".png", ".svg"):
        figure.savefig(target.with_suffix(kind), metadata={"Date": None} if kind == ".svg" else None)
