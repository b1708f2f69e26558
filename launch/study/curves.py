"""The learning curves of a study: training loss, and the held-out score with compression off and on.

A line is the mean over the seeds of a row; a band of its colour is as wide as they differ.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pandas import DataFrame, concat

from thinwire.errors.files import SIGNATURE
from thinwire.launch.study.definition import MODES, Row, Study
from thinwire.launch.study.results import loss_curve, score_curve

if TYPE_CHECKING:
    from pandas import Series

_POINTS = 60
"""Points of a training curve; each is the mean of the steps it stands for."""
_STROKES = ("-", "--", "-.", ":")


def draw(study: Study, rows: Mapping[str, Row], results: DataFrame) -> dict[str, bytes]:
    """The curves of the finished cells, a line a row, as `png` and as `svg`; empty without any."""
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
