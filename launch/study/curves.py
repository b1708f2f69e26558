"""The learning curves of a study: training loss, and the held-out score with compression off and on."""

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


def draw(study: Study, rows: Mapping[str, Row], results: DataFrame) -> bytes:
    """The curves of the finished cells as PNG, a line a row, the mean over its seeds; empty without any."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    if results.empty:
        return b""
    figure = Figure(figsize=(15, 4.8), layout="constrained")
    axes = figure.subplots(1, 1 + len(MODES))
    colours = colormaps["tab10"].colors  # type: ignore[attr-defined]
    finished = [name for name in rows if name in set(results["row"])]
    for index, name in enumerate(finished):
        cells = results.loc[results["row"] == name, "cell"]
        stroke = _STROKES[index // len(colours) % len(_STROKES)]
        style = {"color": colours[index % len(colours)], "linestyle": stroke, "markersize": 3, "linewidth": 1.2}
        losses = _mean([loss_curve(cell) for cell in cells])
        of_point = [place // max(1, -(-len(losses) // _POINTS)) for place in range(len(losses))]
        steps = losses.index.to_series().groupby(of_point).last()
        axes[0].plot(steps, losses.groupby(of_point).mean(), label=name, **style)
        for place, mode in zip(axes[1:], MODES, strict=True):
            scores = _mean([score_curve(study, cell, mode) for cell in cells])
            place.plot(scores.index, scores, label=name, marker="o", **style)
    score = f"{study.score} in {study.unit}" if study.unit else study.score
    titles = ["training loss", *(f"held-out {score}, compression {mode}" for mode in MODES)]
    for place, title in zip(axes, titles, strict=True):
        place.set(title=title, xlabel="optimizer step")
        place.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110, metadata={"Software": SIGNATURE})
    return file.getvalue()


def _mean(curves: list[Series[float]]) -> Series[float]:
    """The mean of several curves, at the steps that all of them have."""
    return concat(curves, axis=1, join="inner").mean(axis=1).sort_index()
