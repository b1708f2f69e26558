"""Runs side by side, compared with one of them: by run and by seed, over steps, bytes and time.

`thinwire report` compares the runs that it is given, and `thinwire study` the cells of a study by their rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.errors.words import listed
from thinwire.launch.comparison.plots import Curve, curves, points, running_mean
from thinwire.launch.comparison.runs import MODES, RunFiles, training_bytes, unit_of
from thinwire.launch.recipe.fields import WITHOUT_EFFECT, is_among
from thinwire.launch.results.figures import since
from thinwire.launch.shared.tables import Table, Value, rounded
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.frames import CHANNELS

if TYPE_CHECKING:
    from pandas import DataFrame, Series

Groups = Mapping[str, Sequence[RunFiles]]
"""The rows of a comparison by name: runs whose recipes differ only in the seed, each with another seed."""

NAMES = ("name", "description", "output")
"""Fields that change nothing in the training: the names of a run, and its folder."""
COMPRESSION = "compression."
SEED = "training.seed"
BUSY = 1.25
"""If compute took so many times as long in one of several runs alike, their measured times are not compared."""


@dataclass(frozen=True)
class Chart:
    """A plot, and how to read it."""

    title: str
    svg: str
    caption: str


@dataclass(frozen=True)
class Comparison:
    """Runs side by side."""

    title: str
    tables: Sequence[Table]
    charts: Sequence[Chart]
    warning: str = ""
    """Why the runs differ by more than the cost of compression, in sentences; empty if nothing else is known."""
    words: Sequence[str] = ()
    """What else is said before the tables, a paragraph each."""


def find_baseline(runs: Sequence[RunFiles], named: Path | None) -> RunFiles | None:
    """The run that the others are compared with: the run in the folder `named`, or else the first uncompressed run.

    None if no folder is named and no run is uncompressed.

    Raises:
        OptionsError: no run has that folder.
    """
    if named is None:
        return next((run for run in runs if run.is_uncompressed), None)
    for run in runs:
        if run.folder.resolve() == named.resolve():
            return run
    given = ", ".join(str(run.folder) for run in runs)
    raise OptionsError(f"--baseline must be one of the runs of the report ({given}), got {named}")


def compare(runs: Sequence[RunFiles], baseline: RunFiles | None) -> Comparison:
    """The tables and charts that show several runs together."""
    names = distinct_names(runs)
    differing = differences(runs)
    recipes = [
        [field, *(each if isinstance(each, str) else json.dumps(each) for each in values)]
        for field, values in differing.items()
    ]
    groups, notes = _by_recipe(runs, names)
    against: tuple[str, Sequence[RunFiles]] = ("", ())
    if baseline is None:
        notes.append("All of these runs are compressed: name one with --baseline to see differences.")
    else:
        alike = [(name, its) for name, its in groups.items() if _alike(its[0]) == _alike(baseline)]
        against = next((row for row in alike if row[1][0].is_finished), (names[runs.index(baseline)], [baseline]))
    measures = ["loss", *(["accuracy"] if any(run.score("on", "accuracy") is not None for run in runs) else [])]
    costs = cost_table("What compression cost", "runs", groups, *against, scores=measures, notes=notes)
    tables = [costs, *([Table("What differs between the recipes", ["field", *names], recipes)] if differing else [])]
    charts = loss_charts({name: [run] for name, run in zip(names, runs, strict=True)})
    return Comparison(costs.title, tables, charts, " ".join(_warnings(runs, names, differing, busyness(runs))))


def busyness(runs: Sequence[RunFiles]) -> list[float]:
    """How many times as long compute took in each run as in the fastest of those that differ in compression alone."""
    kinds = [_alike(run, COMPRESSION) for run in runs]
    spent = [math.fsum(stage["seconds"]["compute"] for stage in run.summary["stages"]) for run in runs]
    # the seconds of stages are those of the steps with the last cut
    steps = [max(1, run.summary["steps"] - run.summary["metered_from"]) for run in runs]
    spent = [seconds / count for seconds, count in zip(spent, steps, strict=True)]
    least = {kind: min(one for one, its in zip(spent, kinds, strict=True) if its == kind) for kind in kinds}
    return [one / least[kind] if least[kind] else 1.0 for one, kind in zip(spent, kinds, strict=True)]


def distinct_names(runs: Sequence[RunFiles]) -> list[str]:
    """The names of the runs. If two runs have the same name, the folders of all runs."""
    names = [str(run.summary["name"]) for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def differences(runs: Sequence[RunFiles]) -> dict[str, list[Any]]:
    """The fields that differ between the recipes: dotted name -> the value of each run."""
    flat = [_flat(run.fields) for run in runs]
    for fields, run in zip(flat, runs, strict=True):
        fields["pipeline.layers"] = [stage["layers"] for stage in run.summary["stages"]]
    known = [name for name in dict.fromkeys(name for fields in flat for name in fields) if name not in NAMES]
    values = {name: [fields.get(name) for fields in flat] for name in known}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def _flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in fields.items():
        found |= (
            _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) and value else {f"{prefix}{name}": value}
        )
    return found


def _warnings(
    runs: Sequence[RunFiles], names: Sequence[str], differing: Mapping[str, Sequence[Any]], busy: Sequence[float]
) -> Iterator[str]:
    others = [
        name for name in differing if not name.startswith(COMPRESSION) and not is_among(name, (*WITHOUT_EFFECT, SEED))
    ]
    if others:
        yield (
            f"These runs differ in more than compression and seed: in {', '.join(others)}. So the difference between "
            "their losses is not the cost of compression alone."
        )
    digests = [run.summary.get("held_out_digest") for run in runs]
    held_out = {digest: name for digest, name in zip(digests, names, strict=True) if digest}
    if len(held_out) > 1 and not any(name.startswith("data.") for name in others):
        yield (
            f"The held-out samples of {listed([*held_out.values()])} are not the same, as their data changed in "
            "between. So the difference between their losses is not the cost of compression alone."
        )
    done = [run.summary["steps"] for run in runs]
    if unfinished := [
        f"{name} has done {steps:,} of {run.summary['planned_steps']:,} steps"
        for name, run, steps in zip(names, runs, done, strict=True)
        if not run.is_finished
    ]:
        yield f"Not all runs are finished: {listed(unfinished)}. So their losses do not show the cost of compression."
    elif min(done) < max(done):
        yield (
            f"These runs have done different numbers of steps, from {min(done):,} to {max(done):,}. So the difference "
            "between their losses is not the cost of compression alone."
        )
    if max(busy) > BUSY:
        yield (
            f"The machine was busy: the same compute took up to {max(busy):.1f} times as long in some of these runs as "
            "in others. So do not compare samples/s and measured seconds."
        )


def _by_recipe(runs: Sequence[RunFiles], names: Sequence[str]) -> tuple[dict[str, list[RunFiles]], list[str]]:
    """The rows of a report, under the names of their runs, and notes. An unfinished run is a row of its own."""
    kinds = [_alike(run) if run.is_finished else str(place) for place, run in enumerate(runs)]
    groups: dict[str, list[RunFiles]] = {}
    twice = False
    for kind in dict.fromkeys(kinds):
        own = [(name, run) for name, run, its in zip(names, runs, kinds, strict=True) if its == kind]
        by_seed = {run.seed: run for _, run in reversed(own)}  # a run given twice, or a simulation of it
        groups[", ".join(name for name, _ in own)] = list(reversed(by_seed.values()))
        twice |= len(by_seed) < len(own)
    notes = ["Each row is a group of runs whose recipes differ only in the seed."] * (len(groups) < len(runs))
    notes += ["Of runs with the same seed the first one counts."] * twice
    notes += [
        f"Bytes of {name} are those{since(run.summary)}."
        for name, run in zip(names, runs, strict=True)
        if since(run.summary)
    ]
    return groups, notes


def scores_of(groups: Groups, scores: Sequence[str] = ("loss",)) -> DataFrame:
    """The last held-out scores in their units, a run a line by row and seed, a column `(score, mode)`; NaN for none."""
    from pandas import DataFrame, MultiIndex  # takes half a second

    runs = [(row, run) for row, its in groups.items() for run in its]
    lines = [[run.score(mode, score) for score in scores for mode in MODES] for _, run in runs]
    index = MultiIndex.from_tuples([(row, run.seed) for row, run in runs], names=["row", "seed"])
    return DataFrame(lines, index, MultiIndex.from_product([scores, MODES]), dtype=float)


def cost_table(
    title: str,
    first: str,
    groups: Groups,
    against: str,
    bases: Sequence[RunFiles],
    *,
    scores: Sequence[str] = ("loss",),
    published: Mapping[str, Mapping[Any, float]] | None = None,
    notes: Sequence[str] = (),
) -> Table:
    """A row of a comparison a line: scores over seeds, their differences to a baseline, bytes and bits on the wire.

    Args:
        title: title of the table.
        first: name of the first column, which has the names of the rows.
        groups: the runs of each row; a row may have none.
        against: name of the baseline.
        bases: the runs of the baseline, one for a seed; none for no differences.
        scores: what the runs are compared by; a run without the first of them has diverged.
        published: published scores by row and mode, of the first score; none for no such columns.
        notes: sentences to stand below the table, after those that explain its columns.
    """
    from pandas import Series  # takes half a second

    published = published or {}
    found, theirs = scores_of(groups, scores), scores_of({"": bases}, scores).droplevel("row")
    runs = [run for its in groups.values() for run in its]
    lost = Series([run.has_diverged(scores[0]) for run in runs], found.index, dtype=bool)
    found[lost] = math.nan  # all numbers of a row are of the same seeds
    apart = found - theirs.reindex(found.index.get_level_values("seed")).set_axis(found.index)
    several = any(len(its) > 1 for its in groups.values())
    modes = [(score, mode) for score in scores for mode in MODES]

    def by_row(values: Series[float], what: str, digits: int) -> list[Value]:
        """What is made of the values of each row's runs; None for a row without."""
        return [rounded(value, digits) for value in values.groupby(level="row").agg(what).reindex([*groups])]

    def scored(values: Series[float], score: str, what: str = "mean") -> list[Value]:
        return by_row(values, what, 3 if unit_of(score) else 4)

    def meant(values: Iterable[float | None], digits: int) -> list[Value]:
        return by_row(Series([*values], found.index, dtype=float), "mean", digits)

    columns: dict[str, Sequence[Value]] = {
        first: [*groups],
        "activations/gradients": [its[0].codecs if its else None for its in groups.values()],
    }
    for mode in MODES if published else ():
        columns[f"published {mode}"] = [published.get(row, {}).get(mode) for row in groups]
    said = {(score, mode): f"{score}{unit_of(score) and f', {unit_of(score)}'} {mode}" for score, mode in modes}
    for score, mode in modes:
        best = "min" if score in ("loss", "perplexity") else "max"
        for name, what in {"mean": "mean", **({"std": "std", "best": best} if several else {})}.items():
            columns[f"{said[score, mode]}, {name}"] = scored(found[score, mode], score, what)
    if bases:
        columns |= {f"{said[each]}, mean difference": scored(apart[each], each[0]) for each in modes}
    columns["on - off"] = scored(found[scores[0], "on"] - found[scores[0], "off"], scores[0])
    columns |= {f"bits, {channel}": meant((run.bits(channel) for run in runs), 2) for channel in CHANNELS}
    columns["in full, %"] = meant((100 * run.full_share for run in runs), 1)
    sent = [training_bytes(run.sent) / 1e6 for run in runs]
    columns["MB in training"] = [each or fine for each, fine in zip(meant(sent, 2), meant(sent, 6), strict=True)]
    columns["fewer bytes"] = meant((run.ratio for run in runs), 2)
    diverged = [int(lost[lost.index.get_level_values("row") == row].sum()) for row in groups]
    columns["seeds"] = [len(its) - count for its, count in zip(groups.values(), diverged, strict=True)]
    columns |= {"diverged": diverged} if any(lost) else {}
    columns["steps"] = [max((run.summary["steps"] for run in its), default=None) for its in groups.values()]
    columns["samples/s"] = meant((run.speed for run in runs), 1)
    notes = [
        "Off and on: whether evaluation compressed. Mean, std (of the sample) and best are over seeds, after the last "
        "step. Bits an element were really sent in training: frames with their headers, warm-up and first visits "
        "included; in full is the share of rows that went uncompressed.",
        *(
            [f"Differences are to {against}, to the run of the same seed; a seed that has none there is left out."]
            * bool(bases)
        ),
        *notes,
        *(["Seeds are those in the means: runs with a held-out score that is no number have diverged."] * any(lost)),
    ]
    return Table(title, [*columns], [*zip(*columns.values(), strict=True)], " ".join(notes))


