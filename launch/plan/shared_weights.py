"""Weights that several stages hold, as a tied head: what their gradients go through, and what that costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.nn import Parameter

from thinwire.compress import Method, parse
from thinwire.launch.plan.places import real_placement
from thinwire.launch.recipe.recipe import Recipe
from thinwire.launch.shared.tables import size_text
from thinwire.models.layers import Blueprint
from thinwire.pipeline.replicas.shared import bytes_of_step
from thinwire.pipeline.wire.channel import AS_IT_IS


def method_of_shared(recipe: Recipe) -> Method:
    """What the gradients of shared weights go through; those of weights in bfloat16 are no wider than these."""
    method = recipe.compression.method_of_shared
    return parse("bf16") if recipe.model.dtype != "fp32" and method == AS_IT_IS else method


def notes_on_shared(recipe: Recipe, blueprint: Blueprint, cuts: Sequence[range]) -> list[str]:
    """What weights cost that several stages hold, and which are one weight in the library's model and two here."""
    if not blueprint.tied and not blueprint.shared:
        return []
    layers, method = blueprint.on_meta, method_of_shared(recipe)
    weights = {name: parameter for layer in layers for name, parameter in layer.full_parameters().items()}
    process_of = real_placement(recipe).process_of

    def sends(parameters: Iterable[Parameter], holders: Sequence[int]) -> str:
        processes = [process_of[stage] for stage in holders]
        return size_text(bytes_of_step(sum(each.numel() for each in parameters), processes, method))

    ends = [0, len(process_of) - 1]
    untied = [
        f"the library's model has one weight for {name} and {other}; here the two train apart, so the exported model "
        f"has two; set model.tied: sum to keep one, which sends {sends([weights[name]], ends)} each step"
        for name, other in blueprint.tied.items()
    ]
    parts = {name: part for layer in layers for name, part in layer.parts.items() if name in blueprint.shared}
    holders = [stage for stage, cut in enumerate(cuts) if any(layers[index].parts.keys() & parts for index in cut)]
    size = sends((parameter for part in parts.values() for parameter in part.parameters()), holders)
    codec = "" if method == AS_IT_IS else f" through {method}"
    summed = f"{len(holders)} stages hold {', '.join(parts)}: each step sends {size} to sum its gradients over them"
    return [*untied, *([f"{summed}{codec}"] if len(holders) > 1 else [])]
