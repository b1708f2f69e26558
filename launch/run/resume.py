"""Going on with a run: the newest checkpoint that all processes have whole, and whether the recipe agrees with it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.errors.words import listed
from thinwire.launch.plan.prepared import Prepared
from thinwire.launch.run.assembly import Assembly
from thinwire.launch.run.fields import WITHOUT_EFFECT, is_among, values_of
from thinwire.launch.run.folders import checkpoint_folder
from thinwire.launch.run.recipe import Recipe
from thinwire.launch.run.stage_processes import RENDEZVOUS_VARIABLE, FileWords
from thinwire.launch.run.weights import discard_after
from thinwire.models.data.clients import JoinedSamples
from thinwire.models.errors import ModelError
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.saving.checkpoint import Checkpoints, WordStore
from thinwire.pipeline.saving.checkpoint_folder import (
    Manifest,
    SavedStage,
    has_manifests,
    manifests,
    passed_over,
    reading,
    step_folder,
    trouble,
    unreadable,
)
from thinwire.pipeline.training.trainer import Trainer
from thinwire.pipeline.training.training_state import resume, resume_model

_MAY_CHANGE = (
    *WITHOUT_EFFECT,
    "optimizer.lr",
    "optimizer.schedule",
    "optimizer.warmup_steps",
    "optimizer.warmup_ratio",
    "optimizer.min_lr",
    "optimizer.cosine_steps",
    "optimizer.weight_decay",
    "optimizer.no_decay",
    "optimizer.max_grad_norm",
    "training.steps",
    "training.epochs",
    "training.evaluate_every",
    "training.metrics",
    "training.best",
    "training.patience",
    "training.compile",
    "training.device",
    "pipeline.schedule",
    "pipeline.num_stages",
    "pipeline.stages_per_process",
    "pipeline.layers",
)
"""Fields of a recipe that may differ from the checkpoint. A name with a dot at the end is a whole group."""
RESTARTS_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
"""How often torchrun has started its processes again."""


class Resumption:
    """Where a run begins. Every process has one, and all call the same methods.

    Args:
        assembly: the stages of this process, connected.
        runs: the ids of the run's folders on all hosts.

    Attributes:
        checkpoints: those of the run, as this process writes them.
        first: the first step of training.
        saved: the values of the run itself in the checkpoint that it goes on from; empty for a new run.
        runs: the ids of the run's folders on all hosts.
        same_parts: whether that checkpoint is of the same cut and processes.
        metered_from: the first step that the meters count; they start at 0 where the cut changes.
        notes: sentences that say where the run goes on, and which newer checkpoints cannot be taken.
    """

    def __init__(self, assembly: Assembly, runs: Sequence[str] = ("",)) -> None:
        prepared, trainer, where = assembly.prepared, assembly.trainer, assembly.trainer.placement
        recipe, made = prepared.recipe, header(prepared, where)
        parts = [where.part(stage.stage_index) for stage in trainer.stages]
        self._recipe, self._trainer, self.runs = recipe, trainer, list(runs)
        self.checkpoints = Checkpoints(
            checkpoint_folder(recipe),
            stages=parts,
            num_stages=where.num_parts,
            keep=recipe.checkpoint.keep,
            header=made,
            words=words_of_run(),
            runs=runs,
            timeout=recipe.replicas.longest_wait(recipe.wire.timeout),
        )
        self._manifest, self._passed_over = find(recipe, made, where, parts)
        self._changes = {} if self._manifest is None else changes(self._manifest, made)
        self.same_parts = self._manifest is not None and self._manifest.cut == made["cuts"]
        self.first = 0 if self._manifest is None else self._manifest.step
        _check_turn(prepared, where, trainer, self.first)
        self.saved: Mapping[str, Any] = {}
        self.metered_from = self.first
        if self._manifest is not None:
            part = parts[0] if self.same_parts else self._manifest.model_parts[0]
            saved = SavedStage(self.checkpoints.folder, self.first, part)
            with self.reading():
                self.saved = dict(saved.values["run"])
                if self.same_parts:
                    self.metered_from = int(self.saved["metered_from"])

    def reading(self) -> AbstractContextManager[None]:
        """Around code that takes `saved` apart: CheckpointError if it is not what a run writes."""
        return reading(step_folder(self.checkpoints.folder, self.first))

    @property
    def notes(self) -> list[str]:
        """Sentences that say where the run goes on and which newer checkpoints cannot be taken; empty for a new run."""
        if self._manifest is None:
            return []
        anew = (
            ""
            if self.same_parts
            else "; the cut or the processes of the replicas have changed, so feedback starts empty"
        )
        return [
            *self._passed_over,
            *([f"from here on, {listed(list(self._changes.values()))}"] if self._changes else []),
            f"goes on from the checkpoint of step {self.first} in {self.checkpoints.folder}{anew}",
        ]

    def restore(self) -> None:
        """Restore the trainer from the checkpoint, if there is one. Before it, the chosen codecs must be in use.

        Raises:
            CheckpointError, StoreError: the checkpoint is damaged.
        """
        if self._manifest is None:
            self.checkpoints.discard_after(-1)
        elif self.same_parts:
            resume(self._trainer, self.checkpoints, self._manifest)
        else:
            resume_model(self._trainer, self.checkpoints.folder, self._manifest)
            self.checkpoints.go_on_from(self._manifest)
        if self._changes:
            discard_after(self._recipe.folder, self.first)


def _check_turn(prepared: Prepared, where: Placement, trainer: Trainer, first: int) -> None:
    """Raise ModelError, in all processes, if the run would begin in the turn of another client; collective.

    Then nobody has removed a checkpoint yet: a client with an old folder would cost the server the newest turn.
    """
    samples = prepared.data.training
    if isinstance(samples, JoinedSamples) and first < prepared.recipe.training.steps:
        told = collectives.everyone(where, samples.out_of_turn(trainer.sampler.batch(first).ids))
        if mistakes := list(filter(None, told)):
            raise ModelError(mistakes[0])


def words_of_run() -> WordStore:
    """Where the processes of a run post what they have written for a checkpoint."""
    rendezvous = os.environ.get(RENDEZVOUS_VARIABLE)
    if rendezvous is not None:
        return FileWords(Path(rendezvous).parent)
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def header(prepared: Prepared, where: Placement) -> dict[str, Any]:
    """The facts about a run in a manifest, as JSON values: its recipe, its data, and its cut, the layers of every part.

    Replicas with processes of their own have parts of their own.
    """
    recipe = asdict(prepared.recipe)
    if not prepared.recipe.replicas.step_alone:
        recipe["replicas"]["sync"] = {"every": 1}  # nothing else counts
    if prepared.recipe.clients.outlines:
        del recipe["data"]["name"]  # that of the client whose turn it is; the digest of the samples is that of all
    held_out = prepared.data.held_out
    fields = values_of(recipe) | {
        "samples": prepared.data.training.digest,
        "held-out samples": None if held_out is None else held_out.digest,
    }
    cuts = [[cut.start, cut.stop] for cut in prepared.cuts] * where.num_replicas
    header: dict[str, Any] = json.loads(json.dumps({"fields": fields, "cuts": cuts}))
    return header


def changes(manifest: Manifest, made: Mapping[str, Any]) -> dict[str, str]:
    """By name, the settings of a run with a header that change what comes after a checkpoint, in words."""
    old, new = manifest.header.get("fields", {}), made["fields"]
    return {
        name: f"{name} is {_shown(new, name)} in place of {_shown(old, name)}"
        for name in sorted(old.keys() | new)
        if old.get(name) != new.get(name) and not is_among(name, WITHOUT_EFFECT)
    }


def find(
    recipe: Recipe, made: Mapping[str, Any], where: Placement, parts: list[int]
) -> tuple[Manifest | None, list[str]]:
    """The newest checkpoint that every process can restore, and a sentence for each newer one. Collective.

    None if there is none. `made` is the header of the run, `parts` are those of this process. A process needs the parts
    of its own stages, and of older checkpoints the rows of its stores. If the checkpoint has other parts, it needs
    those of the whole model; those of all replicas if they step alone.

    Raises:
        OptionsError: the recipe does not agree with the checkpoint, and the message names every difference; or there
            are checkpoints, but none is whole.
    """
    folder, must_resume = checkpoint_folder(recipe), recipe.checkpoint.resume == "always"
    listed = collectives.everyone(
        where, [[manifest.text() for manifest in manifests(folder)], [*unreadable(folder).items()]]
    )
    known = {
        manifest.step: manifest
        for texts, _ in listed
        for manifest in (Manifest.parse(text, "what another process has") for text in texts)
    }
    troubles = {step: said for _, damaged in listed for step, said in damaged if step not in known}
    newest = None
    for step in sorted(known, reverse=True):
        if not (said := list(filter(None, collectives.everyone(where, _trouble(known[step], recipe, made, parts))))):
            newest = known[step]
            break
        troubles[step] = said[0]
    if newest is None:
        if must_resume:
            raise OptionsError(
                [
                    f"--resume needs a whole checkpoint, but {folder} has none that all stages share",
                    *passed_over(troubles),
                ]
            )
        if any(collectives.everyone(where, has_manifests(folder))):
            raise OptionsError(
                [
                    f"{folder} has checkpoints, but none that is whole in all stages: files are missing or damaged; "
                    f"copy them from where they were written, or --overwrite to start again from step 0",
                    *passed_over(troubles),
                ]
            )
        return None, []
    _check_agrees(newest, recipe, made)
    return newest, passed_over({step: said for step, said in troubles.items() if step > newest.step})


def _check_agrees(newest: Manifest, recipe: Recipe, made: Mapping[str, Any]) -> None:
    """Raise OptionsError if the recipe is not that of the checkpoint, or ends before it."""
    folder = checkpoint_folder(recipe)
    if differing := differences(newest.header.get("fields", {}), made["fields"]):
        raise OptionsError(
            [
                f"the checkpoint of step {newest.step} in {folder} is of another run; give the recipe of that run, "
                f"another --output, or --overwrite to start again from step 0. They differ in:",
                *(f"  {name}: {old} there, {new} here" for name, (old, new) in differing.items()),
            ]
        )
    if recipe.training.steps < newest.step:
        raise OptionsError(
            f"training.steps must be at least {newest.step}, because the checkpoint in {folder} is of that step, got "
            f"{recipe.training.steps}; raise it, give another --output, or --overwrite to start from step 0"
        )


def _trouble(manifest: Manifest, recipe: Recipe, made: Mapping[str, Any], parts: list[int]) -> str | None:
    """What this process, which has these parts, lacks of a checkpoint; None if it can be restored."""
    same_parts = manifest.cut == made["cuts"]
    needed = parts if same_parts else manifest.parts if recipe.replicas.step_alone else manifest.model_parts
    return trouble(checkpoint_folder(recipe), manifest, needed, stores=same_parts)


def differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The fields that differ but must not: name -> (value in the checkpoint, value in the recipe), in words."""
    return {
        name: (_shown(saved, name), _shown(wanted, name))
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name) and not is_among(name, _MAY_CHANGE)
    }


def _shown(fields: Mapping[str, Any], name: str) -> str:
    """A value in words; a manifest leaves out fields that change nothing."""
    return repr(fields[name]) if name in fields else "not set"
