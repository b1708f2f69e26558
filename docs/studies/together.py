"""The claims of a study, judged over seeds that were trained at different times, each in a report of its own.

python docs/studies/together.py open-questions FIRST.md SECOND.md
"""

import sys
from pathlib import Path
from statistics import fmean, stdev

from thinwire.launch.study.cells import Cell
from thinwire.launch.study.definition import MODES, read_study
from thinwire.launch.study.judge import judge
from thinwire.launch.study.results import Result
from thinwire.launch.study.tables import claims_table

FINISHED = "## Finished cells"


def results(report: Path) -> list[Result]:
    """The scores of the finished cells of a report."""
    lines = report.read_text().partition(FINISHED)[2].partition("\n## ")[0].splitlines()
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    columns = {mode: next(place for place, name in enumerate(header) if name.endswith(f" {mode}")) for mode in MODES}
    return [
        Result(
            cell=Cell(row=row[0], seed=int(row[1]), folder=Path(), arguments=(), asked=()),
            scores={mode: float(row[place]) for mode, place in columns.items()},
            bits={},
            full=0.0,
            seconds=0.0,
            digest="",
            made={},
        )
        for row in rows
    ]


def main() -> None:
    """Print the scores and the claims in Markdown."""
    study = read_study(sys.argv[1])
    found = [result for report in sys.argv[2:] for result in results(Path(report))]
    print(
        "| row | " + " | ".join(f"{mode}, by seed | mean | std" for mode in MODES) + " |\n|---|" + "---|---:|---:|" * 2
    )
    for name in study.rows:
        own = sorted((result for result in found if result.cell.row == name), key=lambda result: result.cell.seed)
        cells = []
        for mode in MODES:
            scores = [result.scores[mode] for result in own]
            cells += [", ".join(f"{score:.2f}" for score in scores), f"{fmean(scores):.2f}", f"{stdev(scores):.2f}"]
        print(f"| {name} | {' | '.join(cells)} |")
    table = claims_table(study, [judge(claim, found, study.all_rows) for claim in study.claims])
    print(f"\n| {' | '.join(table.columns)} |\n|{'---|' * len(table.columns)}")
    for line in table.texts:
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    main()
