"""The folders of runs, as a report reads them, and the numbers of one run.

One error names everything that cannot be read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from thinwire.errors import attempt
from thinwire.errors.files import as_written, read_lines, read_text
from thinwire.launch.recipe.yaml_text import load_yaml
from thinwire.launch.results.figures import read_summary
from thinwire.launch.shared.strict_json import with_nan
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.frames import CHANNELS

if TYPE_CHECKING:
    from pandas import DataFrame

MODES: tuple[Literal["on", "off"], ...] = ("off", "on")
"""How the boundaries compress in evaluation, in the order of the papers' tables."""
UNITS = {"accuracy": ("%", 100.0)}
"""The scores that tables show in another unit than a summary, and what one is multiplied by."""
OF_WEIGHTS = ("replicas", "shared")
"""Where a summary has the gradients of weights that were sent: between replicas, and stages that hold the same."""


@dataclass(frozen=True)
class RunFiles:
    """The content of the files of a run."""

    folder: Path
    summary: Mapping[str, Any]
    recipe: str
    """The resolved recipe, as YAML."""
    steps: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    answers: Sequence[Mapping[str, Any]] = ()
    torn: Sequence[str] = ()
    """A sentence for each log whose last line is not whole."""

    @cached_property
    def fields(self) -> Mapping[str, Any]:
        """The recipe's fields."""
        found: Mapping[str, Any] = load_yaml(self.recipe, str(self.folder))
        return found

    @property
    def seed(self) -> int:
        """The seed of the run."""
        found: int = self.fields["training"]["seed"]
        return found

    @property
    def speed(self) -> float:
        """Samples a second in training steps, without the time of evaluations and saves."""
        samples: int = sum(step["samples"] for step in self.steps)
        return samples / max(1e-9, math.fsum(float(step["seconds"]) for step in self.steps))

    @property
    def sent(self) -> list[Mapping[str, Any]]:
        """What training sent: a row for each channel of each boundary, and of the gradients of weights."""
        return [row for name in ("channels", *OF_WEIGHTS) for row in self.summary.get(name, [])]

    @property
    def ratio(self) -> float:
        """Bytes of the uncompressed tensors over bytes sent."""
        sent = training_bytes(self.sent)
        uncompressed: int = sum(row["uncompressed"] for row in self.sent)
        return uncompressed / sent if sent else 1.0

    @property
    def codecs(self) -> str:
        """The codecs of activations and gradients, and of those of weights; a comma joins several of a channel."""
        found = [", ".join(dict.fromkeys(row["codec"] for row in self._rows(channel))) for channel in CHANNELS]
        of_weights = {f"{name} {row['codec']}": row for name in OF_WEIGHTS for row in self.summary.get(name, [])}
        coded = [said for said, row in of_weights.items() if row["codec"] != "none"]
        return ", ".join(["/".join(dict.fromkeys(found)) or "none", *coded])

    @property
    def is_uncompressed(self) -> bool:
        """Whether no frame was compressed, neither at a boundary nor of gradients of weights."""
        return all(row["codec"] == "none" for row in self.sent)

    @property
    def is_finished(self) -> bool:
        """Whether the run has come to its end; one that trains still, or was killed, has not."""
        return not self.summary["running"]

    def has_diverged(self, name: str = "loss") -> bool:
        """Whether a score of the last evaluation was NaN or infinite."""
        return any(score.get(name) is None for score in self.summary["held_out"].values())

    @property
    def full_share(self) -> float:
        """The share of the rows of boundaries that training sent uncompressed."""
        rows, full = (sum(row[name] for row in self.summary["channels"]) for name in ("rows", "full_rows"))
        return float(full / max(1, rows))

    def bits(self, channel: str) -> float | None:
        """Bits for each element on the wire, over all boundaries; None if nothing crossed."""
        rows = self._rows(channel)
        elements: int = sum(row["elements"] for row in rows)
        return 8 * training_bytes(rows) / elements if elements else None

    def score(self, mode: str, name: str) -> float | None:
        """The last held-out score of that name in its unit; None if the run has no such score."""
        found: float | None = self.summary["held_out"].get(mode, {}).get(name)
        return None if found is None else factor_of(name) * found

    @cached_property
    def trained(self) -> DataFrame:
        """The steps done, seconds of training steps, MB sent in training, and training loss after each step.

        Evaluations do not count. Beside other replicas the log of steps counts the bytes of the first one, so they are
        scaled to those of all.
        """
        from pandas import DataFrame  # takes half a second

        lines = [[step[name] for name in ("step", "seconds", "bytes", "loss")] for step in self.steps]
        log = DataFrame(lines, columns=["step", "seconds", "MB", "loss"], dtype=float)
        # a killed run may have logged steps after its last summary
        metered = log["step"].between(self.summary["metered_from"], self.summary["steps"], inclusive="left")
        counted = log["MB"][metered].sum()
        scale = (training_bytes(self.sent) / counted if counted else 1.0) / 1e6
        return log.assign(step=log["step"] + 1, seconds=log["seconds"].cumsum(), MB=scale * log["MB"].cumsum())

    def scored(self, mode: str) -> DataFrame:
        """The same at each evaluation, with its held-out loss."""
        from numpy import interp
        from pandas import DataFrame  # takes half a second

        scored = [line for line in self.evaluations if mode in line]
        steps, done = [line["step"] for line in scored], self.trained[["step", "seconds", "MB"]]
        # a replica that was lost and came back has no lines of the steps between, and may evaluate there
        places = {name: interp(steps, [0.0, *done["step"]], [0.0, *done[name]]) for name in done}
        return DataFrame({**places, "loss": [with_nan(line[mode]["loss"]) for line in scored]})

    def _rows(self, channel: str) -> list[Mapping[str, Any]]:
        return [row for row in self.summary["channels"] if row["channel"] == channel]


