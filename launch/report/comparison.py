"""The cost of compression: runs side by side, compared with one of them, over steps, bytes and time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.errors.words import listed
from thinwire.launch.recipe.fields import WITHOUT_EFFECT, is_among
from thinwire.launch.report.plots import Curve, curves, running_mean
from thinwire.launch.report.reading import RunFiles, training_bytes
from thinwire.launch.results.figures import metered_steps, since
from thinwire.launch.shared.tables import Table, Value, rounded
from thinwire.pipeline.errors import OptionsError

MODES = ("on", "off")
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

    tables: Sequence[Table]
    charts: Sequence[Chart]
    warning: str
    """Why the runs differ by more than the cost of compression, in sentences; empty if nothing else is known."""


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
    seeds = _by_seed(runs, names, baseline)
    busy = busyness(runs)
    recipes = [
        [field, *(each if isinstance(each, str) else json.dumps(each) for each in values)]
        for field, values in differing.items()
    ]
    tables = [
        _costs(runs, names, baseline),
        *([seeds] if seeds else []),
        *([Table("What differs between the recipes", ["field", *names], recipes)] if differing else []),
    ]
    return Comparison(tables, _charts(runs, names), " ".join(_warnings(runs, names, differing, busy)))


def busyness(runs: Sequence[RunFiles]) -> list[float]:
    """How many times as long compute took in each run as in the fastest of those that differ in compression alone."""
    kinds = [_alike(run, COMPRESSION) for run in runs]
    spent = [math.fsum(stage["seconds"]["compute"] for stage in run.summary["stages"]) for run in runs]
    spent = [seconds / max(1, metered_steps(run.summary)) for seconds, run in zip(spent, runs, strict=True)]
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


def _costs(runs: Sequence[RunFiles], names: Sequence[str], baseline: RunFiles | None) -> Table:
    """One row for each run: its bytes, its scores, and their difference to the baseline of the same seed."""
    bases = _bases(runs, baseline)
    measures = ["loss", *(["accuracy"] if any(run.score("on", "accuracy") is not None for run in runs) else [])]
    columns = [
        *("run", "activations/gradients", "bits, activations", "bits, gradients", "MB in training", "fewer bytes"),
        *(f"held-out {name}, {mode}" for name in measures for mode in MODES),
        *(f"{name} {mode}, difference" for name in measures for mode in MODES if baseline is not None),
        *("steps", "samples/s"),
    ]
    rows: list[list[Value]] = [
        [
            *(name, run.codecs, *(rounded(run.bits(channel), 2) for channel in ("activations", "gradients"))),
            round(sent / 1e6, 2) or round(sent / 1e6, 6),
            round(run.ratio, 2),
            *(rounded(run.score(mode, measure), 4) for measure in measures for mode in MODES),
            *(_change(run, base, mode, measure) for measure in measures for mode in MODES if baseline is not None),
            *(run.summary["steps"], round(run.speed, 1)),
        ]
        for name, run, base in zip(names, runs, bases, strict=True)
        for sent in [training_bytes(run.sent)]
    ]
    if baseline is None:
        note = "All of these runs are compressed: name one with --baseline to see differences."
    else:
        used = listed([name for name, run in zip(names, runs, strict=True) if any(run is base for base in bases)])
        each = ", each to that of the same seed" * (len({_seed(run) for run in runs}) > 1)
        note = f"Differences are to {used}{each}. On: the evaluation compressed too. Off: it did not."
    for name, run in zip(names, runs, strict=True):
        if counted := since(run.summary):
            note += f" Bytes of {name} are those{counted}."
    return Table("What compression cost", columns, rows, note)


def _by_seed(runs: Sequence[RunFiles], names: Sequence[str], baseline: RunFiles | None) -> Table | None:
    """Mean and spread of finished runs whose recipes differ only in the seed; None if there are no two such runs."""
    finished = [(name, run) for name, run in zip(names, runs, strict=True) if run.is_finished]
    kinds = [_alike(run) for _, run in finished]
    if len(set(kinds)) == len(kinds):
        return None
    from pandas import DataFrame  # takes half a second

    seeds = [(kind, _seed(run)) for kind, (_, run) in zip(kinds, finished, strict=True)]
    again = [seed in seeds[:place] for place, seed in enumerate(seeds)]  # a run given twice, or a simulation of it
    diverged = [run.has_diverged and not known for known, (_, run) in zip(again, finished, strict=True)]
    left_out = [either or other for either, other in zip(diverged, again, strict=True)]
    scores = DataFrame({mode: [run.score(mode) for _, run in finished] for mode in MODES}, dtype=float)
    scores[left_out] = math.nan  # all numbers of a row are of the same seeds
    groups = scores.groupby(kinds, sort=False)
    means, spreads = groups.mean(), groups.std()
    base = baseline and _alike(baseline)
    bases = {seed: place for place, (kind, seed) in enumerate(seeds) if kind == base and not left_out[place]}
    theirs = scores.reindex([bases.get(seed, -1) for _, seed in seeds]).set_axis(scores.index)
    apart = (scores - theirs).groupby(kinds, sort=False).mean() if bases else means[[]]
    columns = ["runs", "activations/gradients", "seeds", *(["diverged"] if any(diverged) else [])]
    columns += [f"loss {mode}, {what}" for mode in MODES for what in ("mean", "std")]
    columns += [f"loss {mode}, mean difference" for mode in apart]
    rows: list[list[Value]] = [
        [
            ", ".join(finished[index][0] for index in group),
            finished[group[0]][1].codecs,
            sum(not left_out[index] for index in group),
            *([lost] if any(diverged) else []),
            *(rounded(found.at[kind, mode], 4) for mode in MODES for found in (means, spreads)),
            *(rounded(apart.at[kind, mode], 4) for mode in apart),
        ]
        for kind, group in groups.groups.items()
        for lost in [sum(diverged[index] for index in group)]
    ]
    note = (
        "Each row is a group of runs whose recipes differ only in the seed. std is the sample standard deviation. Runs "
        "that are not finished are left out."
    )
    if bases:
        note += " Differences are to the run of the same seed; a seed that has none there is left out of them."
    if any(again):
        note += " Of runs with the same seed the first one counts."
    if any(diverged):
        note += " Seeds are those in the means: runs with a held-out loss that is no number have diverged."
    return Table("Over seeds", columns, rows, note)


def _charts(runs: Sequence[RunFiles], names: Sequence[str]) -> list[Chart]:
    """The losses over steps, bytes and seconds."""
    window = max(1, max(len(run.steps) for run in runs) // 25)
    smoothed = f" as the mean of {window} steps" if window > 1 else ""
    told = f"Training loss{smoothed}; points are held out, with compression on."
    axes = [
        ("Loss over steps", "optimizer step", [run.progress_in_steps for run in runs]),
        ("Loss over bytes sent", "MB sent in training", [run.progress_in_megabytes for run in runs]),
        ("Loss over time, measured", "seconds of training steps", [run.progress_in_seconds for run in runs]),
    ]
    charts = []
    for title, label, places in axes:
        lines = []
        for name, run, at in zip(names, runs, places, strict=True):
            lines.append(Curve(f"{name}: training", running_mean(run.losses(at), window)))
            lines.append(Curve(f"{name}: held out", run.held_out_losses("on", at), "o"))
        charts.append(Chart(title, curves(lines, f"{title} of {', '.join(names)}", x_label=label), told))
    return charts


def _alike(run: RunFiles, *others: str) -> str:
    """A key that groups runs: recipe and cut as text, without the seed, what has no effect, and the groups `others`."""
    ignored = (*WITHOUT_EFFECT, SEED, *others)
    kept = {name: value for name, value in _flat(run.fields).items() if not is_among(name, ignored)}
    kept["pipeline.layers"] = [stage["layers"] for stage in run.summary["stages"]]
    return json.dumps(kept, sort_keys=True)


def _bases(runs: Sequence[RunFiles], baseline: RunFiles | None) -> list[RunFiles | None]:
    """What each run is compared with: the run of its seed whose recipe is else that of the baseline; None without one.

    What a seed does to a run is no cost of compression.
    """
    of_seed: dict[Any, RunFiles] = {}
    for run in (baseline, *runs):
        if run is not None and baseline is not None and _alike(run) == _alike(baseline):
            of_seed.setdefault(_seed(run), run)
    return [of_seed.get(_seed(run)) for run in runs]


def _seed(run: RunFiles) -> Any:
    return run.fields["training"]["seed"]


def _change(run: RunFiles, base: RunFiles | None, mode: str, key: str) -> float | None:
    if base is None:
        return None
    value, other = run.score(mode, key), base.score(mode, key)
    return None if value is None or other is None else round(value - other, 4)
