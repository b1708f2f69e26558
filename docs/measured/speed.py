r"""Draw samples/s over bandwidth, and the held-out loss of the same codecs.

    for rate in none 495mbit 62.35mbit 31.36mbit 18.51mbit 6.25mbit; do
        sudo python examples/slow_links.py --hosts 2 --rate $rate --pin -- \
            python docs/measured/links.py docs/measured/links.yaml --links $rate --out "$PWD/speed.json"
    done
    thinwire study docs/measured/codecs.yaml
    python docs/measured/speed.py speed.json studies/codecs/all/report.json speed.png      # and speed.svg

`bench-links.json` holds what the bench wrote, with links named for the page, and `codecs.json` the report of the study.
It prints the table of `bench-links.md`.
"""

import re
import sys
from pathlib import Path

from documents import read_document
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thinwire.launch.shared.tables import Table

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


def read_speeds(document: str) -> dict[str, dict[str, dict]]:
    """The rows of a bench by links and contender."""
    [table] = read_document(document)[1]
    found: dict[str, dict[str, dict]] = {}
    for cells in table.rows:
        row = dict(zip(table.columns, cells, strict=True))
        found.setdefault(str(row["links"]), {})[str(row["who"])] = row
    return found


def speed_table(document: str) -> str:
    """Samples/s of each contender over each link, as Markdown."""
    found = read_speeds(document)
    contenders = dict.fromkeys(who for rows in found.values() for who in rows)
    lines = [f"| samples/s | {' | '.join(found)} | MB a step |", "|---" * (len(found) + 2) + "|"]
    for who in contenders:
        own = [rows.get(who) for rows in found.values()]
        cells = ["" if row is None else f"{row['samples/s']:.2f}" for row in own]
        sent = next(row["MB a step"] for row in own if row)
        name = who if who.startswith("torch") else f"`{who}`"
        lines.append(f"| {name} | {' | '.join(cells)} | {f'{sent:.4g}' if sent else ''} |")
    return "\n".join(lines)


def draw_speed(axes: Axes, document: str) -> None:
    """The measured speed of each contender as a line with points; beside them unshaped links, as a line across."""
    found = read_speeds(document)
    rates = {links: float(rate[1]) for links in found if (rate := re.match(r"([\d.]+)mbit", links))}
    for contender, (label, colour) in LINES.items():
        points = sorted(
            (rates[links], found[links][contender]["samples/s"]) for links in rates if contender in found[links]
        )
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=colour, label=label, markersize=4)
    if free := found.get("unshaped", {}).get("none"):
        axes.axhline(free["samples/s"], color="black", linestyle=":", linewidth=1, label="uncompressed, unshaped link")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("bandwidth of the link, Mbit/s")
    axes.set_ylabel("samples/s")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="lower right")


if __name__ == "__main__":
    bench, study, target = map(Path, sys.argv[1:])
    print(speed_table(bench.read_text()))
    figure = draw(bench.read_text(), study.read_text())
    for kind in (".png", ".svg"):
        figure.savefig(target.with_suffix(kind), metadata={"Date": None} if kind == ".svg" else None)
