"""From a recipe to what a run is built of, in one order: the model is found, the data is read, the model is cut.

This needs no process group. So a launcher calls it first, and finds every mistake before a process starts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from thinwire.errors import ThinwireError, attempt
from thinwire.launch.folder.weights import with_run_weights
from thinwire.launch.plan.host_data import load_once
from thinwire.launch.plan.prepared import Prepared
from thinwire.launch.recipe.recipe import PACKAGED, Recipe
from thinwire.launch.recipe.yaml_text import fields_in, read_named
from thinwire.launch.shared import variables
from thinwire.launch.shared.control_groups import machine_memory
from thinwire.launch.shared.progress import showing
from thinwire.models.cut import fitted, layers_of_stages, outputs_of_stages
from thinwire.models.data.clients import JoinedSamples, Turns, divide, join
from thinwire.models.data.load import load
from thinwire.models.data.outline import read_outline
from thinwire.models.data.sampler import Sampler
from thinwire.models.data.samples import Data
from thinwire.models.errors import ModelError, require
from thinwire.models.layers import Blueprint, check_weights
from thinwire.models.model import find_model
from thinwire.models.source import ModelSource, Use
from thinwire.models.tasks import own_task
from thinwire.pipeline.devices.device import choose
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.options import CompressionOptions, ReplicaOptions
from thinwire.pipeline.options.durations import in_steps
from thinwire.pipeline.wire.channel import AS_IT_IS

_BYTES = {"fp32": 4.0, "bf16": 2.0, "nf4": 0.5}


def prepare(
    recipe: Recipe, given: Data | None = None, *, stages: Sequence[int] | None = None, copies: int = 0
) -> Prepared:
    """Find the model, read the data and cut the model. The recipe says then what was left to them.

    That is whether a tied head stays one weight, the date of chats, and steps in place of epochs. `given` are the data
    where they are read already; `stages` are those of a stage process, None for a launcher and for what runs in one
    process. A stage process may have an outline in place of the data, and shares them on its host. This machine must
    have the memory to train so many `copies` of the model; 0 trains elsewhere, or not at all.

    Raises:
        ModelError: the data cannot be read or does not fit the model, or the model cannot be cut in this way. One error
            names as many mistakes as possible.
        OptionsError: there is no GPU where one is wanted, or too little memory.
    """
    recipe, pipeline, precision = _on_its_day(recipe), recipe.pipeline, recipe.training.precision
    with showing("reading the data"):
        data, source, device = attempt(
            lambda: _data(recipe, stages, given),
            lambda: _source(recipe, copies),
            lambda: choose(recipe.training.device),
        )
    if device.type == "cpu":
        # Autograd counts devices once, in the first backward. After tensors without data it would count the eight GPUs
        # that torch pretends for these, and start a thread for each. A launcher with threads would not fork.
        torch.ones(1, requires_grad=True).backward()
    micro_batch = data.training, pipeline.microbatch_size, precision
    with showing("cutting the model"):
        model, data = fitted(source.blueprint(Use.of(recipe.data, data, pipeline.batch_size)), data)
        cuts, sampler, unread = attempt(
            lambda: layers_of_stages(model, pipeline.layers, pipeline.num_stages, *micro_batch),
            lambda: _sampler(recipe, data),
            lambda: check_weights(model),
        )
        recipe = _decided(recipe, data, model, sampler.steps_per_epoch)
        check_fit(model, recipe.replicas, recipe.compression)
        outputs = outputs_of_stages(model, cuts, *micro_batch, data.task)
    compared = None
    if model.compare is not None and (stages is None or variables.LAUNCHER not in os.environ):
        with showing("comparing a tiny copy of the model, cut, with the uncut one"):
            compared = model.compare()
    return Prepared(recipe, source, model, cuts, data, outputs, sampler, unread=unread, compared=compared)


def _on_its_day(recipe: Recipe) -> Recipe:
    """A recipe whose chats are those of the run that it goes on with, on any later day: with the date of that run."""
    if not recipe.data.chosen_kind.template or recipe.data.date or recipe.checkpoint.resume == "never":
        return recipe
    begun = str(recipe.folder / "recipe.yaml")
    with suppress(ThinwireError, LookupError, AttributeError, TypeError):  # there is none, or it is damaged
        date = fields_in(read_named(begun, PACKAGED, "a run has"), begun, "recipe")["data"].get("date")
        return replace(recipe, data=replace(recipe.data, date=date))
    return recipe


def _data(recipe: Recipe, stages: Sequence[int] | None, given: Data | None) -> Data:
    """The data of a run, unless they are given, with the loss and metrics of the user's own.

    Raises:
        ModelError: the data cannot be read; a file is no outline, or has no labels although this process computes the
            loss; the clients do not fit together; or there is no such loss, metric or best score.
    """
    data, training = given or _read(recipe, stages), recipe.training
    task = own_task(data.task, training.loss, training.metrics)
    known, best = ("loss", *task.scores), training.best
    if best is not None and (data.held_out is None or best.split()[1] not in known):
        raise ModelError(
            f"training.best must be min or max of {', '.join(known)}, and needs held-out data, got {best!r}"
        )
    return replace(data, task=task)


def _read(recipe: Recipe, stages: Sequence[int] | None) -> Data:
    """The data, read, or where they are elsewhere, from outlines.

    A process reads outlines in place of the data if the recipe names any and it has no first stage. For a
    launcher `stages` is None: it reads the data for all its processes. Stage processes of a host share what one of them
    reads. Clients with data of their own are joined.
    """
    read = load if stages is None else load_once
    outlined = recipe.data.outline is not None or bool(recipe.clients.outlines)
    reads = not outlined or stages is None or 0 in stages
    has_loss = stages is not None and recipe.pipeline.num_stages - 1 in stages
    own = read(recipe.data, seed=recipe.training.seed) if reads else None
    if own is not None and isinstance(own.training, JoinedSamples):
        return own  # a launcher has joined them
    if not recipe.clients.outlines:
        return own or _outlined(recipe, labels=has_loss)
    require(
        (
            recipe.data.outline is None,
            "data.outline must be left out beside clients.outlines, which describe all clients",
        ),
        (
            bool(recipe.data.mean) or "mean" not in recipe.data.chosen_kind.uses,
            "clients with data of their own need data.mean and data.std, because each would measure other pixels",
        ),
    )
    labels, paths = own is None and has_loss, recipe.clients.outlines
    return join([read_outline(path, labels=labels, option="each of clients.outlines") for path in paths], own)


def _outlined(recipe: Recipe, *, labels: bool) -> Data:
    """The data of data.outline. ModelError if it is of images with other channels than the recipe says."""
    path, wanted = str(recipe.data.outline), recipe.data.channels
    data = read_outline(path, labels=labels)
    channels = data.training.example(1).shape[1:2]
    fits = wanted is None or channels == (wanted,)
    told = f"data.outline must be of images with as many channels as data.channels, {wanted}, got {list(channels)}"
    require((fits, f"{told} in {path}; write it anew with thinwire outline"))
    return data


def _source(recipe: Recipe, copies: int) -> ModelSource:
    """The model, before any of it is built. OptionsError if this machine cannot hold so many copies in training."""
    source = find_model(with_run_weights(recipe.model))
    if copies:
        check_memory(recipe, source.parameters, copies)
    return source


def check_memory(recipe: Recipe, parameters: int | None, replicas: int) -> None:
    """Check that this machine can hold the parameters of `replicas` models, their gradients and moments.

    Where the parameters of a model cannot be counted, nothing is checked.

    Raises:
        OptionsError: they need more than the machine has.
    """
    held = machine_memory()
    if parameters is None or held is None:
        return
    numbers = recipe.numbers_of_a_parameter
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


def _sampler(recipe: Recipe, data: Data) -> Sampler | Turns:
    """The order of the samples of all replicas, or of all clients.

    Raises:
        ModelError: training, a client or evaluation has fewer samples than one batch needs.
    """
    size, one_pass, seed = recipe.batch_size, recipe.pipeline.pass_size, recipe.training.seed
    count = len(data.training)
    fewer = "lower pipeline.num_microbatches or microbatch_size"
    fewer_replicas = ", or replicas.count" if recipe.replicas.count > 1 else ""
    require(
        (
            count >= size,
            f"a batch must not hold a sample twice: a step needs {size} samples, and there are {count} to train on; "
            + ", or ".join([*recipe.data.more_samples(), f"{fewer} or accumulation{fewer_replicas}"]),
        ),
        (
            data.held_out is None or len(data.held_out) >= one_pass,
            f"an evaluation pass is as large as a training pass, and must not hold a sample twice: it needs {one_pass} "
            f"samples, and there are {len(data.held_out or ())} held out; "
            + ", or ".join([*recipe.data.more_samples(held_out=True), fewer]),
        ),
    )
    shuffle, clients = recipe.data.shuffle, recipe.clients
    if clients.count > 1:
        each = divide(data, clients.count, clients.division, seed)
        return Turns(each, size, seed, shuffle=shuffle, turn=partial(in_steps, clients.turn))
    pieces = recipe.replicas.count if recipe.replicas.shuffle == "within" else 1
    return Sampler(count, size, seed, shuffle=shuffle, pieces=pieces)


def _decided(recipe: Recipe, data: Data, model: Blueprint, steps_per_epoch: int) -> Recipe:
    """The recipe with what it left to the data and the model.

    That is the date of chats, whether a tied head stays one weight, and steps in place of epochs.
    """
    training = recipe.training
    if training.epochs is not None:
        training = replace(training, steps=training.epochs * steps_per_epoch, epochs=None)
    dated = recipe.data if data.date is None else replace(recipe.data, date=data.date)
    return replace(
        recipe, data=dated, model=replace(recipe.model, tied=recipe.model.tied or model.head), training=training
    )


def check_fit(model: Blueprint, replicas: ReplicaOptions, compression: CompressionOptions) -> None:
    """Raise ModelError if a model cannot have these replicas, or has no weights for the codec of shared weights."""
    layers = model.on_meta if replicas.count > 1 else ()
    weights = [named for layer in layers for named in layer.full_parameters().items()]
    others = [f"{name} ({each.dtype})" for name, each in weights if each.requires_grad and each.dtype != torch.float32]
    require(
        (
            not others,
            f"replicas must have weights in float32, because these travel as such, got {''.join(others[:1])}; lower "
            f"replicas.count to 1, or make the weights float32",
        ),
        (
            bool(model.shared) or compression.method_of_shared == AS_IT_IS,
            f"compression.shared must be none where no two stages hold the same weights, got "
            f"{compression.shared}; drop it, or set model.tied: sum where the head is the embedding",
        ),
    )
