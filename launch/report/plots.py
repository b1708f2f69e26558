"""The pictures of a report, as SVG inside the page. They use the colours of the page, so they follow light and dark.

matplotlib knows fixed colours only. So each role is drawn in a stand-in colour, and `var(--role)` replaces it in the
SVG text.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thinwire.launch.report.timeline import ExchangeSpan, Transfer
from thinwire.pipeline.tracing.spans import Span
from thinwire.pipeline.tracing.traces import StepTrace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SERIES = tuple(f"series-{index}" for index in range(6))
KINDS = ("forward", "backward", "optimizer", "encode", "decode", "wait", "exchange")
WIRE_COLORS = ("wire", "wire-latest")
ROLES = ("ink", "muted", "grid", "page", *KINDS, *WIRE_COLORS, *SERIES)
STAND_INS = {role: f"#a1b2{index:02x}" for index, role in enumerate(ROLES)}
STROKES = ("-", "--", "-.", ":")
LEGIBLE = 0.013
"""The smallest share of a step's width that a bar must have so that the number of its micro-batch fits."""


@dataclass(frozen=True)
class Curve:
    """One line of a plot; only its points if `marker` names a shape."""

    label: str
    points: Sequence[tuple[float, float]]
    marker: str = ""


def role_of(span: Span) -> str:
    """The role (colour) of a span: for compute the role of its task, else its kind."""
    if span.kind != "compute":
        return span.kind
    return {"forward": "forward", "loss": "forward", "backward": "backward", "weights": "backward"}.get(
        span.task, "optimizer"
    )


def curves(curves: Sequence[Curve], title: str, *, x_label: str = "optimizer step") -> str:
    """A plot of losses, over what `x_label` names. Curves whose labels agree up to the colon share a colour."""
    figure, axes = _plot(width=8.0, height=3.4)
    groups = list(dict.fromkeys(curve.label.partition(":")[0] for curve in curves))
    for curve in curves:
        if not curve.points:
            continue
        index = groups.index(curve.label.partition(":")[0])
        style: dict[str, Any] = {"color": STAND_INS[SERIES[index % len(SERIES)]], "label": curve.label}
        if curve.marker:
            style |= {"marker": curve.marker, "linestyle": "none", "markersize": 5.5}
        else:
            style |= {"linewidth": 1.4, "linestyle": STROKES[index % len(STROKES)]}
        axes.plot(*zip(*curve.points, strict=True), **style)
    axes.set_xlabel(x_label)
    axes.set_ylabel("loss")
    axes.grid(color=STAND_INS["grid"], linewidth=0.8)
    legend = axes.legend(frameon=False, labelcolor=STAND_INS["ink"], fontsize=9)
    legend.set_in_layout(True)
    return _svg(figure, title)


def timeline(
    steps: Sequence[tuple[int, StepTrace]],
    frames: Sequence[Transfer],
    title: str,
    exchanges: Sequence[ExchangeSpan] = (),
) -> str:
    """A picture of one step: a lane for the work of each stage, and under it a thin lane for each channel it sends on.

    The exchange with replicas is in the lane of the activations, which are there by then.

    Args:
        steps: (stage, its trace of the step), in stage order.
        frames: the frames of that step.
        title: a description of the picture, for screen readers.
        exchanges: those of that step.
    """
    zero = min(step.start for _, step in steps)
    length = max(step.end for _, step in steps) - zero
    figure, axes = _plot(width=11.0, height=0.75 + 0.62 * len(steps))
    for lane, (stage, step) in enumerate(steps):
        for span in step.spans:
            _bar(axes, (span.start - zero, span.end - zero), (lane - 0.38, 0.5), role_of(span))
            if span.kind == "compute" and span.microbatch is not None and span.end - span.start > LEGIBLE * length:
                _number(axes, span.microbatch, (span.start + span.end) / 2 - zero, lane - 0.13)
        for row, channel in enumerate(("activations", "gradients")):
            for frame in frames:
                if frame.source == stage and frame.channel == channel:
                    role = "wire" if frame.seen else "wire-latest"
                    _bar(axes, (frame.start - zero, frame.end - zero), (lane + 0.17 + 0.13 * row, 0.1), role)
        for exchange in exchanges:
            if exchange.stage == stage:
                _bar(axes, (exchange.start - zero, exchange.end - zero), (lane + 0.17, 0.1), "exchange")
    axes.set_xlim(0, length)
    axes.set_ylim(len(steps) - 0.45, -0.5)
    axes.set_yticks([lane - 0.13 for lane in range(len(steps))], [f"stage {stage}" for stage, _ in steps])
    axes.xaxis.set_major_formatter(lambda seconds, _: f"{1e3 * seconds:g}")
    axes.set_xlabel("milliseconds from the start of the step")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return _svg(figure, title)


def running_mean(points: Sequence[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """The points, each value replaced by the mean of the last `window` values up to it, without NaN."""
    smoothed = []
    for index, (x, _) in enumerate(points):
        recent = [y for _, y in points[max(0, index - window + 1) : index + 1] if math.isfinite(y)]
        smoothed.append((x, math.fsum(recent) / len(recent) if recent else math.nan))
    return smoothed


def _bar(axes: Axes, extent: tuple[float, float], band: tuple[float, float], role: str) -> None:
    start, end = extent
    axes.broken_barh([(start, end - start)], band, facecolor=STAND_INS[role], linewidth=0)


def _number(axes: Axes, number: int, x: float, y: float) -> None:
    axes.text(x, y, str(number), ha="center", va="center", fontsize=7, color=STAND_INS["page"])


def _plot(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
    axes = figure.add_subplot(facecolor="none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(STAND_INS["muted"])
    axes.tick_params(colors=STAND_INS["muted"], labelcolor=STAND_INS["ink"], labelsize=9)
    axes.xaxis.label.set_color(STAND_INS["muted"])
    axes.yaxis.label.set_color(STAND_INS["muted"])
    return figure, axes


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
