"""Decides whether a claim holds, by differences of scores over seeds and their spread.

The two scores of a claim are subtracted seed by seed, so an effect that a seed has on both cancels. The mean of the n
differences has the standard error std / sqrt(n). A claim "above x" holds if mean - t * error > x, and does not hold if
mean + t * error < x; otherwise the data cannot decide, as with one seed. t is Student's, one-sided at 95 %, with n - 1
degrees of freedom. Nor can they decide while a cell of the claim is missing or has no score: such seeds are not left
out by chance.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from thinwire.launch.study.definition import Claim, Row, Side

if TYPE_CHECKING:
    from pandas import DataFrame, Series

Ruling = Literal["holds", "does not hold", "cannot tell"]

RULE = (
    "Scores are subtracted seed by seed. A claim holds if the mean difference lies beyond its number by more than t "
    "standard errors, and does not hold if it lies on the other side by as much; t is Student's, one-sided at 95 %: "
    "6.31 for two seeds, 2.92 for three, 2.35 for four. Otherwise, and with one seed, the data cannot decide; nor can "
    "they while a cell of the claim is missing, or has diverged and has no score."
)

_T = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753, 1.746)
"""Student's t, one-sided at 95 %, for 1, 2, 3... degrees of freedom."""


@dataclass(frozen=True)
class Judged:
    """A claim, and the result of the cells for it, under the names of report.json."""

    claim: Claim
    verdict: Ruling
    seeds: tuple[int, ...]
    """The seeds for which both sides have a score."""
    difference: float | None
    """The mean difference; None if there is none."""
    standard_error: float | None
    """The standard error of the mean; None for fewer than two seeds."""
    published: float | None
    """The published difference; None where a side has no published score."""


def judge(claim: Claim, results: DataFrame, rows: Mapping[str, Row], *, missing: Collection[str] = ()) -> Judged:
    """Judge a claim by the scores of the cells, a cell a line with its row and its seed.

    `missing` are the rows that have cells without results.
    """
    by_seed = results.set_index("seed")

    def score(side: Side) -> Series[float]:
        return by_seed[by_seed["row"] == side.row].reindex(columns=[side.mode]).iloc[:, 0]

    def published(side: Side) -> float:
        return rows[side.row].published.get(side.mode, math.nan)

    compared = score(claim.of) - score(claim.minus)
    differences = compared.dropna().sort_index()
    mean = float(differences.mean()) if len(differences) else None
    error = float(differences.sem()) if len(differences) > 1 else None
    theirs = published(claim.of) - published(claim.minus)
    verdict: Ruling = "cannot tell"
    if mean is not None and error is not None and len(differences) == len(compared):
        number, side = bound_of(claim)
        distance, needed = side * (mean - number), _T[min(len(differences) - 1, len(_T)) - 1] * error
        if abs(distance) > needed and not {claim.of.row, claim.minus.row}.intersection(missing):
            verdict = "holds" if distance > 0 else "does not hold"
    seeds = tuple(map(int, differences.index))
    return Judged(claim, verdict, seeds, mean, error, None if math.isnan(theirs) else theirs)


def bound_of(claim: Claim) -> tuple[float, int]:
    """The number of a claim, and on which side of it the difference must lie: 1 above, -1 below."""
    if claim.above is not None:
        return claim.above, 1
    assert claim.below is not None, "a claim has one of the two"
    return claim.below, -1
