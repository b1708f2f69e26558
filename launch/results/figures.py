"""The summary of a run as its file has it, and its tables: for its closing lines and for the page of a report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.errors.files import as_written, read_object
from thinwire.launch.shared.tables import Table, Value, duration_text
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.measuring.meters import SECTIONS

Summary = Mapping[str, Any]
SUMMED_UP = (
    *("name", "steps", "seconds", "training_seconds", "held_out", "channels", "stages", "bytes_sent", "running"),
    *("planned_steps", "metered_from", "timed", "replicas", "weights_digest"),
)
"""What the summary of a run has at least."""


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of a run. OptionsError if it is missing or damaged."""
    path = folder / "summary.json"
    with as_written(path, OptionsError):
        found = read_object(path)
    if lacking := [name for name in SUMMED_UP if name not in found]:
        raise OptionsError(f"{path} is not the summary of a run: it has no {', '.join(lacking)}")
    return found


def scores(summary: Summary) -> Table | None:
    """The last held-out scores; None if there are none."""
    found = summary["held_out"]
    return scores_of(title_of(summary), "held out, compression", found) if found else None


def scores_of(title: str, first: str, held_out: Mapping[str, Mapping[str, float | None]]) -> Table:
    """Scores by compression and by name, a mode of compression a row, under the name of the first column."""
    names = [name for name in next(iter(held_out.values())) if name != "num_targets"]
    rows = [[mode, *(score_text(score[name]) for name in names)] for mode, score in held_out.items()]
    return Table(title, [first, *names], rows)


def score_text(score: float | None) -> str:
    """A score in words; one that was NaN or infinite is None."""
    return "NaN" if score is None else f"{score:.4f}"


def title_of(summary: Summary) -> str:
    """The name of a run, its steps and their time."""
    return f"{summary['name']}: {steps_of(summary)} steps in {duration_text(summary['training_seconds'])}"


def steps_of(summary: Summary) -> str:
    """The steps of a run, and how many were planned where it is not finished."""
    planned = f" of {summary['planned_steps']:,}, not finished," if summary["running"] else ""
    return f"{summary['steps']:,}{planned}"


def since(summary: Summary) -> str:
    """Since when bytes and seconds of stages are counted, if not since the start."""
    first = summary["metered_from"]
    return f" since step {first:,}, where the cut changed" if first else ""


def channels(summary: Summary) -> Table:
    """The bytes of each channel."""
    columns = ["boundary", "channel", "codec", "MB sent", "of", "ratio", "bits", "% in full"]
    rows = [
        [route(row), row["channel"], row["codec"], *_sizes(row), round(100 * row["full_share"], 1)]
        for row in summary["channels"]
    ]
    note = (
        "Frames of training with their headers, and the bytes of the tensors in them. bits: of an element. in full: "
        "rows sent uncompressed, such as in warm-up."
    )
    return Table(f"bytes sent while training{since(summary)}", columns, rows, note)


def route(channel: Mapping[str, Any]) -> str:
    """The sending and the receiving stage of a channel."""
    low, high = channel["boundary"], channel["boundary"] + 1
    return f"{low} -> {high}" if channel["channel"] == "activations" else f"{high} -> {low}"


def _sizes(row: Mapping[str, Any]) -> list[Value]:
    ratio = row["uncompressed"] / max(1, row["bytes"])
    return [row["bytes"] / 1e6, row["uncompressed"] / 1e6, round(ratio, 2), round(row["bits_per_element"], 2)]


def replicas(summary: Summary) -> Table | None:
    """The bytes that the replicas of each stage sent each other; None without replicas."""
    if not (found := summary["replicas"]):
        return None
    has_owners = any(row["channel"] == "sums" for row in found)
    ways = {
        "parts": "to the owner of a part" if has_owners else "to all replicas",
        "sums": "from the owner to all",
        "statistics": "running statistics, uncompressed, to all",
    }
    rows = [[row["stage"], ways[row["channel"]], *_sizes(row)] for row in found]
    title = f"gradients of weights sent between replicas{since(summary)}, {found[0]['codec']}"
    return Table(title, ["stage", "way", "MB sent", "of", "ratio", "bits"], rows, "Bytes of all replicas.")


