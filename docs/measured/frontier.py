"""The tables of models trained here in frontier.md: bits really sent and held-out loss, from the reports of studies.

    python docs/measured/frontier.py REPORT.json ..

A pair of codecs is on the frontier if no pair with fewer bits has a lower loss. Bits are the mean of both directions.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from documents import read_document

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


def main() -> None:
    """Print a table for each report."""
    for report in sys.argv[1:]:
        title, pairs = pairs_of(report)
        print(f"\n{title}\n\n{table(pairs)}")


if __name__ == "__main__":
    main()
