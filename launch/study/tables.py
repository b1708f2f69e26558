"""The tables of a study's report: published numbers beside ours, claims, cells, and what is missing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from pandas import DataFrame

from thinwire.launch.shared.tables import Table, Value, rounded
from thinwire.launch.study.cells import Cell
from thinwire.launch.study.definition import MODES, Claim, Row, Study
from thinwire.launch.study.judge import EXACT_RULE, RULE, Judged, bound_of
from thinwire.pipeline.frames import CHANNELS


def scores_table(study: Study, rows: Mapping[str, Row], results: DataFrame) -> Table:
    """A row of the study a line: published scores, ours with their spread, and the bits that were sent."""
    score = f"{study.score}, {study.unit}" if study.unit else study.score
    published = any(row.published for row in rows.values())
    columns = [
        "row",
        *(f"published {mode}" for mode in MODES if published),
        *(f"{score} {mode}, {what}" for mode in MODES for what in ("mean", "std", "best")),
        "on - off",
        *(f"bits, {channel}" for channel in CHANNELS),
        "in full, %",
        "seeds",
    ]
    lines: list[list[Value]] = []
    diverged = dict[str, int]()
    for name, row in rows.items():
        of_row = results[results["row"] == name]
        own = of_row.dropna(subset=[*MODES])
        diverged[name] = len(of_row) - len(own)
        best = own[[*MODES]].min() if study.score in ("loss", "perplexity") else own[[*MODES]].max()
        spread = [number for mode in MODES for number in (own[mode].mean(), own[mode].std(), best[mode])]
        lines.append(
            [
                name,
                *(row.published.get(mode) for mode in MODES if published),
                *(rounded(number, 3) for number in [*spread, (own["on"] - own["off"]).mean()]),
                *(rounded(of_row[channel].mean(), 2) for channel in CHANNELS),
                rounded(100 * of_row["full"].mean(), 1),
                len(own),
            ]
        )
    note = (
        "Off and on: whether evaluation compressed. Mean, standard deviation and best are over seeds, after the last "
        "step. Bits an element were really sent in training: frames with their headers, warm-up and first visits "
        "included; in full is the share of rows that went uncompressed."
    )
    lost = [f"{name}: diverged seeds, which have no score: {count}." for name, count in diverged.items() if count]
    title = f"{study.source or study.name}: {'published and ours' if published else 'scores'}"
    return Table(title, columns, lines, " ".join([note, *lost, *_notes(rows)]))


def claims_table(study: Study, judged: Sequence[Judged]) -> Table:
    """A claim a line, with its differences and what they say."""
    columns = ["claim", "difference", "holds if", "published", "ours", "standard error", "seeds", "judged"]
    lines: list[list[Value]] = []
    for one in judged:
        number, side = bound_of(one.claim)
        bound = f"{'above' if side > 0 else 'below'} {number:g}"
        numbers = map(_in_digits, (one.published, one.mean, one.error))
        lines.append([one.claim.claim, _compared(study, one.claim), bound, *numbers, len(one.seeds), one.verdict])
    rule = EXACT_RULE if study.prediction else RULE
    unit = " in percentage points" if study.unit == "%" else ""
    return Table("Claims", columns, lines, f"Differences are of {study.score}{unit}. {rule}")


def _compared(study: Study, claim: Claim) -> str:
    """The scores of a claim, and what is made of them."""
    names = {side: side.row if study.prediction else f"{side.row} {side.mode}" for side in claim.sides.values()}
    first = f"{names[claim.of]} {'-' if claim.minus else '/'} {names[claim.other]}"
    return f"({first}) - ({names[claim.than.of]} - {names[claim.than.minus]})" if claim.than else first


def _in_digits(number: float | None) -> float | None:
    """A number with three decimals, or more where fewer than two of its digits would be left."""
    return rounded(number, max(3, 1 - math.floor(math.log10(abs(number)))) if number else 3)


def predictions_table(study: Study, rows: Mapping[str, Row], results: DataFrame) -> Table:
    """A row of a study of predictions a line: the published number and ours."""
    found = dict(zip(results["row"], results["on"].tolist(), strict=True))
    digits = _decimals([row.published["on"] for row in rows.values() if "on" in row.published], found.values())
    lines: list[list[Value]] = []
    for name, row in rows.items():
        published = row.published.get("on")
        deviation = round(100 * (found[name] / published - 1), 1) if published else None
        lines.append([name, row.score or study.score, published, round(found[name], digits), deviation])
    title = f"{study.source or study.name}: published and predicted"
    return Table(title, ["row", "score", "published", "predicted", "deviation, %"], lines, " ".join(_notes(rows)))


def _decimals(published: Sequence[float], predicted: Iterable[float]) -> int:
    """How many decimals predictions have: as many as the published numbers, or else three digits of the largest."""
    if published:
        return max(len(f"{number:.15g}".partition(".")[2]) for number in published)
    largest = max(predicted, default=1.0)
    return max(0, 2 - math.floor(math.log10(largest))) if largest > 0 else 0


def cells_table(study: Study, results: DataFrame) -> Table:
    """A finished cell a line."""
    columns = ["row", "seed", *(f"{study.score} {mode}" for mode in MODES), "minutes", "weights digest", "code"]
    lines: list[list[Value]] = [
        [
            *(one.row, one.seed, *(rounded(getattr(one, mode), 3) for mode in MODES)),
            *(round(one.seconds / 60, 1), one.digest[:16], one.made.get("origin", {}).get("code")),
        ]
        for one in results.itertuples()
    ]
    note = "Minutes of a run, with evaluations and saves, on a machine that may have had other work."
    return Table("Finished cells", columns, lines, note)


def missing_table(missing: Mapping[Cell, str]) -> Table:
    """A cell without a result a line."""
    lines: list[list[Value]] = [[cell.row, cell.seed, why] for cell, why in missing.items()]
    return Table("Missing cells", ["row", "seed", "why"], lines)


def _notes(rows: Mapping[str, Row]) -> list[str]:
    """The notes of the rows, a sentence each."""
    return [f"{name}: {row.note}." for name, row in rows.items() if row.note]