def loss_charts(groups: Mapping[str, Sequence[RunFiles]]) -> list[Chart]:
    """The losses over steps, bytes and seconds: a curve for each group, the mean of its runs."""
    window = max(1, max(len(run.steps) for runs in groups.values() for run in runs) // 25)
    smoothed = f" as the mean of {window} steps" if window > 1 else ""
    told = f"Training loss{smoothed}; points are held out, with compression on."
    axes = {
        "Loss over steps": ("step", "optimizer step"),
        "Loss over bytes sent": ("MB", "MB sent in training"),
        "Loss over time, measured": ("seconds", "seconds of training steps"),
    }
    shown: list[tuple[str, DataFrame, str]] = []
    for name, runs in groups.items():
        trained = mean_curve([run.trained for run in runs])
        trained = trained.assign(loss=running_mean(trained["loss"], window))
        shown += [
            (f"{name}: training", trained, ""),
            (f"{name}: held out", mean_curve([run.scored("on") for run in runs]), "o"),
        ]
    charts = []
    for title, (axis, label) in axes.items():
        lines = [Curve(name, points(curve, axis), marker) for name, curve, marker in shown]
        charts.append(Chart(title, curves(lines, f"{title} of {', '.join(groups)}", x_label=label), told))
    return charts


def mean_curve(runs: Sequence[DataFrame]) -> DataFrame:
    """The mean of the curves of several runs at the steps that all have; NaN where one of them is."""
    from pandas import concat  # takes half a second

    by_step = concat(runs).groupby("step")
    return (by_step.sum(min_count=len(runs)) / len(runs))[by_step.size() == len(runs)].reset_index()


def _alike(run: RunFiles, *others: str) -> str:
    """A key that groups runs: recipe and cut as text, without the seed, what has no effect, and the groups `others`."""
    ignored = (*WITHOUT_EFFECT, SEED, *others)
    kept = {name: value for name, value in _flat(run.fields).items() if not is_among(name, ignored)}
    kept["pipeline.layers"] = [stage["layers"] for stage in run.summary["stages"]]
    return json.dumps(kept, sort_keys=True)
