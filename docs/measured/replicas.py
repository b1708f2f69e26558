"""What the codec of the exchange between replicas costs in loss, and saves in bytes: a table.

    python docs/measured/replicas.py FOLDER [--pause FILE] [--table]

Every cell is a `thinwire simulate` of 2 replicas x 2 stages in a folder of its own. A cell that is done is not run
again, so the script goes on where it stopped. While FILE exists, no new cell begins. --table only prints the table of
the cells that are done.
"""

import argparse
import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

RECIPE = "convergence"
STEPS = 260
"""With 2 replicas a step has 32 samples, so 10 epochs are 260 steps."""
SEEDS = (0, 1)
COMMON = {
    "--replicas.count": "2",
    "--training.steps": str(STEPS),
    "--training.threads": "1",
    "--pipeline.num_microbatches": "2",
    "--pipeline.microbatch_size": "8",
}
SGD = {"--optimizer.name": "sgd", "--optimizer.lr": "0.5", "--optimizer.momentum": "0.9"}
"""A control: an optimizer that does not divide by a second moment."""
EXCHANGES: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "bf16": {"--replicas.gradients": "bf16"},
    "ef(q(8))": {"--replicas.gradients": 'ef(q(8, grid="midrise"))'},
    "ef(q(4))": {"--replicas.gradients": 'ef(q(4, grid="midrise"))'},
    'ef(q(4, grid="midtread"))': {"--replicas.gradients": 'ef(q(4, grid="midtread"))'},
    "ef(q(2))": {"--replicas.gradients": 'ef(q(2, grid="midrise"))'},
    "SGD, none": SGD,
    "SGD, ef(q(4))": SGD | {"--replicas.gradients": 'ef(q(4, grid="midrise"))'},
    "quantized-adam, 4 bits": {
        "--optimizer.name": "quantized-adam",
        "--optimizer.freeze_after": "52 steps",
        "--replicas.gradients": 'ef(q(4, grid="midtread"), store_bits=16)',
    },
    "quantized-adam, none": {"--optimizer.name": "quantized-adam", "--optimizer.freeze_after": "52 steps"},
    "DiLoCo, q(4), every 30": {"--replicas.gradients": 'q(4, grid="midrise")', "--replicas.sync.every": "30"},
    "SparseLoCo, every 30": {
        "--replicas.gradients": 'ef(topk(0.015625, values="means(2)", code="entropy"), decay=0.95)',
        "--replicas.sync.every": "30",
        "--replicas.sync.lr": "1.0",
        "--replicas.sync.momentum": "0.0",
    },
}
"""By name: the options of an exchange between replicas. Those of DiLoCo and SparseLoCo are the published ones.

quantized-adam freezes after a fifth of training."""
PIPELINES: Mapping[str, Mapping[str, str]] = {
    "none": {"--codec": "none/none"},
    "fw3 bw6": {"--codec": 'aqsgd(q(3, grid="midrise"))/q(6, grid="midrise")'},
}
"""By name: the codecs of the boundaries. fw3 bw6 is that of 2206.01299."""


@dataclass(frozen=True)
class Cell:
    """One run."""

    exchange: str
    pipeline: str
    seed: int

    @property
    def name(self) -> str:
        """The name of its folder."""
        kept = f"{self.exchange}-{self.pipeline}-{self.seed}"
        return "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in kept)

    def command(self, folder: Path) -> list[str]:
        """The command that runs it."""
        options = COMMON | EXCHANGES[self.exchange] | PIPELINES[self.pipeline] | {"--training.seed": str(self.seed)}
        words = [word for option in options.items() for word in option]
        return ["thinwire", "simulate", RECIPE, "--output", str(folder), *words]


def cells() -> Iterator[Cell]:
    """All cells, the first seed of all before the second."""
    for seed in SEEDS:
        for exchange in EXCHANGES:
            yield from (Cell(exchange, pipeline, seed) for pipeline in PIPELINES)


def result(folder: Path) -> Mapping | None:
    """The summary of a run that is done; None for another."""
    path = folder / "summary.json"
    summary = json.loads(path.read_text()) if path.is_file() else {"running": True}
    return None if summary["running"] else summary


def run(folder: Path, pause: Path | None) -> None:
    """Run all cells that are not done."""
    for cell in cells():
        own = folder / cell.name
        while pause is not None and pause.exists():
            time.sleep(5)
        if result(own) is None:
            print(cell.name, flush=True)
            subprocess.run([*cell.command(own), "--overwrite"], check=True, stdout=subprocess.DEVNULL)


def table(found: Mapping[Cell, Mapping]) -> str:
    """The cells that are done as Markdown."""
    heads = [
        *("between replicas", "boundaries", "kB a step between replicas", "kB a step over boundaries"),
        *(f"held-out loss, seed {seed}" for seed in SEEDS),
        "more than none, mean",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for exchange in EXCHANGES:
        for pipeline in PIPELINES:
            row = [found.get(Cell(exchange, pipeline, seed)) for seed in SEEDS]
            if any(row):
                base = [found.get(Cell("none", "none", seed)) for seed in SEEDS]
                lines.append(f"| `{exchange}` | {pipeline} | {' | '.join(_numbers(row, base))} |")
    return "\n".join(lines)


def _numbers(row: Sequence[Mapping | None], base: Sequence[Mapping | None]) -> list[str]:
    done = next(summary for summary in row if summary)
    between, over = (sum(part["bytes"] for part in done[name]) / done["steps"] for name in ("replicas", "channels"))
    losses = ["" if summary is None else f"{_loss(summary):.4f}" for summary in row]
    both = [_loss(one) - _loss(other) for one, other in zip(row, base, strict=True) if one and other]
    return [f"{between / 1e3:.1f}", f"{over / 1e3:.1f}", *losses, f"{fmean(both):+.4f}" if both else ""]


def _loss(summary: Mapping) -> float:
    """Held out, with compression on."""
    return summary["held_out"]["on"]["loss"]


def main() -> None:
    """Run what is not done, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pause", type=Path, help="a file; while it exists, no new cell begins")
    parser.add_argument("--table", action="store_true", help="only print the table")
    options = parser.parse_args()
    if not options.table:
        run(options.folder, options.pause)
    print(table({cell: done for cell in cells() if (done := result(options.folder / cell.name))}))


if __name__ == "__main__":
    main()
