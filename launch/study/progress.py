"""How far a cell is, read from its folder. The process that runs the cell is not asked."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from thinwire.compress.stores.durable import write_durably
from thinwire.errors.files import opened, read_object
from thinwire.launch.run.logs.files import pieces
from thinwire.launch.shared.strict_json import dumps
from thinwire.launch.study.check import Checked
from thinwire.pipeline.saving.checkpoint_folder import remove_checkpoints

State = Literal["finished", "goes on", "begins", "begins anew"]
"""What a study does with a cell: keep it, resume it, begin it, or begin it again because its origin has changed."""

_TAIL = 4096
"""Bytes at the end of a log that hold its last line."""


@dataclass(frozen=True)
class Found:
    """The state of a cell by its folder."""

    state: State
    changed: tuple[str, ...] = ()
    """The names of the fields of the origin that have changed."""


def find(checked: Checked, *, any_code: bool) -> Found:
    """The state of a cell; `any_code` keeps cells that another version of the code has made."""
    folder = checked.cell.folder
    saved = read_json(folder / "cell.json").get("origin")
    if saved is None:
        return Found("begins anew", ("cell.json, which is damaged",)) if is_finished(folder) else Found("begins")
    # another version of the code may know other fields
    names = (saved.keys() & checked.origin.keys()) - {"code"} if any_code else saved.keys() | checked.origin.keys()
    changed = sorted(name for name in names if saved.get(name) != checked.origin.get(name))
    if changed:
        return Found("begins anew", tuple(changed))
    if is_finished(folder):
        return Found("finished")
    return Found("goes on" if list(folder.glob("checkpoints/*/manifest.json")) else "begins")


def is_finished(folder: Path) -> bool:
    """Whether a run has taken all its steps and its summary says so."""
    summary = read_json(folder / "summary.json")
    steps = summary.get("steps")
    return summary.get("running") is False and steps is not None and steps == summary.get("planned_steps")


def weights_digest(folder: Path) -> str | None:
    """The digest of a run's last weights; None where there is no summary."""
    return read_json(folder / "summary.json").get("weights_digest")


def begin(checked: Checked, beside: Mapping[str, Any]) -> None:
    """Write the origin of a cell, and the values of `beside`, into its folder."""
    folder = checked.cell.folder
    folder.mkdir(parents=True, exist_ok=True)
    said = {"row": checked.cell.row, "seed": checked.cell.seed, "origin": checked.origin, **beside}
    write_durably(folder / "cell.json", f"{dumps(said, indent=2)}\n".encode())


def drop_checkpoints(folder: Path) -> None:
    """Remove the checkpoints of a finished cell."""
    remove_checkpoints(folder / "checkpoints")


def steps_done(folder: Path) -> int:
    """Optimizer steps that a run has logged so far."""
    line = next((line for piece in reversed(pieces(folder / "metrics.jsonl")) if (line := last_line(piece))), "")
    try:
        return int(json.loads(line)["step"]) + 1 if line else 0
    except (ValueError, KeyError, TypeError, OverflowError):  # a line that is being written
        return 0


def last_line(path: Path) -> str:
    """The last line of a file; empty where there is none."""
    try:
        with opened(path) as file:
            file.seek(max(0, path.stat().st_size - _TAIL), os.SEEK_SET)
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none, or it is damaged."""
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}
