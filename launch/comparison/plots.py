"""The pictures of a report, as SVG inside the page. They use the colours of the page, so they follow light and dark.

matplotlib knows fixed colours only. So each role is drawn in a stand-in colour, and `var(--role)` replaces it in the
SVG text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame, Series

SERIES = tuple(f"series-{index}" for index in range(6))
ROLES = ("ink", "muted", "grid", "page", *SERIES)
STAND_INS = {role: f"#a1b2{index:02x}" for index, role in enumerate(ROLES)}
STROKES = ("-", "--", "-.", ":")
MARKERS = ("", "s", "^", "D")
"""In place of a curve's own marker, for each time that the colours have begun again."""


@dataclass(frozen=True)
class Curve:
    """One line of a plot; only its points if `marker` names a shape."""

    label: str
    points: Sequence[tuple[float, float]]
    marker: str = ""


def curves(curves: Sequence[Curve], title: str, *, x_label: str = "optimizer step") -> str:
    """A plot of losses, over what `x_label` names. Curves whose labels agree up to the last colon share a colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 3.4), layout="constrained", facecolor="none")
    axes = figure.add_subplot(facecolor="none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(STAND_INS["muted"])
    axes.tick_params(colors=STAND_INS["muted"], labelcolor=STAND_INS["ink"], labelsize=9)
    names = [curve.label.rpartition(":")[0] or curve.label for curve in curves]
    groups = list(dict.fromkeys(names))
    for curve, name in zip(curves, names, strict=True):
        if not curve.points:
            continue
        index = groups.index(name)
        style: dict[str, Any] = {"color": STAND_INS[SERIES[index % len(SERIES)]], "label": curve.label}
        if curve.marker:
            marker = MARKERS[index // len(SERIES) % len(MARKERS)] or curve.marker
            style |= {"marker": marker, "linestyle": "none", "markersize": 5.5}
        else:
            style |= {"linewidth": 1.4, "linestyle": STROKES[index % len(STROKES)]}
        axes.plot(*zip(*curve.points, strict=True), **style)
    axes.set_xlabel(x_label, color=STAND_INS["muted"])
    axes.set_ylabel("loss", color=STAND_INS["muted"])
    axes.grid(color=STAND_INS["grid"], linewidth=0.8)
    legend = axes.legend(frameon=False, labelcolor=STAND_INS["ink"], fontsize=9)
    legend.set_in_layout(True)
    return _svg(figure, title)


def points(curve: DataFrame, axis: str = "step") -> list[tuple[float, float]]:
    """The points of a run's losses over one of the columns beside them."""
    return list(zip(curve[axis], curve["loss"], strict=True))


def running_mean(losses: Series[float], window: int) -> Series[float]:
    """The mean of the last `window` losses up to each, without those that are no numbers."""
    return losses.rolling(window, min_periods=1).mean()


def _svg(figure: Figure, title: str) -> str:
    """The figure as an `svg` element with a title, in the colours and fonts of the page.

    It has no identifiers: two pictures on one page would have the same ones.
    """
    from html import escape

    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = text.getvalue()
    svg = re.sub(r"<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    for role, stand_in in STAND_INS.items():
        svg = svg.replace(stand_in, f"var(--{role})")
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r"font(-family)?: ([\d.]+px)?[^;\"]*", lambda match: f"font-size: {match[2]}" if match[2] else "", svg)
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg role="img" viewBox="\1">', svg, count=1)
    return svg.replace(">", f"><title>{escape(title)}</title>", 1)