def unit_of(score: str) -> str:
    """The unit of a score in tables; empty for none."""
    return UNITS.get(score, ("", 1.0))[0]


def factor_of(score: str) -> float:
    """What a run's score is multiplied by to be in that unit."""
    return UNITS.get(score, ("", 1.0))[1]


def training_bytes(channels: Sequence[Mapping[str, Any]]) -> int:
    """Bytes of all training frames, headers included."""
    return sum(channel["bytes"] for channel in channels)


def read(paths: Sequence[Path]) -> list[RunFiles]:
    """The runs at these paths. OptionsError names each path that is none."""
    return [*attempt(*(partial(_read_place, path) for path in paths))]


def _read_place(path: Path) -> RunFiles:
    if (path / "summary.json").exists():
        return read_run(path)
    if (path / "recipe.yaml").exists():
        raise OptionsError(
            f"{path} must be a run with a summary, written at its first save or its end; if it has "
            f"a checkpoint, thinwire train --resume {path} goes on"
        )
    lacks = "has no summary.json" if path.exists() else "does not exist"
    raise OptionsError(f"{path} must be the folder of a run, but {lacks}")


def read_run(folder: Path) -> RunFiles:
    """The files of a run. OptionsError names each that cannot be read."""
    torn = list[str]()

    def part(name: str, take: Callable[[Path], Any], missing: Any = None) -> Any:
        path = folder / name
        if missing is not None and not path.exists():
            return missing
        with as_written(path, OptionsError):
            return take(path)

    summary, recipe, steps, evaluations, answers = attempt(
        lambda: read_summary(folder),
        lambda: part("recipe.yaml", _recipe),
        lambda: part("metrics.jsonl", partial(_json_lines, torn)),
        lambda: part("evaluations.jsonl", partial(_json_lines, torn), []),
        lambda: part("answers.jsonl", partial(_json_lines, torn), []),
    )
    return RunFiles(folder, summary, recipe, steps, evaluations, answers, torn)


def _recipe(path: Path) -> str:
    """The text of a recipe. OptionsError if it has no fields."""
    text = read_text(path)
    found = load_yaml(text, str(path))
    if not isinstance(found, Mapping) or not isinstance(found.get("pipeline"), Mapping):
        raise OptionsError(f"{path} must hold the fields of a recipe")
    return text


def _json_lines(torn: list[str], path: Path) -> list[Any]:
    """The values of a log's lines. A last line that is not whole is left out, and `torn` gets a sentence."""
    lines = list(read_lines(path))
    try:
        json.loads(lines[-1] if lines else "{}")
    except ValueError:
        torn.append(f"{path} ends in a line that is not whole, as after a power cut; it is left out")
        lines.pop()
    return [json.loads(line) for line in lines]
