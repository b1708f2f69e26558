"""From a recipe to what a run is built of, in one order: the model is found, the data is read, the model is cut.

This needs no process group. So a launcher calls it first, and finds every mistake before a process starts.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace

from thinwire.errors import ThinwireError, attempt
from thinwire.launch.folder.weights import with_run_weights
from thinwire.launch.plan.cut import cut
from thinwire.launch.plan.host_data import data_of, with_own_task
from thinwire.launch.plan.memory import check_memory
from thinwire.launch.plan.prepared import Prepared
from thinwire.launch.plan.shared_weights import notes_on_shared
from thinwire.launch.recipe.recipe import PACKAGED, Recipe
from thinwire.launch.recipe.yaml_text import fields_in, read_named
from thinwire.launch.results.hooks import check_hooks
from thinwire.launch.shared import variables
from thinwire.launch.shared.progress import showing
from thinwire.models.compiled import check_compiler
from thinwire.models.data.samples import Data
from thinwire.models.model import find_model
from thinwire.models.precision import check_precision
from thinwire.models.source import ModelSource
from thinwire.pipeline.devices.device import choose


def prepare(recipe: Recipe, given: Data | None = None, *, rank: int | None = None, copies: int = 0) -> Prepared:
    """Find the model, read the data and cut the model. The epochs of the recipe become steps.

    `given` are the data where they are read already; `rank` is that of a stage process, None for a launcher and for
    what runs in one process. A stage process may have an outline in place of the data, and shares them on its host.
    This machine must have the memory to train so many `copies` of the model; 0 trains elsewhere, or not at all.

    Raises:
        ModelError: the data cannot be read or does not fit the model, or the model cannot be cut in this way. One error
            names as many mistakes as possible.
        OptionsError: there is no GPU where one is wanted, or too little memory.
    """
    device = choose(recipe.training.device)
    recipe = _on_its_day(recipe)
    with showing("reading the data"):
        data, source, *_ = attempt(
            lambda: with_own_task(given or data_of(recipe, rank), recipe.training),
            lambda: _source(recipe, copies),
            lambda: check_hooks(recipe.logging),
            lambda: check_precision(recipe.training.precision, device),
            lambda: check_compiler(device) if recipe.training.compile else None,
        )
    recipe = replace(recipe, data=replace(recipe.data, date=data.date or recipe.data.date))
    with showing("cutting the model"):
        prepared = cut(recipe, source, data)
    if prepared.blueprint.compare is not None and (rank is None or variables.LAUNCHER not in os.environ):
        with showing("comparing a tiny copy of the model, cut, with the uncut one"):
            found = prepared.blueprint.compare(packed=recipe.data.packing)
        notes = [*prepared.data.notes, found, *_notes(prepared)]
        prepared = replace(prepared, data=replace(prepared.data, notes=tuple(notes)))
    return _counted_in_steps(prepared)


def _on_its_day(recipe: Recipe) -> Recipe:
    """A recipe whose chats are those of the run that it goes on with, on any later day: with the date of that run."""
    begun = recipe.folder / "recipe.yaml"
    if not recipe.data.chosen_kind.template or recipe.data.date or recipe.checkpoint.resume == "never":
        return recipe
    with suppress(ThinwireError, LookupError, AttributeError, TypeError):  # there is none, or it is damaged
        date = fields_in(read_named(str(begun), PACKAGED, "a run has"), str(begun), "recipe")["data"].get("date")
        return replace(recipe, data=replace(recipe.data, date=date))
    return recipe


def _source(recipe: Recipe, copies: int) -> ModelSource:
    """The model, before any of it is built. OptionsError if this machine cannot hold so many copies in training."""
    source = find_model(with_run_weights(recipe.model))
    if copies:
        check_memory(recipe, source.parameters, copies)
    return source


def _notes(prepared: Prepared) -> list[str]:
    """Sentences on a model of transformers: its tokenizer, the model around it, weights that several stages hold."""
    source, inside = prepared.source, prepared.blueprint.inside
    whole = (
        f"{inside} reads more than text: its text model trains, as AutoModelForCausalLM loads it, and is exported by "
        f"itself"
    )
    notes = [source.note_on_tokenizer(prepared.recipe.data.tokenizer), whole if inside else None]
    shared = notes_on_shared(prepared) if source.options.lora.rank is None else []  # frozen
    return [*filter(None, notes), *shared]


def _counted_in_steps(prepared: Prepared) -> Prepared:
    """The same with steps in place of epochs. Clients without a batch are refused."""
    training, steps_per_epoch = prepared.recipe.training, prepared.steps_per_epoch
    if training.epochs is None:
        return prepared
    training = replace(training, steps=training.epochs * steps_per_epoch, epochs=None)
    return replace(prepared, recipe=replace(prepared.recipe, training=training))
