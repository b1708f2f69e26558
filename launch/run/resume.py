"""Going on with a run: the newest checkpoint that all processes have whole, and whether the recipe agrees with it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from thinwire.errors.words import listed
from thinwire.launch.folder.policy import checkpoint_folder
from thinwire.launch.plan.prepared import Prepared
from thinwire.launch.recipe.fields import WITHOUT_EFFECT, is_among, values_of
from thinwire.launch.recipe.recipe import Recipe
from thinwire.launch.run.assembly import Assembly
from thinwire.launch.run.parts.part import RunPart
from thinwire.models.data.clients import JoinedSamples
from thinwire.models.errors import ModelError
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.processes.placement import Placement
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
    "classes.",
)
"""Fields of a recipe that may differ from the checkpoint. A name with a dot at the end is a whole group."""
STATE = "by part"
"""How a checkpoint holds the state of a run; earlier releases say nothing of it."""


@dataclass(frozen=True)
class Resumption:
    """Where a run begins, as it was found."""

    folder: Path
    """That of the checkpoints."""
    manifest: Manifest | None = None
    """The checkpoint that the run goes on from; None for a new run."""
    same_parts: bool = False
    """Whether that checkpoint is of the same cut, in as many replicas."""
    passed_over: tuple[str, ...] = ()
    """A sentence for each newer checkpoint that cannot be taken."""
    changes: tuple[str, ...] = ()
    """What a setting of this run changes from there on, in words."""
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The state of each part of the run, by its name; empty for a new run."""

    @property
    def first(self) -> int:
        """The first step of training."""
        return 0 if self.manifest is None else self.manifest.step

    @property
    def notes(self) -> list[str]:
        """Sentences that say where the run goes on and which newer checkpoints cannot be taken; empty for a new run."""
        if self.manifest is None:
            return []
        anew = "; the cut or the processes of the replicas have changed, so feedback starts empty"
        went = f"goes on from the checkpoint of step {self.first} in {self.folder}{'' if self.same_parts else anew}"
        return [*self.passed_over, *([f"from here on, {listed([*self.changes])}"] if self.changes else []), went]

    def load(self, parts: Iterable[RunPart]) -> None:
        """Give each part its state. CheckpointError if that is not what a run writes."""
        for part in parts if self.manifest is not None else ():
            if part.name:
                with reading(step_folder(self.folder, self.first)):
                    part.load_state_dict(self.parts[part.name])


def resumption_of(assembly: Assembly) -> Resumption:
    """Where a run begins: after the newest checkpoint that every process can restore. Collective.

    Raises:
        OptionsError: the recipe does not agree with the checkpoint, and the message names every difference; or there
            are checkpoints, but none is whole.
        ModelError: the run would begin in the turn of another client.
    """
    prepared, trainer, where = assembly.prepared, assembly.trainer, assembly.trainer.placement
    recipe, made = prepared.recipe, header(prepared, where)
    here = [where.part(stage.stage_index) for stage in trainer.stages]
    manifest, passed = find(recipe, made, where, here)
    _check_turn(prepared, where, trainer, 0 if manifest is None else manifest.step)
    folder = checkpoint_folder(recipe)
    if manifest is None:
        return Resumption(folder)
    same_parts = manifest.cut == made["cuts"]
    saved = SavedStage(folder, manifest.step, here[-1] if same_parts else manifest.model_parts[-1])
    with reading(step_folder(folder, manifest.step)):
        states = dict(saved.values["parts"])
    old, new = manifest.header.get("fields", {}), made["fields"]
    changes = tuple(
        f"{name} is {here} in place of {there}"
        for name, (there, here) in differences(old, new, WITHOUT_EFFECT).items()
        if name in old or not name.startswith("classes.")  # earlier releases kept no names
    )
    return Resumption(folder, manifest, same_parts, tuple(passed), changes, states)


