"""The claims of a study, judged over seeds that were trained at different times, each in a report of its own.

python docs/studies/together.py open-questions FIRST.md SECOND.md
"""

import sys
from pathlib import Path

from pandas import DataFrame, concat

from thinwire.launch.study.definition import MODES, read_study
from thinwire.launch.study.judge import judge
from thinwire.launch.study.tables import claims_table

FINISHED = "## Finished cells"


def results(report: Path) -> DataFrame:
    """The scores of the finished cells of a report."""
    lines = report.read_text().partition(FINISHED)[2].partition("\n## ")[0].splitlines()
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    columns = {mode: next(place for place, name in enumerate(header) if name.endswith(f" {mode}")) for mode in MODES}
    return DataFrame(
        [
            {"row": row[0], "seed": int(row[1]), **{mode: float(row[place]) for mode, place in columns.items()}}
            for row in rows
        ]
    )


def main() -> None:
    """Print the scores and the claims in Markdown."""
    study = read_study(sys.argv[1])
    found = concat([results(Path(report)) for report in sys.argv[2:]]).sort_values("seed")
    print(
        "| row | " + " | ".join(f"{mode}, by seed | mean | std" for mode in MODES) + " |\n|---|" + "---|---:|---:|" * 2
    )
    for name in study.rows:
        cells = []
        for mode in MODES:
            scores = found.loc[found["row"] == name, mode]
            cells += [", ".join(f"{score:.2f}" for score in scores), f"{scores.mean():.2f}", f"{scores.std():.2f}"]
        print(f"| {name} | {' | '.join(cells)} |")
    table = claims_table(study, [judge(claim, found, study.all_rows) for claim in study.claims])
    print(f"\n| {' | '.join(table.columns)} |\n|{'---|' * len(table.columns)}")
    for line in table.texts:
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    main()
