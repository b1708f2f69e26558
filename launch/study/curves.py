"""The learning curves of a study: training loss, and the held-out score with compression off and on."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from thinwire.errors.files import SIGNATURE
from thinwire.launch.study.definition import MODES, Row, Study
from thinwire.launch.study.results import CurvePoints, Result, loss_curve, score_curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS = 60
"""Points of a training curve; each is the mean of the steps it stands for."""
_STROKES = ("-", "--", "-.", ":")


def draw(study: Study, rows: Mapping[str, Row], results: Sequence[Result]) -> bytes:
    """The curves of the finished cells as PNG, a line a row, the mean over its seeds; empty without any."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    by_row = {name: [result.cell for result in results if result.cell.row == name] for name in rows}
    by_row = {name: cells for name, cells in by_row.items() if cells}
    if not by_row:
        return b""
    figure = Figure(figsize=(15, 4.8), layout="constrained")
    axes = figure.subplots(1, 1 + len(MODES))
    colours = colormaps["tab10"].colors  # type: ignore[attr-defined]
    for index, (name, cells) in enumerate(by_row.items()):
        style = {"color": colours[index % len(colours)], "linestyle": _STROKES[index // len(colours) % len(_STROKES)]}
        _line(axes[0], _thinned(_mean([loss_curve(cell) for cell in cells])), name, style, marker="")
        for place, mode in zip(axes[1:], MODES, strict=True):
            _line(place, _mean([score_curve(study, cell, mode) for cell in cells]), name, style, marker="o")
    score = f"{study.score} in {study.unit}" if study.unit else study.score
    titles = ["training loss", *(f"held-out {score}, compression {mode}" for mode in MODES)]
    for place, title in zip(axes, titles, strict=True):
        place.set(title=title, xlabel="optimizer step")
        place.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110, metadata={"Software": SIGNATURE})
    return file.getvalue()


def _line(axes: Axes, points: CurvePoints, label: str, style: Mapping[str, object], marker: str) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), label=label, marker=marker, markersize=3, linewidth=1.2, **style)  # type: ignore[arg-type]


def _mean(curves: Sequence[CurvePoints]) -> CurvePoints:
    """The mean of several curves, at the steps that all of them have."""
    values = [dict(curve) for curve in curves]
    common = sorted(set.intersection(*(set(curve) for curve in values)))
    return [(step, fmean(curve[step] for curve in values)) for step in common]


def _thinned(points: CurvePoints) -> CurvePoints:
    """Means of as many points as make the curve readable."""
    size = max(1, -(-len(points) // _POINTS))
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(part[-1][0], fmean(value for _, value in part)) for part in parts]