def _check_turn(prepared: Prepared, where: Placement, trainer: Trainer, first: int) -> None:
    """Raise ModelError, in all processes, if the run would begin in the turn of another client; collective.

    Then nobody has removed a checkpoint yet: a client with an old folder would cost the server the newest turn.
    """
    samples = prepared.data.training
    if isinstance(samples, JoinedSamples) and first < prepared.recipe.training.steps:
        told = collectives.everyone(where, samples.out_of_turn(trainer.sampler.batch(first).ids))
        if mistakes := list(filter(None, told)):
            raise ModelError(mistakes[0])


def header(prepared: Prepared, where: Placement) -> dict[str, Any]:
    """The facts about a run in a manifest, as JSON values: its recipe, its data, and its cut, the layers of every part.

    Replicas with processes of their own have parts of their own.
    """
    recipe = asdict(prepared.recipe)
    if not prepared.recipe.replicas.step_alone:
        recipe["replicas"]["sync"] = {"every": 1}  # nothing else counts
    if prepared.recipe.clients.outlines:
        del recipe["data"]["name"]  # that of the client whose turn it is; the digest of the samples is that of all
    fields = values_of(recipe) | {
        "samples": prepared.data.training.digest,
        "held-out samples": prepared.data.held_out_digest,
        **{f"classes.{number}": name for number, name in enumerate(prepared.data.classes)},
    }
    cuts = [[cut.start, cut.stop] for cut in prepared.cuts] * where.num_replicas
    header: dict[str, Any] = json.loads(json.dumps({"fields": fields, "cuts": cuts, "state": STATE}))
    return header


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
    folder = checkpoint_folder(recipe)
    told = collectives.everyone(
        where, [[manifest.text() for manifest in manifests(folder)], [*unreadable(folder).items()]]
    )
    known = {
        manifest.step: manifest
        for texts, _ in told
        for manifest in (Manifest.parse(text, "what another process has") for text in texts)
    }
    troubles = {step: said for _, damaged in told for step, said in damaged if step not in known}
    newest = None
    for step in sorted(known, reverse=True):
        if not (said := list(filter(None, collectives.everyone(where, _trouble(known[step], recipe, made, parts))))):
            newest = known[step]
            break
        troubles[step] = said[0]
    if newest is None:
        lacking = f"--resume needs a whole checkpoint, but {folder} has none that all stages share"
        if recipe.checkpoint.resume != "always":
            if not collectives.anyone(where, has_manifests(folder)):
                return None, []
            lacking = (
                f"{folder} has checkpoints, but none that is whole in all stages: files are missing or damaged; copy "
                f"them from where they were written, or --overwrite to start again from step 0"
            )
        raise OptionsError([lacking, *passed_over(troubles)])
    _check_agrees(newest, recipe, made)
    return newest, passed_over({step: said for step, said in troubles.items() if step > newest.step})


def _check_agrees(newest: Manifest, recipe: Recipe, made: Mapping[str, Any]) -> None:
    """Raise OptionsError if the recipe is not that of the checkpoint, or ends before it."""
    folder = checkpoint_folder(recipe)
    if newest.header.get("state") != STATE:
        raise OptionsError(
            f"the checkpoint of step {newest.step} in {folder} is of an earlier release of Thinwire, which kept the "
            f"state of a run otherwise; go on with that release, or begin a new run from it with --model.weights "
            f"{recipe.folder}"
        )
    if differing := differences(newest.header.get("fields", {}), made["fields"], _MAY_CHANGE):
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


def differences(
    saved: Mapping[str, Any], wanted: Mapping[str, Any], others: Sequence[str]
) -> dict[str, tuple[str, str]]:
    """The fields that differ, but for these others: name -> (value in the checkpoint, in the recipe), in words."""
    return {
        name: (_shown(saved, name), _shown(wanted, name))
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name) and not is_among(name, others)
    }


def _shown(fields: Mapping[str, Any], name: str) -> str:
    """A value in words; a manifest leaves out fields that change nothing."""
    return repr(fields[name]) if name in fields else "not set"
