"""How the finished cells of a study were made: the machine, the code, the data, and options that should not differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from thinwire.launch.run.fields import is_among
from thinwire.launch.study.cells import own_options
from thinwire.launch.study.definition import Options, Scale, Study
from thinwire.launch.study.results import Result

_MEANT: Mapping[str, tuple[str, ...]] = {
    "codec": ("compression.activations", "compression.gradients"),
    "training.steps": ("training.epochs",),
    "replicas.count": ("replicas.",),
    "clients.count": ("clients.",),
}
"""The fields that an option changes beside the one of its name."""

_NO_OPTIONS = ("training.seed", "data", "code", "model's files", "own code", "starts_with.")
"""What an origin has beside options, and what each cell has of its own."""


def circumstances(study: Study, scale: Scale, results: Sequence[Result]) -> list[str]:
    """How the cells were made, a sentence each; empty without cells."""
    if not results:
        return []
    hours = sum(result.seconds for result in results) / 3600
    made = [result.made for result in results]
    machines = {f"{one['machine']['cpu']}, {one['machine']['cores']} cores" for one in made if "machine" in one}
    versions = {f"torch {one['torch']}" for one in made if "torch" in one}
    said = [f"The finished cells took {hours:.1f} hours, on {'; '.join(sorted(machines | versions))}."]
    codes = {str(one["origin"]["code"]) for one in made if "origin" in one}
    if len(codes) > 1:
        said.append(f"They were made by {len(codes)} versions of the code: {', '.join(sorted(codes))}.")
    return said + _different_data(results) + _different_options(study, scale, results)


def _different_data(results: Sequence[Result]) -> list[str]:
    """Which rows were trained on the same data, if not all were."""
    rows: dict[str, list[str]] = {}
    for result in results:
        of = rows.setdefault(json.dumps(result.made.get("origin", {}).get("data")), [])
        if result.cell.row not in of:
            of.append(result.cell.row)
    if len(rows) < 2:
        return []
    groups = " | ".join("; ".join(names) for names in rows.values())
    return [f"There are {len(rows)} sets of data; compare only rows that have the same: {groups}."]


def _different_options(study: Study, scale: Scale, results: Sequence[Result]) -> list[str]:
    """The options that differ between cells though no row sets them, as those of different command lines do."""
    own = {row: own_options(study, scale, row) for row in {result.cell.row for result in results}}
    values: dict[str, set[str]] = {}
    for result in results:
        for name, value in result.made.get("origin", {}).items():
            started = name == "model.weights" and result.cell.base is not None
            if not started and not is_among(name, _NO_OPTIONS) and not _is_set(name, own[result.cell.row]):
                values.setdefault(name, set()).add(json.dumps(value))
    different = [f"{name} ({', '.join(sorted(found))})" for name, found in sorted(values.items()) if len(found) > 1]
    if not different:
        return []
    return [f"The cells differ in options that no row sets, so do not compare their scores: {'; '.join(different)}."]


def _is_set(name: str, own: Options) -> bool:
    """Whether one of a row's own options changes a field."""
    return any(is_among(name, (option, f"{option}.", *_MEANT.get(option, ()))) for option in own)
