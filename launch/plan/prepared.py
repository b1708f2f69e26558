"""A run that is ready to be built: the model and the data of its recipe, found, checked and cut."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.compress.transfer import put
from thinwire.errors.names import first_of
from thinwire.launch.plan.prompts import Prompts
from thinwire.launch.plan.shared_weights import notes_on_shared
from thinwire.launch.recipe.recipe import Recipe
from thinwire.models.data.clients import Turns, some_ids
from thinwire.models.data.sampler import Sampler
from thinwire.models.data.samples import Data
from thinwire.models.layers import Blueprint, Stage, build_stage
from thinwire.models.source import ModelSource
from thinwire.pipeline.devices.device import CPU, put_all
from thinwire.pipeline.devices.memory import told_if_full
from thinwire.pipeline.processes.placement import Placement


@dataclass(frozen=True)
class Prepared:
    """The model and the data of a recipe, found and checked against each other. The stages are not built yet."""

    recipe: Recipe
    source: ModelSource
    blueprint: Blueprint
    cuts: tuple[range, ...]
    data: Data

    outputs: tuple[tuple[Tensor, ...], ...]
    """The output of each stage for a micro-batch, as meta tensors."""
    sampler: Sampler | Turns
    """The order of the samples of all replicas, or of all clients."""
    prompts: Prompts | None = None
    """What is answered at each evaluation, or by `thinwire generate`; None without prompts."""
    unread: Sequence[str] = ()
    """Tensors in the files of the weights that the model does not read."""
    compared: str | None = None
    """What a tiny copy of the model has shown, cut and uncut, in a sentence; None if none was compared."""

    def tell_notes(self) -> None:
        """Print on stderr what reading the data and the model has shown, as a run does at its start."""
        for note in self.notes:
            print(note, file=sys.stderr)

    @property
    def notes(self) -> list[str]:
        """Sentences on the data, on the model and its weights, on its tokenizer and on the prompts."""
        model, inside = self.blueprint, self.blueprint.inside
        unread = "the files of the weights hold tensors that this model does not read"
        whole = "its text model trains, as AutoModelForCausalLM loads it, and is exported by itself"
        of_model = [
            f"{unread}: {first_of(self.unread)}" if self.unread else None,
            self.compared,
            self.source.note_on_tokenizer(self.recipe.data.tokenizer),
            f"{inside} reads more than text: {whole}" if inside else None,
        ]
        shared = notes_on_shared(self.recipe, model, self.cuts) if self.recipe.model.lora.rank is None else []  # frozen
        return [*self.data.notes, *filter(None, of_model), *shared, *(self.prompts.notes if self.prompts else ())]

    @property
    def inputs(self) -> Tensor:
        """A micro-batch of the model's input, as a meta tensor."""
        return self.data.training.example(self.recipe.pipeline.microbatch_size)

    @property
    def side(self) -> dict[str, Tensor]:
        """A micro-batch of the side inputs, as meta tensors by name."""
        return self.data.training.side_example(self.recipe.pipeline.microbatch_size)

    def build(self, index: int, device: torch.device = CPU) -> Stage:
        """A stage with its first weights."""
        training = self.recipe.training
        how: dict[str, Any] = {name: getattr(training, name) for name in ("seed", "precision", "recompute")}
        with told_if_full(index, device):
            return build_stage(self.blueprint, self.cuts[index], device=device, **how)

    def build_all(self, where: Placement, rank: int, device: torch.device = CPU) -> dict[int, Stage]:
        """The stages of process `rank` with their first weights, by index."""
        return {index: self.build(index, device) for index in where.stages_of(rank)}

    def stage_inputs(self, index: int, device: torch.device) -> tuple[Tensor, tuple[Tensor, ...], dict[str, Tensor]]:
        """What a stage is given where it runs by itself: to be timed or compiled before the first step.

        One micro-batch of it: the ids of its samples, its inputs, and the side inputs by name. The inputs are samples
        for the first stage, Gaussian values for the others.
        """
        samples = self.data.training
        ids = some_ids(samples, self.recipe.pipeline.microbatch_size)
        given = (samples.inputs(ids, 0),) if index == 0 else tuple(map(_values, self.outputs[index - 1]))
        # a moved tensor is no leaf, and needs its gradient asked for again
        inputs = tuple(put(x, device).detach().requires_grad_(x.requires_grad) for x in given)
        return ids, inputs, put_all(samples.side(ids), device)


def _values(example: Tensor) -> Tensor:
    """A tensor like the example: Gaussian values for a floating-point tensor, else zeros."""
    if not example.is_floating_point():
        return torch.zeros(example.shape, dtype=example.dtype)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(example.shape, generator=generator).to(example.dtype).requires_grad_(example.requires_grad)
