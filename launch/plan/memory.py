"""Whether the model of a recipe fits into the memory of this machine, before it is built."""

from __future__ import annotations

from thinwire.launch.recipe.recipe import Recipe
from thinwire.launch.shared.control_groups import machine_memory
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.options import OptimizerOptions

_BYTES = {"fp32": 4.0, "bf16": 2.0, "nf4": 0.5}


def check_memory(recipe: Recipe, parameters: int | None, replicas: int) -> None:
    """Check that this machine can hold the parameters of `replicas` models, their gradients and moments.

    Where the parameters of a model cannot be counted, nothing is checked.

    Raises:
        OptionsError: they need more than the machine has.
    """
    held = machine_memory()
    if parameters is None or held is None:
        return
    numbers = numbers_of_a_parameter(recipe)
    if recipe.model.lora.rank is not None:  # the adapter itself is small
        numbers = 1
    elif recipe.optimizer.of_another:  # it may keep less than adamw, such as moments of 8 bits
        numbers = min(numbers, 2)
    needed = parameters * replicas * numbers * _BYTES[recipe.model.dtype]
    if needed > held:
        of_replicas = f" in each of {replicas} replicas" if replicas > 1 else ""
        raise OptionsError(
            f"the model must fit into memory: its {parameters / 1e6:,.0f} million parameters{of_replicas} take at "
            f"least {needed / 1e9:,.1f} GB to train, and this machine has {held / 1e9:,.1f} GB, its swap included; "
            f"make the model smaller, or spread its stages over more machines with torchrun"
        )


def copies(optimizer: OptimizerOptions) -> int:
    """Tensors as large as the parameters in a checkpoint: the parameters and the moments, as of adamw if unknown."""
    return 2 if optimizer.name in ("sgd", "muon") else 3


def numbers_of_a_parameter(recipe: Recipe) -> int:
    """Numbers that training keeps for each parameter, of its dtype: itself, its gradient, its moments."""
    optimizer, training = recipe.optimizer, recipe.training
    if not (training.steps if training.epochs is None else training.epochs):
        return 1
    has_moments = optimizer.name != "sgd" or bool(optimizer.momentum)
    return 2 + (copies(optimizer) - 1) * has_moments
