"""The results of finished cells: scores, bits on the wire, and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.launch.run.logs.files import read_lines
from thinwire.launch.study.cells import Cell, second
from thinwire.launch.study.definition import MODES, Mode, Signal, Study
from thinwire.launch.study.progress import is_finished, last_line, read_json, steps_done, weights_digest
from thinwire.pipeline.frames import CHANNELS, ChannelName

CurvePoints = list[tuple[float, float]]


@dataclass(frozen=True)
class Result:
    """A finished cell."""

    cell: Cell
    scores: Mapping[Mode, float]
    """The score at the end, in the unit of the study; a mode without a finite score is left out."""
    bits: Mapping[ChannelName, float]
    """Bits an element that training sent, headers, warm-up and first visits included; without a cut nothing."""
    full: float
    """The share of rows that training sent uncompressed: warm-up and first visits."""
    seconds: float
    digest: str
    made: Mapping[str, Any]
    """The values of cell.json."""
    energies: Mapping[Signal, float] = field(default_factory=dict)
    """The share of each signal's energy in its largest values, in %; empty where it is not measured."""


@dataclass(frozen=True)
class Twice:
    """A cell that was trained as one process, and as one for each stage."""

    cell: Cell
    simulated: str
    """The digest of the weights that one process trained."""
    processes: str
    """Of those that several trained."""

    def __str__(self) -> str:
        """Whether both ways end with the same weights, in a sentence."""
        one, several = self.simulated[:16], self.processes[:16]
        if self.simulated == self.processes:
            return f"{self.cell.name}: one process and several end with the same weights, digest {one}"
        return f"{self.cell.name}: one process ends with the weights {one}, several with {several}"


@dataclass(frozen=True)
class Missing:
    """A cell without a result, and why."""

    cell: Cell
    why: str


def read_results(study: Study, cells: Sequence[Cell]) -> tuple[list[Result], list[Missing]]:
    """The results of the finished cells, and the cells that have none."""
    results, missing = [], []
    for cell in cells:
        made = read_json(cell.folder / "cell.json")
        if made and tuple(made.get("command", [])[1 : 1 + len(cell.asked)]) != cell.asked:
            missing.append(Missing(cell, "what is there was made by other options of the study; run it again"))
        elif made and cell.base and made.get("base") != weights_digest(cell.base):
            missing.append(Missing(cell, "the row that it starts with has other weights now; run it again"))
        elif is_finished(cell.folder):
            results.append(_result(study, cell))
        else:
            missing.append(Missing(cell, _why(cell.folder)))
    return results, missing


def read_twice(cells: Sequence[Cell], folder: Path) -> list[Twice]:
    """The cells of a study's folder that were trained both ways to the end, with the same code."""
    found = []
    for cell in cells:
        places = (cell.folder, second(cell, folder).folder)
        if not all(map(is_finished, places)):
            continue
        made = [read_json(place / "cell.json") for place in places]
        ways = [next(iter(one.get("command", ())), "") for one in made]
        if made[0].get("origin") == made[1].get("origin") and {*ways} == {"simulate", "train"}:
            digests = {way: str(weights_digest(place)) for way, place in zip(ways, places, strict=True)}
            found.append(Twice(cell, digests["simulate"], digests["train"]))
    return found


def _result(study: Study, cell: Cell) -> Result:
    summary, made = read_json(cell.folder / "summary.json"), read_json(cell.folder / "cell.json")
    factor = 100.0 if study.unit == "%" else 1.0
    held_out = summary["held_out"]
    found = {mode: held_out.get(mode, {}).get(study.score) for mode in MODES}
    rows = {channel: [row for row in summary["channels"] if row["channel"] == channel] for channel in CHANNELS}
    elements = {channel: sum(row["elements"] for row in of) for channel, of in rows.items()}
    count = sum(row["rows"] for row in summary["channels"])
    return Result(
        cell,
        {mode: factor * value for mode, value in found.items() if value is not None},
        {
            channel: 8 * sum(row["bytes"] for row in of) / elements[channel]
            for channel, of in rows.items()
            if elements[channel]
        },
        sum(row["full_rows"] for row in summary["channels"]) / max(1, count),
        summary["seconds"],
        summary["weights_digest"],
        made,
    )


def _why(folder: Path) -> str:
    """What has become of a cell that has no result."""
    summary = read_json(folder / "summary.json")
    if not (folder / "cell.json").exists():
        return "not begun"
    done = steps_done(folder)
    planned = f" of {summary['planned_steps']}" if "planned_steps" in summary else ""
    said = last_line(folder / "log.txt")
    ended = f"; its last line: {said}" if said and not said.startswith(("step ", "held out ")) else ""
    return f"not finished: {done}{planned} steps are done{ended}"


def score_curve(study: Study, cell: Cell, mode: Mode) -> CurvePoints:
    """The held-out score over optimizer steps."""
    factor = 100.0 if study.unit == "%" else 1.0
    lines = read_lines(cell.folder / "evaluations.jsonl")
    scored = [(line["step"], line.get(mode, {}).get(study.score)) for line in lines]
    return [(float(step), factor * value) for step, value in scored if value is not None]


def loss_curve(cell: Cell) -> CurvePoints:
    """The training loss over optimizer steps."""
    lines = read_lines(cell.folder / "metrics.jsonl")
    return [(float(line["step"] + 1), line["loss"]) for line in lines if line["loss"] is not None]
