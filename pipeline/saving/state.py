"""The state of one stage in a checkpoint, and how it is restored.

    weights/NAME                  parameters and buffers, named as in the unsplit model
    optimizer/NAME/KEY            what the optimizer keeps for a parameter
    stores/CODER-PURPOSE          the buffers of feedback
    replicas/worker/REPLICA/NAME/FIRST    the error of a replica's gradients; elements of a parameter from FIRST on
    replicas/owner/NAME/FIRST             the error of their sums
    replicas/used                         which parameters any replica has used
    replicas/own/REPLICA/NAME             the weights of a replica that steps alone; weights/ has the common ones
    replicas/statistics/REPLICA/NAME      the running statistics of its batch norms; weights/ has the common ones
    replicas/inner/REPLICA/NAME/KEY       its optimizer; optimizer/ has the outer one
    shared/worker/HOLDER/NAME/FIRST       the error of a stage's gradients of weights that several stages hold
    shared/owner/NAME/FIRST               the error of their sums
    shared/used                           that all of them are used
    replicas/held by all                  the steps after which weights/ were exchanged, if replicas step alone

A CODER is named by boundary, channel and tensor, and in a simulation by the replica, if that has codecs of its own.
Nothing is named by a rank. So any cut can read what belongs to weights, which is all of replicas, and any placement of
the same cut the rest. No generator is kept: a key gives every random number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from thinwire.compress.buffers import Purpose
from thinwire.compress.stores.store import Store
from thinwire.models.checkpoint import WEIGHTS
from thinwire.models.layers import Stage
from thinwire.pipeline.devices.device import copy_to_host
from thinwire.pipeline.errors import CheckpointError
from thinwire.pipeline.saving.checkpoint import StageState
from thinwire.pipeline.saving.checkpoint_folder import VALUES, SavedStage, reading
from thinwire.pipeline.stages.compressed_stage import CompressedStage

_AS_LARGE = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""What every optimizer keeps in the size of the parameter; the 8 bits of some have other tensors beside it."""


