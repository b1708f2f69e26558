"""The results of finished cells, a cell a line: scores, bits on the wire, and curves."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pandas import DataFrame, Series, concat

from thinwire.errors.files import SIGNATURE
from thinwire.launch.results.log_file import read_lines
from thinwire.launch.study.cells import (
    Cell,
    asked_of,
    changed_fields,
    has_other_start,
    is_finished,
    last_line,
    read_json,
)
from thinwire.launch.study.definition import MODES, Mode, Row, Study
from thinwire.pipeline.frames import CHANNELS

COLUMNS = ["cell", "row", "seed", *MODES, *CHANNELS, "full", "seconds", "digest", "made"]
"""Of a finished cell: scores with compression off and on, in the study's unit; bits an element that training sent in
each channel, with headers, warm-up and first visits; the share of rows that went uncompressed; seconds; the digest of
the weights; and the values of cell.json."""

_POINTS = 60
"""Points of a training curve; each is the mean of the steps it stands for."""
_STROKES = ("-", "--", "-.", ":")


def read_results(study: Study, cells: Sequence[Cell], prog: str) -> tuple[DataFrame, dict[Cell, str]]:
    """The results of the finished cells, a cell a line under `COLUMNS`, and why the others have none.

    Those of another version of the code, or of other data, are among them. OptionsError if recipes cannot be read.
    """
    lines, missing = [], {}
    found = [read_json(cell.folder / "cell.json") for cell in cells]
    # what was typed when a cell was made is no change of the study
    as_made = [replace(cell, given=tuple(made.get("given", ()))) for cell, made in zip(cells, found, strict=True)]
    for cell, made, asked in zip(cells, found, asked_of(as_made, prog), strict=True):
        if made and has_other_start(cell, made):
            missing[cell] = "the row that it starts with has other weights now; run it again"
        elif made and changed_fields(made.get("origin", {}), asked, any_code=True):
            missing[cell] = "what is there was made by other options of the study; run it again"
        elif not is_finished(cell.folder):
            said = last_line(cell.folder / "log.txt")
            begun = (cell.folder / "cell.json").exists()
            missing[cell] = f"not finished{f'; its last line: {said}' if said else ''}" if begun else "not begun"
        elif "origin" not in made:
            missing[cell] = "cell.json, which says what it was made from, is damaged; run it again"
        else:
            lines.append(_result(study, cell, made))
    return DataFrame(lines, columns=COLUMNS), missing


def _result(study: Study, cell: Cell, made: Mapping[str, Any]) -> dict[str, Any]:
    summary = read_json(cell.folder / "summary.json")
    scores = {mode: summary["held_out"].get(mode, {}).get(study.score) for mode in MODES}
    sent = DataFrame(summary["channels"], columns=["channel", "bytes", "elements", "rows", "full_rows"])
    sums = sent.groupby("channel").sum()
    return {
        **{"cell": cell, "row": cell.row, "seed": cell.seed, "made": made},
        **{mode: math.nan if score is None else study.factor * score for mode, score in scores.items()},
        **(8 * sums["bytes"] / sums["elements"]),
        "full": sent["full_rows"].sum() / max(1, sent["rows"].sum()),
        "seconds": summary["seconds"],
        "digest": summary["weights_digest"],
    }


def score_curve(study: Study, cell: Cell, mode: Mode) -> Series[float]:
    """The held-out score by optimizer steps."""
    lines = read_lines(cell.folder / "evaluations.jsonl")
    scores = {line["step"]: line.get(mode, {}).get(study.score) for line in lines}
    return study.factor * Series(scores, dtype=float).dropna()


def loss_curve(cell: Cell) -> Series[float]:
    """The training loss by optimizer steps."""
    losses = {line["step"] + 1: line["loss"] for line in read_lines(cell.folder / "metrics.jsonl")}
    return Series(losses, dtype=float).dropna()


def draw(study: Study, rows: Mapping[str, Row], results: DataFrame) -> dict[str, bytes]:
    """The curves of the finished cells, as `png` and as `svg`; empty without any.

    A line is the mean over the seeds of a row; a band of its colour is as wide as they differ.
    """
    from matplotlib import colormaps, rc_context
    from matplotlib.figure import Figure

    if results.empty:
        return {}
    figure = Figure(figsize=(15, 4.8), layout="constrained")
    axes = figure.subplots(1, 1 + len(MODES))
    colours = colormaps["tab10"].colors  # type: ignore[attr-defined]
    finished = [name for name in rows if name in set(results["row"])]
    for index, name in enumerate(finished):
        cells = results.loc[results["row"] == name, "cell"]
        stroke = _STROKES[index // len(colours) % len(_STROKES)]
        style = {"color": colours[index % len(colours)], "linestyle": stroke, "markersize": 3, "linewidth": 1.2}
        losses = _together([loss_curve(cell) for cell in cells])
        of_point = [place // max(1, -(-len(losses) // _POINTS)) for place in range(len(losses))]
        steps = losses.index.to_series().groupby(of_point).last()
        points = [losses.groupby(of_point).mean().set_axis(steps)]
        points += [_together([score_curve(study, cell, mode) for cell in cells]) for mode in MODES]
        for place, seeds, marker in zip(axes, points, ("", *("o" for _ in MODES)), strict=True):
            place.plot(seeds.index, seeds.mean(axis=1), label=name, marker=marker, **style)
            place.fill_between(seeds.index, seeds.min(axis=1), seeds.max(axis=1), color=style["color"], alpha=0.15)
    score = f"{study.score} in {study.unit}" if study.unit else study.score
    titles = ["training loss", *(f"held-out {score}, compression {mode}" for mode in MODES)]
    for place, title in zip(axes, titles, strict=True):
        place.set(title=title, xlabel="optimizer step")
        place.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    png, svg = io.BytesIO(), io.BytesIO()
    figure.savefig(png, format="png", dpi=110, metadata={"Software": SIGNATURE})
    with rc_context({"svg.hashsalt": study.name}):  # the same picture each time
        figure.savefig(svg, format="svg", metadata={"Creator": SIGNATURE, "Date": None})
    return {"png": png.getvalue(), "svg": svg.getvalue()}


def _together(curves: list[Series[float]]) -> DataFrame:
    """Several curves, a column each, at the steps that all of them have."""
    return concat(curves, axis=1, join="inner").sort_index()
