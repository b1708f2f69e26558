"""The costs of layers that `thinwire partition --json` measured, here or on another machine, read from its output."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from thinwire.models.costs import LayerCost
from thinwire.pipeline.errors import OptionsError


@dataclass(frozen=True)
class MeasuredMachine:
    """What the layers cost on one machine."""

    name: str
    """The file without its folder and suffix, or its path where two have one name; empty for this machine."""
    device: str
    costs: tuple[LayerCost, ...]
    process_bytes: int = 0
    """The memory of a process before it has a model; 0 on a GPU."""

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for `read`."""
        costs = [asdict(cost) for cost in self.costs]
        return {"device": self.device, "costs": costs, "process_bytes": self.process_bytes}


def read_all(paths: Sequence[str], num_stages: int, names: Sequence[str]) -> list[MeasuredMachine]:
    """What the files say, one for each stage in their order; a file may come several times. Empty without files.

    Raises:
        OptionsError: there is not one for each stage, a file cannot be used, or files are not of the same micro-batches
            of a model with layers of these names.
    """
    if not paths:
        return []
    if len(paths) != num_stages:
        raise OptionsError(
            f"--measured must name a file for each of the {num_stages} stages, in their order, got {len(paths)}; "
            f"stages on one machine have the same"
        )
    read = {path: _read(path) for path in dict.fromkeys(paths)}
    first = read[paths[0]]
    for path, found in read.items():
        if [cost.name for cost in found.costs] != list(names):
            raise OptionsError(
                f"--measured {path} has the costs of another model: its layers are "
                f"{', '.join(cost.name for cost in found.costs)}; measure with this recipe"
            )
        if _sizes(found) != _sizes(first):
            raise OptionsError(
                f"--measured {path} and {paths[0]} must be of the same micro-batches, but the layers have outputs of "
                f"other sizes; measure with the same recipe and options"
            )
    return [replace(read[path], name=name) for path, name in zip(paths, _names(paths), strict=True)]


def _names(paths: Sequence[str]) -> list[str]:
    """A name for each file, which no other file has."""
    taken = Counter(file.stem for file in {Path(path).resolve() for path in paths})
    return [stem if taken[stem := Path(path).stem] == 1 else str(Path(path)) for path in paths]


def _sizes(measured: MeasuredMachine) -> list[int]:
    return [cost.output_bytes for cost in measured.costs]


def _read(path: str) -> MeasuredMachine:
    try:
        found = json.loads(Path(path).read_text())["measured"]
        costs = tuple(LayerCost(**cost) for cost in found["costs"])
        if not costs or any(cost.activation_bytes is None or not cost.forward + cost.backward >= 0 for cost in costs):
            raise ValueError("costs that were not measured")
        return MeasuredMachine(path, str(found["device"]), costs, int(found["process_bytes"]))
    except OSError as error:
        raise OptionsError(f"cannot read --measured {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise OptionsError(
            f"--measured {path} must be the output of `thinwire partition RECIPE --json` without --count"
        ) from error