def collect(stage: CompressedStage, optimizer: Optimizer, exchange: Mapping[str, Tensor], *, lent: bool) -> StageState:
    """A stage's state, between two steps; stores give a snapshot.

    Args:
        stage, optimizer: the stage and its optimizer.
        exchange: the state of its exchanges with other replicas and stages, by full names, copied already.
        lent: whether parameters and what the optimizer keeps on the CPU are not copied, because nothing changes them
            before the caller calls `Checkpoints.release`.
    """
    check_optimizer(optimizer)
    lent = lent and stage.device.type == "cpu"
    module = module_of(stage)
    parameters = module.full_parameters()
    taken: Callable[[Tensor], Tensor] = Tensor.detach if lent else copy_to_host
    tensors = {
        f"{WEIGHTS}{name}": (taken if name in parameters else copy_to_host)(tensor)
        for name, tensor in module.saved_state().items()
    }
    tensors |= exchange
    numbers: dict[str, dict[str, Any]] = {}  # with None for each tensor
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{name}/{key}"] = taken(value)
            numbers.setdefault(name, {})[key] = None if isinstance(value, Tensor) else value
    stores: dict[str, Store] = {}
    for name, coder in stage.ends.coders().items():
        stores |= {f"{name}-{purpose}": store for purpose, store in coder.buffers.stores.items()}
    base = list(module.base.values())
    values = {"base": base, "passes": dict(stage.passes), "meter": stage.meter.state_dict(), "optimizer": numbers}
    return StageState(tensors, values, {name: (store, store.snapshot()) for name, store in stores.items()}, lent=lent)


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise CheckpointError if an optimizer keeps what no checkpoint holds.

    That is tensors of other classes, and what it counts for all parameters together, as Prodigy does: each stage has
    its own, and another cut has others.
    """
    counted = {
        name
        for group in optimizer.param_groups
        for name, first in optimizer.defaults.items()
        if name not in ("lr", "weight_decay") and isinstance(first, int | float) and group.get(name) != first
    }
    others = {
        type(value).__name__
        for kept in optimizer.state.values()
        for value in kept.values()
        if isinstance(value, Tensor) and type(value) is not Tensor
    }
    if counted | others:
        raise CheckpointError(
            f"no checkpoint can hold what {type(optimizer).__name__} keeps, {', '.join(sorted(counted | others))}; set "
            f"checkpoint.every to 0 steps, or take another optimizer"
        )


def restore(stage: CompressedStage, optimizer: Optimizer, saved: SavedStage) -> None:
    """Restore a stage, without its stores. The stage must be connected.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model.
    """
    restore_model(stage, optimizer, [saved])
    restore_passes(stage, saved)
    with reading(saved.path / VALUES):
        stage.meter.load_state_dict(saved.values["meter"])


def restore_passes(stage: CompressedStage, saved: SavedStage) -> None:
    """Restore how many passes a stage has run; alike in all stages, and random numbers follow from them."""
    with reading(saved.path / VALUES):
        stage.passes = {phase: int(saved.values["passes"][phase]) for phase in stage.passes}
        if not all(-1 <= count < 2**62 for count in stage.passes.values()):
            raise ValueError("passes must be counts")


def stores_of(stage: CompressedStage, saved: SavedStage) -> dict[str, Store]:
    """The stores that a stage saved, created empty if missing. The stage must be connected."""
    names = {name.rpartition("/")[0] for name in saved.names("stores/")}
    found = {
        f"{name}-{purpose}": coder.buffers.store(purpose)
        for name, coder in stage.ends.coders().items()
        for purpose in get_args(Purpose)
        if f"{name}-{purpose}" in names
    }
    if missing := sorted(names - found.keys()):
        raise CheckpointError(f"{saved.path} has buffers that this run has no place for: {', '.join(missing)}")
    return found


def restore_model(stage: CompressedStage, optimizer: Optimizer, saved: Sequence[SavedStage]) -> None:
    """Restore a stage's weights and optimizer state from the stages of any cut.

    Raises:
        CheckpointError: a weight is not there, or has another shape.
    """
    module = module_of(stage)
    _check_base(module, saved)
    missing = module.saved_state()
    for part in saved:
        found = part.tensors(WEIGHTS, missing.keys())
        for name, tensor in found.items():
            _copy(tensor, missing.pop(name), name)
    if missing:
        raise CheckpointError(
            f"the checkpoint in {saved[0].folder} has no weights {', '.join(sorted(missing)[:5])}: resume with the "
            f"model that it was made with"
        )
    parameters = module.full_parameters()
    for part in saved:
        with reading(part.path / VALUES):
            numbers = {name: dict(kept) for name, kept in part.values["optimizer"].items()}
        tensors = {key.rpartition("/")[0] for key in part.names("optimizer/")}
        for name in parameters.keys() & (tensors | numbers.keys()):
            parameter, found = parameters[name], part.tensors(f"optimizer/{name}/")
            values = {**numbers.get(name, {}), **found}
            if lost := sorted(key for key, value in values.items() if value is None):
                raise CheckpointError(
                    f"{part.path} must hold what the optimizer keeps for {name}, but {', '.join(lost)} is missing; "
                    f"take another checkpoint"
                )
            for key, value in found.items():
                if key in _AS_LARGE and value.numel() != parameter.numel():
                    raise CheckpointError(
                        f"{part.path} must hold {parameter.numel()} numbers of {key} of {name}, got {value.numel()}; "
                        f"resume with the model it was made with"
                    )
            optimizer.state[parameter] = {key: beside(parameter, key, value) for key, value in values.items()}


def _check_base(module: Stage, saved: Sequence[SavedStage]) -> None:
    """Raise CheckpointError if the frozen weights beside an adapter are not those that it was trained with."""
    known: set[str] = set()
    for part in saved:
        with reading(part.path / VALUES):
            known |= set(part.values["base"])
    if changed := [name for name, line in module.base.items() if line not in known]:
        raise CheckpointError(
            f"the checkpoint in {saved[0].folder} goes with the model that it was made with, which has changed: "
            f"{', '.join(changed[:5])}; put that model back"
        )


def beside(parameter: Parameter, key: str, value: Any) -> Any:
    """What an optimizer keeps for a parameter, where the optimizer wants it: the number of steps stays on the host."""
    return value.to(parameter.device) if isinstance(value, Tensor) and key != "step" else value


def _copy(saved: Tensor, into: Tensor, name: str) -> None:
    if saved.shape != into.shape or saved.dtype != into.dtype:
        raise CheckpointError(
            f"{name} is {saved.dtype} of shape {list(saved.shape)} in the checkpoint, and {into.dtype} of shape "
            f"{list(into.shape)} in the model: resume with the model it was made with"
        )
    with torch.no_grad():
        into.copy_(saved)


def module_of(stage: CompressedStage) -> Stage:
    """The layers of a stage of a run."""
    assert isinstance(stage.submod, Stage)
    return stage.submod


def trained(stage: CompressedStage) -> dict[str, Parameter]:
    """The parameters that a stage trains, each once, by its first name in the unsplit model."""
    found = {id(each): (name, each) for name, each in reversed(module_of(stage).full_parameters().items())}
    return {name: each for name, each in reversed(found.values()) if each.requires_grad}
