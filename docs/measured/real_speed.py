"""The table and the picture of SmolLM2 over slow links, from the report of a bench.

python docs/measured/real_speed.py docs/measured/bench-smollm2.json docs/measured/real-speed.png     # and .svg
"""

import sys
from pathlib import Path

from matplotlib.figure import Figure
from speed import read_speeds, speed_table

CONTENDERS = {
    "torch fp32": ("plain torch, fp32", "#7a7a7a"),
    "torch bf16": ("plain torch, bf16 on the wire", "#b0b0b0"),
    "none": ("Thinwire, uncompressed", "#1f77b4"),
    "q(8, step=0.2)": ("Thinwire, q(8, step=0.2)", "#d95f02"),
    "aqsgd": ("Thinwire, AQ-SGD", "#1b9e77"),
}
"""How the contenders' names begin: label and colour."""


def draw(document: str) -> Figure:
    """Bars of samples/s, a group for each link."""
    found = read_speeds(document)
    figure = Figure(figsize=(8, 3.6), dpi=120, layout="constrained")
    axes, width = figure.subplots(), 0.8 / len(CONTENDERS)
    for place, (begin, (label, colour)) in enumerate(CONTENDERS.items()):
        heights = [
            next(row["samples/s"] for who, row in rows.items() if who.startswith(begin)) for rows in found.values()
        ]
        at = [group + (place - (len(CONTENDERS) - 1) / 2) * width for group in range(len(found))]
        axes.bar(at, heights, width, color=colour, label=label)
        for x, height in zip(at, heights, strict=True):
            axes.annotate(f"{height:.2f}", (x, height), xytext=(0, 2), textcoords="offset points", ha="center", size=7)
    axes.set_xticks(range(len(found)), [links.replace(", ", "\n") for links in found])
    axes.set_ylabel("samples/s")
    axes.set_ylim(top=1.35 * max(row["samples/s"] for rows in found.values() for row in rows.values()))
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper center")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    bench, target = map(Path, sys.argv[1:])
    print(speed_table(bench.read_text()))
    figure = draw(bench.read_text())
    for kind in (".png", ".svg"):
        figure.savefig(target.with_suffix(kind), metadata={"Date": None} if kind == ".svg" else None)
