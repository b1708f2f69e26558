"""What a run leaves in its folder."""

import json
from pathlib import Path
from typing import Any

import torch

from thinwire.launch.folder.weights import newest
from thinwire.models.checkpoint import WEIGHTS
from thinwire.pipeline.saving.checkpoint_folder import TENSORS, SavedStage

SAME = (
    *("steps", "samples", "train_loss", "held_out", "look"),
    *("channels", "replicas", "shared", "traffic", "bytes_sent", "weights_digest"),
)
OF_A_STEP = ("step", "loss", "grad_norm", "lr", "samples")


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def digest(run: Path) -> str:
    """The digest of the weights at the end."""
    return summary(run)["weights_digest"]


def numbers(run: Path) -> dict[str, Any]:
    """What runs of one training have in common, bit for bit, however they ran: scores, weights, losses and bytes."""
    told = summary(run)
    steps = [{name: line[name] for name in OF_A_STEP} for line in metrics(run)]
    logs = {name: _lines(run / f"{name}.jsonl") for name in ("evaluations", "answers")}
    return {name: told[name] for name in SAME} | {"each step": steps} | logs


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics so far, without one that is just being written; empty before the first."""
    return _lines(run / "metrics.jsonl")


def _lines(path: Path) -> list[dict[str, Any]]:
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
