"""Norms of gradients in the cells of a study, by row: the median of all steps, and the largest.

python docs/studies/norms.py studies/open-questions/small
"""

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path


def norms(cell: Path) -> list[float]:
    """The norm of the gradients of the whole model in each logged step of a cell, before clipping."""
    steps = map(json.loads, (cell / "metrics.jsonl").read_text().splitlines())
    return [step["grad_norm"] for step in steps if "grad_norm" in step]


def main() -> None:
    """Print a table in Markdown."""
    rows = defaultdict(list)
    for told in sorted(Path(sys.argv[1], "cells").glob("*/seed-*/cell.json")):
        rows[json.loads(told.read_text())["row"]].append(norms(told.parent))
    print("| row | median, by seed | largest, by seed |\n|---|---|---|")
    for row, cells in rows.items():
        medians = ", ".join(f"{statistics.median(cell):.3g}" for cell in cells)
        print(f"| {row} | {medians} | {', '.join(f'{max(cell):.3g}' for cell in cells)} |")


if __name__ == "__main__":
    main()
