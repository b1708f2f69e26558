"""What a training asks for beyond its plan: packages, a compiler, and prompts that can be answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from thinwire.errors import attempt
from thinwire.launch.plan.prepare import prepare
from thinwire.launch.plan.prepared import Prepared
from thinwire.launch.plan.prompts import read_prompts
from thinwire.launch.recipe.recipe import Recipe
from thinwire.launch.results.hooks import check_hooks
from thinwire.models.compiled import check_compiler
from thinwire.pipeline.devices.device import choose


def prepare_training(recipe: Recipe, *, copies: int, stages: Sequence[int] | None = None) -> Prepared:
    """As `prepare`, for a run that trains.

    Raises:
        ModelError: as `prepare`; torch cannot compile here; or the model does not write text, or a prompt leaves it no
            room.
        OptionsError: as `prepare`; or what `logging` names is not there.
    """
    device = choose(recipe.training.device)
    prepared, *_ = attempt(
        lambda: prepare(recipe, stages=stages, copies=copies),
        lambda: check_hooks(recipe.logging),
        lambda: check_compiler(device) if recipe.training.compile else None,
    )
    return with_prompts(prepared)


def with_prompts(prepared: Prepared) -> Prepared:
    """A prepared run with the prompts of its recipe as tokens. ModelError as `read_prompts`."""
    if not prepared.recipe.training.prompts:
        return prepared
    return replace(prepared, prompts=read_prompts(prepared.recipe, prepared.blueprint, prepared.outputs))