def shared(summary: Summary) -> Table | None:
    """The bytes that stages sent to add up gradients of weights that they all hold; None if there are none."""
    if not (found := summary.get("shared")):  # older runs do not say it
        return None
    ways = {"shared parts": "to the owner of a part", "shared sums": "from the owner to all"}
    rows = [[ways[row["channel"]], *_sizes(row)] for row in found]
    title = f"gradients of weights that several stages hold, as sent{since(summary)}, {found[0]['codec']}"
    return Table(title, ["way", "MB sent", "of", "ratio", "bits"], rows)


def exchange(summary: Summary) -> Table | None:
    """The seconds of the exchange between replicas; None without replicas."""
    stages = [stage for stage in summary["stages"] if "exchange" in stage]
    if not stages:
        return None
    rows: list[list[Value]] = []
    for stage in stages:
        spent = {name: stage["exchange"].get(name, 0.0) for name in (*SECTIONS, "other")}  # without a step, none
        total = sum(spent.values())
        rows.append([stage["stage"], _seconds(total), *_shares(spent, total)[1:]])
    note = (
        "replica: waiting until another replica has sent. wire: waiting until that frame arrives. other: gathering and "
        "adding up gradients."
    )
    columns = ["stage", "exchange", "codecs", "replica", "wire", "other"]
    return Table(f"the exchange between replicas{_whose(summary)}{since(summary)}", columns, rows, note)


def stages(summary: Summary) -> Table:
    """Where the time of training went in each stage, and the peak of its memory."""
    total = max(1e-9, summary["training_seconds"])
    on_gpus = any(stage["peak_on_gpu"] is not None for stage in summary["stages"])
    rows: list[list[Value]] = []
    for stage in summary["stages"]:
        peaks = [stage["peak_memory"], stage["peak_on_gpu"]][: 1 + on_gpus]
        memory = [None if peak is None else round(peak / 1e6) for peak in peaks]
        rows.append([stage["stage"], *_shares(stage["seconds"], total), *memory])
    note = (
        "neighbour: waiting until the other stage has sent a frame, or for the gradient norm of all stages. wire: "
        "waiting until that frame arrives. other: reading data, clipping, the schedule itself, waiting of which the "
        "cause is not known, and the work of other stages in the same process. Memory is the whole process's."
    )
    columns = ["stage", "compute", "codecs", "neighbour", "wire", "other", "MB", *(["MB on GPU"] * on_gpus)]
    counted = since(summary) and f"; all but other is counted{since(summary)}"
    title = f"where the {duration_text(total)} of training steps{_whose(summary)} went, and peak memory{counted}"
    return Table(title, columns, rows, note)


def _whose(summary: Summary) -> str:
    """Of which replica the seconds are, if not of all."""
    timed = summary["timed"]
    return "" if timed == "all" else f" of {timed}"


def _shares(seconds: Mapping[str, float], total: float) -> list[str]:
    """Seconds of compute, codecs, waiting for the neighbour and the wire, and the rest, with their shares."""
    parts = [seconds["compute"], seconds["encode"] + seconds["decode"], seconds["neighbour"], seconds["wire"]]
    parts.append(max(0.0, total - sum(parts)))
    whole = max(1e-9, sum(parts))  # more than the total where a stage waits in a step while the last stage saves
    return [f"{_seconds(spent)} {spent / whole:.0%}" for spent in parts]


def _seconds(spent: float) -> str:
    return f"{spent:.1f} s" if spent < 100 else f"{spent:.0f} s"


def cut(summary: Summary) -> Table:
    """The size of each stage, and where it computed."""
    known = [(stage["stage"], stage["layers"], stage["parameters"], stage["device"]) for stage in summary["stages"]]
    return Table("The stages", ["stage", "layers", "parameters", "device"], known)
