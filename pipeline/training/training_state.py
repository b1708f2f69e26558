"""The state of a training in checkpoints: that of every stage of a process, with its optimizer."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from thinwire.pipeline.saving.checkpoint import Checkpoints, StageState
from thinwire.pipeline.saving.checkpoint_folder import Manifest, SavedStage
from thinwire.pipeline.saving.state import collect as collect_stage
from thinwire.pipeline.saving.state import restore, restore_model, restore_passes, stores_of
from thinwire.pipeline.training.sync import StepAlone
from thinwire.pipeline.training.trainer import Trainer


def collect(trainer: Trainer, checkpoints: Checkpoints) -> dict[int, StageState]:
    """The state of every stage of this process, by its part of a checkpoint, for one that begins between two steps.

    Weights and moments are not copied unless the next step comes before they are written, or replicas step alone.
    """
    trainer.update.before_step = checkpoints.release
    return {
        trainer.placement.part(stage.stage_index): collect_stage(
            stage,
            optimizer,
            _beside(trainer, stage.stage_index),
            lent=not isinstance(trainer.sync, StepAlone),
        )
        for stage, optimizer in zip(trainer.stages, trainer.sync.optimizers, strict=True)
    }


def resume(trainer: Trainer, checkpoints: Checkpoints, manifest: Manifest) -> None:
    """Go on from a checkpoint of the same cut, with all state. CheckpointError if it is damaged."""
    trainer.done = manifest.step
    for stage, optimizer in zip(trainer.stages, trainer.sync.optimizers, strict=True):
        part = trainer.placement.part(stage.stage_index)
        saved = SavedStage(checkpoints.folder, manifest.step, part)
        checkpoints.resume(manifest, part, stores_of(stage, saved))
        restore(stage, optimizer, saved)
        trainer.sync.load_state_dict(stage.stage_index, saved)
        trainer.update.shared.load_state_dict(stage.stage_index, saved)


def resume_model(trainer: Trainer, folder: Path, manifest: Manifest) -> None:
    """Go on from a checkpoint of any cut, with weights and optimizers alone."""
    trainer.done = manifest.step
    model = [SavedStage(folder, manifest.step, part) for part in manifest.model_parts]
    everything = [SavedStage(folder, manifest.step, part) for part in manifest.parts]
    for stage, optimizer in zip(trainer.stages, trainer.sync.optimizers, strict=True):
        restore_model(stage, optimizer, model)
        restore_passes(stage, model[0])
        trainer.sync.load_recut(stage.stage_index, everything)


def _beside(trainer: Trainer, stage: int) -> dict[str, Tensor]:
    """What is remembered for a stage, besides its optimizer and boundaries, by its names in a checkpoint."""
    shared = trainer.update.shared.state_dict(stage)
    return shared | {f"replicas/{name}": tensor for name, tensor in trainer.sync.state_dict(stage).items()}
