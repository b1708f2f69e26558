"""The tables of a study's report: published numbers beside ours, claims, cells, and what is missing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev

from thinwire.launch.shared.tables import Table, Value
from thinwire.launch.study.cells import Cell
from thinwire.launch.study.definition import MODES, Claim, Mode, Row, Signal, Study
from thinwire.launch.study.energy import Measures
from thinwire.launch.study.judge import EXACT_RULE, RULE, Judged, bound_of
from thinwire.launch.study.results import Missing, Result, Twice
from thinwire.pipeline.frames import CHANNELS


def scores_table(study: Study, rows: Mapping[str, Row], results: Sequence[Result]) -> Table:
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
    for name, row in rows.items():
        own = [result for result in results if result.cell.row == name]
        gaps = [result.scores["on"] - result.scores["off"] for result in own if len(result.scores) == len(MODES)]
        lines.append(
            [
                name,
                *(row.published.get(mode) for mode in MODES if published),
                *(value for mode in MODES for value in _spread(study, own, mode)),
                _rounded(fmean(gaps)) if gaps else None,
                *(_mean([r.bits[channel] for r in own if channel in r.bits]) for channel in CHANNELS),
                round(100 * fmean(r.full for r in own), 1) if own else None,
                len(own),
            ]
        )
    note = (
        "Off and on: whether evaluation compressed. Mean, standard deviation and best are over seeds, after the last "
        "step. Bits an element were really sent in training: frames with their headers, warm-up and first visits "
        "included; in full is the share of rows that went uncompressed."
    )
    notes = [f"{name}: {row.note}." for name, row in rows.items() if row.note]
    title = f"{study.source or study.name}: {'published and ours' if published else 'scores'}"
    return Table(title, columns, lines, " ".join([note, *notes]))


def claims_table(study: Study, judged: Sequence[Judged]) -> Table:
    """A claim a line, with its differences and what they say."""
    columns = ["claim", "difference", "holds if", "published", "ours", "standard error", "seeds", "judged"]
    lines: list[list[Value]] = []
    for one in judged:
        claim = one.claim
        number, side = bound_of(claim)
        lines.append(
            [
                claim.claim,
                _compared(study, claim),
                f"{'above' if side > 0 else 'below'} {number:g}",
                _rounded(one.published),
                _rounded(one.mean),
                _rounded(one.error),
                len(one.seeds),
                one.verdict,
            ]
        )
    rule = EXACT_RULE if study.prediction else RULE
    energy = any(side.energy for one in judged for side in one.claim.sides.values())
    energy_words = ", or of shares of energy in percentage points where a claim names a signal" if energy else ""
    return Table("Claims", columns, lines, f"Differences are of {study.score}{_in(study)}{energy_words}. {rule}")


def _compared(study: Study, claim: Claim) -> str:
    """The scores of a claim, and what is made of them."""
    names = {
        side: side.row if study.prediction else f"{side.row} {side.energy or side.mode}"
        for side in claim.sides.values()
    }
    first = f"{names[claim.of]} {'-' if claim.minus else '/'} {names[claim.other]}"
    return f"({first}) - ({names[claim.than.of]} - {names[claim.than.minus]})" if claim.than else first


def energy_table(study: Study, rows: Mapping[str, Row], measured: Mapping[Cell, Mapping[Signal, Measures]]) -> Table:
    """A row of the study and a signal a line, the means over its seeds."""
    share = f"energy of the largest {study.energy:g} %, %"
    names = {
        "energy": share,
        "excess kurtosis": "excess kurtosis",
        "largest channel / median": "largest channel / median",
    }
    lines: list[list[Value]] = []
    for row in rows:
        own = [signals for cell, signals in measured.items() if cell.row == row]
        for signal in own[0] if own else ():
            found = [[value for one in own if (value := one[signal][name]) is not None] for name in names]
            lines.append([row, signal, *(_mean(values) if values else None for values in found)])
    note = (
        "What crosses the cuts in one step from the first weights of a cell, and in one from the last, before any "
        "codec: the median over the cuts, the mean over seeds. The largest values are those of each sample, as TopK "
        "takes them. Of a Gaussian the largest 10 % hold 44 % of the energy, and its kurtosis is 0. The last column "
        "compares the rms of channels."
    )
    return Table("What crosses the cuts", ["row", "signal", *names.values()], lines, note)


def predictions_table(study: Study, rows: Mapping[str, Row], results: Sequence[Result]) -> Table:
    """A row of a study of predictions a line: the published number and ours."""
    found = {result.cell.row: result.scores["on"] for result in results}
    digits = _decimals([row.published["on"] for row in rows.values() if "on" in row.published], found.values())
    lines: list[list[Value]] = []
    for name, row in rows.items():
        published = row.published.get("on")
        deviation = round(100 * (found[name] / published - 1), 1) if published else None
        lines.append([name, row.score or study.score, published, round(found[name], digits), deviation])
    notes = " ".join(f"{name}: {row.note}." for name, row in rows.items() if row.note)
    return Table(
        f"{study.source or study.name}: published and predicted",
        ["row", "score", "published", "predicted", "deviation, %"],
        lines,
        notes,
    )


def _decimals(published: Sequence[float], predicted: Iterable[float]) -> int:
    """How many decimals predictions have: as many as the published numbers, or else three digits of the largest."""
    if published:
        return max(len(f"{number:.15g}".partition(".")[2]) for number in published)
    largest = max(predicted, default=1.0)
    return max(0, 2 - math.floor(math.log10(largest))) if largest > 0 else 0


def cells_table(study: Study, results: Sequence[Result]) -> Table:
    """A finished cell a line."""
    columns = ["row", "seed", *(f"{study.score} {mode}" for mode in MODES), "minutes", "weights digest", "code"]
    lines: list[list[Value]] = [
        [
            result.cell.row,
            result.cell.seed,
            *(_rounded(result.scores.get(mode)) for mode in MODES),
            round(result.seconds / 60, 1),
            result.digest[:16],
            result.made.get("origin", {}).get("code"),
        ]
        for result in results
    ]
    note = "Minutes of a run, with evaluations and saves, on a machine that may have had other work."
    return Table("Finished cells", columns, lines, note)


def twice_table(pairs: Sequence[Twice]) -> Table:
    """A cell that was trained both ways a line."""
    columns = ["row", "seed", "one process", "a process for each stage", "equal"]
    lines: list[list[Value]] = [
        [
            *(pair.cell.row, pair.cell.seed, pair.simulated[:16], pair.processes[:16]),
            "yes" if pair.simulated == pair.processes else "no",
        ]
        for pair in pairs
    ]
    return Table("Trained twice: digests of the weights", columns, lines)


def missing_table(missing: Sequence[Missing]) -> Table:
    """A cell without a result a line."""
    lines: list[list[Value]] = [[one.cell.row, one.cell.seed, one.why] for one in missing]
    return Table("Missing cells", ["row", "seed", "why"], lines)


def _in(study: Study) -> str:
    return " in percentage points" if study.unit == "%" else ""


def _spread(study: Study, own: Sequence[Result], mode: Mode) -> tuple[float | None, float | None, float | None]:
    """Mean, standard deviation and best of the scores of a row."""
    scores = [result.scores[mode] for result in own if mode in result.scores]
    if not scores:
        return None, None, None
    best = min(scores) if study.smaller_is_better else max(scores)
    return _rounded(fmean(scores)), _rounded(stdev(scores)) if len(scores) > 1 else None, _rounded(best)


def _mean(values: Sequence[float]) -> float | None:
    return round(fmean(values), 2) if values else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
