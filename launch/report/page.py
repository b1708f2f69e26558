"""The page of a report: the values that the template shows, from the files of runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from thinwire.launch.report.comparison import Comparison
from thinwire.launch.report.numbers import held_out_losses, losses, ratio, speed, training_bytes
from thinwire.launch.report.plots import Curve, curves, timeline
from thinwire.launch.report.reading import Document, RunFiles
from thinwire.launch.report.timeline import exchanges, transfers
from thinwire.launch.shared import pages
from thinwire.launch.shared.tables import Table, size_text, ways_between_replicas
from thinwire.pipeline.meters import SECTIONS
from thinwire.pipeline.tracing.traces import StageTrace


@dataclass(frozen=True)
class Timeline:
    """The picture of one step, and how to read it."""

    picture: str
    caption: str


@dataclass(frozen=True)
class Share:
    """One part of a bar: its colour, its share of the bar, and its text."""

    role: str
    share: float
    text: str


def render(runs: Sequence[RunFiles], documents: Sequence[Document], comparison: Comparison | None = None) -> str:
    """The page as HTML; `comparison` compares the same runs."""
    names = [run.summary["name"] for run in runs] + [document.title for document in documents]
    return pages.render(
        "thinwire.launch.report",
        "report.html",
        brand="Thinwire report",
        title=", ".join(dict.fromkeys(names)),
        runs=[_view(run) for run in runs],
        comparison=comparison,
        documents=documents,
    )


def _view(run: RunFiles) -> dict[str, Any]:
    """The values that the template shows of a run."""
    summary = run.summary
    return {
        "name": summary["name"],
        "facts": _facts(run),
        "command": f"thinwire train {shlex.quote(str(run.folder / 'recipe.yaml'))} --output runs/again",
        "recipe": run.recipe,
        "loss": _loss_picture(run),
        "held_out": _held_out(summary),
        "channels": _channels(summary["channels"]),
        "replicas": _replicas(summary.get("replicas", [])),
        "exchange": _exchange(_stages(run), summary.get("timed")),
        "choices": _choices(summary.get("choices", [])),
        "shares": [(stage["stage"], _shares(stage["seconds"], summary["training_seconds"])) for stage in _stages(run)],
        "stages": _stage_table(_stages(run), summary["training_seconds"]),
        "timeline": _timeline(run.traces, summary["name"]),
        "documents": run.documents,
        "digest": summary.get("weights_digest"),
    }


def _stages(run: RunFiles) -> Sequence[Mapping[str, Any]]:
    stages: Sequence[Mapping[str, Any]] = run.summary["stages"]
    return stages


def _facts(run: RunFiles) -> list[tuple[str, str]]:
    """The few numbers to see first: (name, value)."""
    summary = run.summary
    replicas = summary.get("replicas", [])
    held_out = [
        (f"held-out loss, compression {mode}", _number(score["loss"], 4)) for mode, score in summary["held_out"].items()
    ]
    return [
        *held_out,
        ("samples a second", _number(speed(run), 1)),
        ("fewer bytes in training", f"{ratio(summary['channels']):.2f}x"),
        ("sent in training", size_text(training_bytes(summary["channels"]), digits=1)),
        *([("sent between replicas", size_text(training_bytes(replicas), digits=1))] if replicas else []),
        ("sent in all, with evaluations", size_text(summary["bytes_sent"], digits=1)),
        ("steps, and time of the whole run", f"{summary['steps']:,}{_planned(summary)} in {summary['seconds']:,.0f} s"),
        ("time of training steps", f"{summary['training_seconds']:,.0f} s"),
    ]


def _planned(summary: Mapping[str, Any]) -> str:
    """The number of planned steps, if the summary is from before the end of the run."""
    return f" of {summary['planned_steps']:,}, not finished," if summary.get("running") else ""


def _loss_picture(run: RunFiles) -> str:
    curve = [Curve("training", losses(run))]
    for mode, marker in (("on", "o"), ("off", "x")):
        curve.append(Curve(f"held out, compression {mode}", held_out_losses(run, mode), marker))
    return curves(curve, f"Loss of {run.summary['name']} over optimizer steps, training and held out")


def _held_out(summary: Mapping[str, Any]) -> Table | None:
    scores = summary["held_out"]
    if not scores:
        return None
    names = list(next(iter(scores.values())))
    columns = ("compression", *(name.replace("_", " ") for name in names))
    return Table("Held out", columns, [(mode, *(score[name] for name in names)) for mode, score in scores.items()])


def _channels(channels: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("boundary", "channel", "codec", "MB sent", "MB uncompressed", "ratio", "bits an element", "% in full")
    rows = [
        (
            _route(channel),
            channel["channel"],
            channel["codec"],
            channel["bytes"] / 1e6,
            channel["uncompressed"] / 1e6,
            round(channel["uncompressed"] / max(1, channel["bytes"]), 2),
            round(channel["bits_per_element"], 3),
            round(100 * channel["full_share"], 1),
        )
        for channel in channels
    ]
    note = "Bytes of training frames, headers included. In full: share of rows sent uncompressed, such as in warm-up."
    return Table("Bytes of each channel", columns, rows, note)


def _replicas(rows: Sequence[Mapping[str, Any]]) -> Table | None:
    """The bytes that replicas sent each other; None without replicas."""
    if not rows:
        return None
    columns = ("stage", "way", "codec", "frames", "MB sent", "MB uncompressed", "ratio", "bits an element")
    ways = ways_between_replicas(rows)
    cells = [
        (
            row["stage"],
            ways[row["channel"]],
            row["codec"],
            row["frames"],
            row["bytes"] / 1e6,
            row["uncompressed"] / 1e6,
            round(row["uncompressed"] / max(1, row["bytes"]), 2),
            round(row["bits_per_element"], 3),
        )
        for row in rows
    ]
    return Table("Gradients of weights between replicas", columns, cells, "Bytes of all replicas, headers included.")


def _exchange(stages: Sequence[Mapping[str, Any]], timed: str | None) -> Table | None:
    """The seconds of the exchange between replicas, and what was hidden; None without replicas."""
    if not any("exchange" in stage for stage in stages):
        return None
    known = any(stage["exchange"]["hidden"] is not None for stage in stages)
    columns = ("stage", "exchange, s", *(["% hidden"] * known), *(f"{name}, s" for name in (*SECTIONS, "other")))
    rows = []
    for stage in stages:
        spent = {name: stage["exchange"].get(name, 0.0) for name in (*SECTIONS, "other")}
        total = round(sum(spent.values()), 2)
        parts = (round(seconds, 2) for seconds in spent.values())
        share = [_scaled(stage["exchange"]["hidden"], 100)] * known
        rows.append((stage["stage"], total, *share, *parts))
    hidden = "Hidden: before the last stage had done its last backward, in the last exchanges. "
    note = (
        f"Of the time of training steps above, for {timed}. {hidden * known}Neighbour: waiting until another "
        "replica has sent. Wire: waiting until that frame arrives. Other: gathering and adding up gradients."
    )
    return Table("The exchange between replicas", columns, rows, note)


def _choices(choices: Sequence[Mapping[str, Any]]) -> Table | None:
    """The codecs that auto chose, with the measurements behind the choice; None if auto chose nothing."""
    if not choices:
        return None
    columns = (
        *("boundary", "channel", "codec", "bytes a frame", "Mbit/s", "ms on the wire", "ms that hide it", "hidden"),
        *("compute, ms", "next milder codec", "its ms on the wire"),
    )
    rows = [
        (
            _route(choice) if choice.get("replica") is None else f"{_route(choice)} of replica {choice['replica']}",
            choice["channel"],
            choice["codec"],
            choice["nbytes"],
            _scaled(choice["goodput"], 8e-6),
            _scaled(choice["wire"], 1e3),
            _scaled(choice["hidden"], 1e3),
            choice["hides"],
            _scaled(choice["hidden"] / choice["share"], 1e3),
            choice["milder"],
            _scaled(choice["milder_wire"], 1e3),
        )
        for choice in choices
    ]
    note = (
        "Measured in the first steps. Compute: time of one micro-batch's forwards (for gradients: backwards) in the "
        "slowest process. The schedule sends frames during a share of this time: a wire that needs no more is hidden. "
        "Each channel got the mildest candidate whose wire is hidden, or else the strongest candidate. Mbit/s: the "
        "part of the link that this channel gets; empty if both stages are in one process. Of replicas, the numbers "
        "are those of the one that needs the strongest codec."
    )
    return Table("The codecs that auto chose, and why", columns, rows, note)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else round(value * factor, 2)


def _route(channel: Mapping[str, Any]) -> str:
    """The sending and the receiving stage of a channel, in words."""
    low, high = channel["boundary"], channel["boundary"] + 1
    return f"{low} to {high}" if channel["channel"] == "activations" else f"{high} to {low}"


def _split(seconds: Mapping[str, float], total: float) -> dict[str, float]:
    """Seconds by section, and the rest as `other`."""
    return {**{name: seconds.get(name, 0.0) for name in SECTIONS}, "other": max(0.0, total - sum(seconds.values()))}


def _shares(seconds: Mapping[str, float], total: float) -> list[Share]:
    parts = _split(seconds, total)
    whole = max(1e-9, sum(parts.values()))
    return [Share(name, spent / whole, f"{name}: {spent:.1f} s, {spent / whole:.0%}") for name, spent in parts.items()]


def _stage_table(stages: Sequence[Mapping[str, Any]], total: float) -> Table:
    columns = (
        "stage", "layers", "parameters", *(f"{name}, s" for name in (*SECTIONS, "other")), "peak memory, MB",
    )  # fmt: skip
    rows = [
        (
            stage["stage"],
            stage.get("layers"),
            stage.get("parameters"),
            *(round(spent, 2) for spent in _split(stage["seconds"], total).values()),
            round(stage["peak_memory"] / 1e6),
        )
        for stage in stages
    ]
    note = (
        "Time of training steps, without evaluations and saves. Sections do not overlap. Neighbour: waiting until the "
        "other stage has sent a frame (or for the gradient norm of all stages). Wire: waiting until that frame "
        "arrives. Wait: waiting for one of the two, if it is not known which. Other: reading data, clipping, the "
        "schedule itself, and the work of other stages in the same process. Peak memory is the memory of the process."
    )
    return Table("Time and memory of each stage", columns, rows, note)


def _timeline(traces: Sequence[StageTrace], name: str) -> Timeline | None:
    """The recorded step of median length; None if no step was recorded."""
    recorded = [step for trace in traces[-1:] for step in trace.steps]
    if not recorded:
        return None
    lengths = {step.step: step.end - step.start for step in recorded}
    shown = min(lengths, key=lambda step: abs(lengths[step] - median(lengths.values())))
    steps = [(trace.stage, step) for trace in traces for step in trace.steps if step.step == shown]
    frames = [transfer for transfer in transfers(traces) if transfer.step == shown]
    traded = [exchange for exchange in exchanges(traces) if exchange.step == shown]
    picture = timeline(steps, frames, f"Timeline of step {shown} of {name}: a lane a stage", traded)
    hidden = sum(one.hidden for one in traded) / max(1e-9, sum(one.end - one.start for one in traded))
    of_replicas = f" The drain of the pipeline hid {hidden:.0%} of the exchange between replicas." if traded else ""
    error = max(trace.clock_error for trace in traces)
    return Timeline(
        picture,
        f"Step {shown}, {1e3 * lengths[shown]:,.1f} ms, the median of {len(recorded)} recorded steps. Numbers are "
        f"micro-batches. Thin bars are frames on the wire: activations above, gradients below. The clocks of the "
        f"stages agree to {1e6 * error:,.0f} µs.{of_replicas}",
    )


def _number(value: float | None, digits: int) -> str:
    return "NaN" if value is None else f"{value:,.{digits}f}"
