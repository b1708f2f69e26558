"""What a run leaves in its folder."""

import json
from pathlib import Path
from typing import Any

import torch

from thinwire.launch.folder.weights import newest
from thinwire.models.checkpoint import WEIGHTS
from thinwire.pipeline.saving.checkpoint_folder import TENSORS, SavedStage


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def digest(run: Path) -> str:
    """The digest of the weights at the end."""
    return summary(run)["weights_digest"]


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics so far, without one that is just being written; empty before the first."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics(run)]


def weight_file(run: Path, stage: int) -> Path:
    """The file with the newest weights of one stage."""
    return _part(run, stage).path / TENSORS


def weights_of(run: Path, stage: int) -> dict[str, torch.Tensor]:
    """The newest weights of one stage."""
    return _part(run, stage).tensors(WEIGHTS)


def _part(run: Path, stage: int) -> SavedStage:
    saved = newest(run)
    assert saved is not None, f"no whole weights in {run}"
    return SavedStage(run / "weights", saved.step, stage)
