"""The cost of each layer of a recipe's model, the cut of the recipe, and the best cut, as tables.

The costs are measured here, or were measured on other machines: `thinwire predict --json` printed them there. A run
without `pipeline.layers` cuts by counted costs: every process must find the same cut, and measured times differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from thinwire.compress.transfer import put
from thinwire.errors.files import read_object
from thinwire.launch.plan.prepared import Prepared
from thinwire.launch.recipe.fields import read_fields
from thinwire.launch.shared.tables import Table, Value
from thinwire.launch.timing.timetable import timetable
from thinwire.launch.timing.workload import frame_bytes
from thinwire.models.costs import LayerCost, measure
from thinwire.models.layers import stage_output_examples
from thinwire.models.partition import Machine, partition_over
from thinwire.pipeline.devices.device import choose, described
from thinwire.pipeline.devices.memory import peak_memory
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.frames import CHANNELS
from thinwire.pipeline.measuring.meters import Meter
from thinwire.pipeline.options import CompressionOptions
from thinwire.pipeline.training.optimization import WholeBatchLoss

_WITH_HOLES = 1.1
"""The memory of a stage by that of its tensors: malloc keeps some free between them (measured/real-size.md)."""


@dataclass(frozen=True)
class MeasuredMachine:
    """What the layers cost on one machine."""

    name: str
    """The path of the file; empty for this machine."""
    device: str
    costs: tuple[LayerCost, ...]
    process_bytes: int = 0
    """The memory of a process before it has a model; 0 on a GPU."""


@dataclass(frozen=True)
class Cuts:
    """The cut of a recipe beside the best one."""

    tables: list[Table]
    best: list[int]
    """The number of layers of each stage in the best cut."""
    measured: MeasuredMachine | None
    """What was measured on this machine; None if nothing was."""
    fits: list[str]
    """Whether each cut fits into the memory that was given, a sentence each; empty without."""


def places_of(prepared: Prepared, files: Sequence[str]) -> list[MeasuredMachine]:
    """What the layers cost where each stage computes: as files say, one for each stage, or as measured here."""
    names = [layer.name for layer in prepared.blueprint.layers]
    count = prepared.recipe.pipeline.num_stages
    return read_all(files, count, names) or [_here(prepared)] * count


def cuts_of(
    prepared: Prepared,
    places: Sequence[MeasuredMachine],
    compression: CompressionOptions,
    bandwidth: float,
    limits: Sequence[float],
) -> Cuts:
    """The cut of the recipe, and the one whose slowest stage or link is fastest.

    Args:
        prepared: the recipe.
        places: what the layers cost where each stage computes.
        compression: the codecs as they are sent.
        bandwidth: bits a second of the links.
        limits: the most gigabytes of each stage.
    """
    machines = _machines(places, prepared, limits)
    links = None if math.isinf(bandwidth) else _boundary_costs(prepared, compression, bandwidth)
    best = partition_over(machines, boundary_costs=links)
    several = len(set(places)) > 1
    tables = [
        _machines_table(places, best) if several else _layers_table(places[0], best),
        _stages_table("the cut of the recipe", prepared.cuts, places, machines),
        _stages_table("the best cut for these costs", best, places, machines),
    ]
    shown = {} if math.inf in limits else {"the cut of the recipe": prepared.cuts, "the best cut": best}
    fits = [_fit(name, _sizes(cuts, machines), limits) for name, cuts in shown.items()]
    return Cuts(tables, [len(cut) for cut in best], None if places[0].name else places[0], fits)


def _sizes(cuts: Sequence[range], machines: Sequence[Machine]) -> list[float]:
    """The gigabytes that each stage takes at most."""
    return [
        sum((machine.memory or [])[layer] for layer in cut) + max((machine.working or [])[layer] for layer in cut)
        for cut, machine in zip(cuts, machines, strict=True)
    ]


def _fit(name: str, sizes: Sequence[float], limits: Sequence[float]) -> str:
    """Whether the stages of a cut fit, in words."""
    large = [
        f"stage {stage} needs {size:.3g} GB and has {limit:.3g} GB"
        for stage, (size, limit) in enumerate(zip(sizes, limits, strict=True))
        if size > limit
    ]
    if large:
        return f"{name} does not fit: {', '.join(large)}"
    needs = (f"{size:.3g} of {limit:.3g} GB" for size, limit in zip(sizes, limits, strict=True))
    return f"{name} fits: its stages need {', '.join(needs)}"


def limits_of(given: Sequence[float] | None, num_stages: int) -> list[float]:
    """The most gigabytes of each stage: `given` is one number for all, or one for each; None without limits."""
    gigabytes = list(given or [math.inf])
    if mistaken := [value for value in gigabytes if not value > 0]:
        raise OptionsError(f"--memory must be above 0 GB, got {mistaken[0]:g}")
    if len(gigabytes) not in (1, num_stages):
        raise OptionsError(
            f"--memory must be one number for all stages, or one for each of {num_stages}, got {len(gigabytes)}"
        )
    return gigabytes * (num_stages if len(gigabytes) == 1 else 1)


def _machines(places: Sequence[MeasuredMachine], prepared: Prepared, limits: Sequence[float]) -> list[Machine]:
    """What the layers cost each stage; stages alike share one object."""
    pipeline, copies = prepared.recipe.pipeline, prepared.recipe.numbers_of_a_parameter
    numbers = pipeline.num_stages, pipeline.num_processes, pipeline.num_microbatches
    held = timetable(pipeline.schedule, *numbers).held("stage")

    def machine(place: MeasuredMachine, limit: float, waiting: int) -> Machine:
        memory = [cost.memory(parameter_copies=copies, microbatches=waiting) for cost in place.costs]
        return Machine(
            costs=[cost.compute for cost in place.costs],
            memory=[_WITH_HOLES * nbytes / 1e9 for nbytes in memory],
            working=[(place.process_bytes + _WITH_HOLES * cost.working_bytes) / 1e9 for cost in place.costs],
            memory_limit=limit,
        )

    keys = list(zip(places, limits, held, strict=True))
    made = {key: machine(*key) for key in keys}
    return [made[key] for key in keys]


def _here(prepared: Prepared) -> MeasuredMachine:
    """The cost of each layer for one micro-batch of the training data; the last one computes the loss."""
    training = prepared.recipe.training
    device = choose(training.device)
    process_bytes = 0 if device.type != "cpu" else peak_memory()
    ids, (inputs,), side = prepared.stage_inputs(0, device)
    loss, targets = WholeBatchLoss(prepared.data.task, Meter()), put(prepared.data.training.targets(ids), device)
    costs = measure(
        prepared.blueprint,
        inputs,
        seed=training.seed,
        precision=training.precision,
        recompute=training.recompute,
        device=device,
        side=side,
        loss=lambda outputs: loss(outputs, targets),
    )
    return MeasuredMachine("", described(device), costs, process_bytes)


def _boundary_costs(prepared: Prepared, compression: CompressionOptions, bandwidth: float) -> list[float]:
    """Seconds on the wire of one micro-batch both ways, for a boundary after each layer, with the common codecs."""
    common = replace(compression, boundaries={})
    *outputs, _ = stage_output_examples(
        prepared.blueprint,
        [range(index, index + 1) for index in range(len(prepared.blueprint.layers))],
        prepared.inputs,
        prepared.recipe.training.precision,
        side=prepared.side,
    )
    return [8 * sum(frame_bytes(output, common, 0, channel) for channel in CHANNELS) / bandwidth for output in outputs]


def _layers_table(place: MeasuredMachine, cuts: Sequence[range]) -> Table:
    columns = ["layer", "forward, ms", "backward, ms", "weights, MB", "kept, MB", "output, kB", "stage"]
    stage_of = _stage_of(cuts)
    rows: list[list[Value]] = []
    for index, cost in enumerate(place.costs):
        sizes = [cost.parameter_bytes / 1e6, cost.activation_bytes / 1e6, cost.output_bytes / 1e3]
        rows.append([cost.name, cost.forward * 1e3, cost.backward * 1e3, *sizes, stage_of[index]])
    return Table(f"layers, for one micro-batch, measured {f'in {place.name}' if place.name else 'here'}", columns, rows)


def _machines_table(places: Sequence[MeasuredMachine], cuts: Sequence[range]) -> Table:
    """The layers as measured on several machines."""
    distinct, stage_of = list(dict.fromkeys(places)), _stage_of(cuts)
    rows: list[list[Value]] = [
        [costs[0].name, *(cost.compute * 1e3 for cost in costs), stage_of[index]]
        for index, costs in enumerate(zip(*(place.costs for place in distinct), strict=True))
    ]
    columns = ["layer", *(f"{place.name}, ms" for place in distinct), "stage"]
    note = "; ".join(f"{place.name}: {place.device}" for place in distinct)
    return Table("forward and backward of one micro-batch, as measured on each machine", columns, rows, note)


def _stage_of(cuts: Sequence[range]) -> dict[int, int]:
    return {layer: stage for stage, cut in enumerate(cuts) for layer in cut}


def _stages_table(
    title: str, cuts: Sequence[range], places: Sequence[MeasuredMachine], machines: Sequence[Machine]
) -> Table:
    compute = [sum(place.costs[layer].compute for layer in cut) for place, cut in zip(places, cuts, strict=True)]
    columns = ["stage", "first layer", "last layer", "layers", "compute, of slowest", "memory, MB"]
    names = [cost.name for cost in places[0].costs]
    rows: list[list[Value]] = [
        [stage, names[cut.start], names[cut.stop - 1], len(cut), compute[stage] / max(compute), 1e3 * size]
        for (stage, cut), size in zip(enumerate(cuts), _sizes(cuts, machines), strict=True)
    ]
    if any(place.name for place in places):
        columns.append("measured in")
        for row, place in zip(rows, places, strict=True):
            row.append(place.name)
    return Table(title, columns, rows)


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
    read = [_read(Path(path)) for path in paths]
    for found in read:
        if [cost.name for cost in found.costs] != list(names):
            raise OptionsError(
                f"--measured {found.name} has the costs of another model: its layers are "
                f"{', '.join(cost.name for cost in found.costs)}; measure with this recipe"
            )
        if [cost.output_bytes for cost in found.costs] != [cost.output_bytes for cost in read[0].costs]:
            raise OptionsError(
                f"--measured {found.name} and {read[0].name} must be of the same micro-batches, but the layers have "
                f"outputs of other sizes; measure with the same recipe and options"
            )
    return read


def _read(path: Path) -> MeasuredMachine:
    try:
        given = {**read_object(path.resolve())["measured"], "name": str(path)}
        found: MeasuredMachine = read_fields(MeasuredMachine, given)
        if not found.costs or any(not cost.compute >= 0 for cost in found.costs):
            raise ValueError("costs that were not measured")
        return found
    except OSError as error:
        raise OptionsError(f"cannot read --measured {path}: {error.strerror}") from error
    except (OptionsError, ValueError, KeyError, TypeError) as error:
        raise OptionsError(f"--measured {path} must be the output of `thinwire predict RECIPE --json`") from error
