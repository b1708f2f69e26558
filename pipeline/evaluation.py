"""Evaluation, always twice: with compression as in training, and without compression.

The difference between the two is the main practical finding of 2401.07788, so both are always reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire.compress import PassKind
from thinwire.models.data.samples import Samples
from thinwire.pipeline import collectives
from thinwire.pipeline.passes import Pass
from thinwire.pipeline.trainer import Trainer

Compression = Literal["on", "off"]
"""The name of a score in reports: whether the boundaries compressed."""
PASS_KINDS: Mapping[Compression, PassKind] = {"on": "eval-on", "off": "eval-off"}


@dataclass(frozen=True)
class Score:
    """The mean loss over the valid targets of the held-out samples, how many there were, and the task's metrics."""

    loss: float
    num_targets: int
    metrics: dict[str, float]

    def values(self) -> dict[str, float]:
        """All values by name: loss, num_targets, and the metrics."""
        return {"loss": self.loss, "num_targets": self.num_targets, **self.metrics}


def evaluate(
    trainer: Trainer,
    samples: Samples,
    batches: Callable[[], Iterable[Any]],
    mask: Callable[[Tensor, Tensor], Tensor],
) -> dict[Compression, Score] | None:
    """Score held-out samples with compression on, then off; None except in the process that reports.

    Replicas share the batches, as `Sync.scorer` says.

    Args:
        trainer: gives stages, schedule and replicas. Its training state and the seconds of its meters do not change.
        samples: the held-out samples.
        batches: makes the batches, each of the shape of training and alike each time; `valid` marks padding.
        mask: takes padding out of targets: (targets, valid) -> targets.
    """
    with ExitStack() as stack:
        for stage in trainer.stages:
            stack.enter_context(stage.meter.apart())
        scores = {name: _score(trainer, kind, samples, batches(), mask) for name, kind in PASS_KINDS.items()}
        # whoever is through first would wait for the others in its next training step
        collectives.meet(trainer.placement, "waiting for the end of an evaluation")
    return scores if trainer.reports else None


def _score(
    trainer: Trainer,
    kind: PassKind,
    samples: Samples,
    batches: Iterable[Any],
    mask: Callable[[Tensor, Tensor], Tensor],
) -> Score:
    sums: list[float] = []
    counts: list[Tensor] = []
    num_targets = 0
    runner, sync = trainer.runner, trainer.sync
    runner.loss.begin(1, counts)  # sums over batches; divided by the totals below
    runner.set_mode(trains=False)
    with torch.no_grad():
        for index, batch in enumerate(batches):
            replica = sync.scorer(index)
            if replica is None:
                runner.skip(kind, 1)
                continue
            runner.use(replica)
            inputs = samples.inputs(batch.ids, batch.epoch) if runner.has_first else None
            targets = mask(samples.targets(batch.ids), batch.valid) if runner.has_last else None
            num_targets += trainer.task.num_valid(targets) if targets is not None else 0
            # so slots by position are those of the replica, in a simulation as in its own process; and rows that only
            # fill up a batch have slots of their own: they are samples of another batch, maybe of another replica
            first, slots = sync.first_pass(replica), torch.arange(len(batch.ids)) + index * len(batch.ids)
            coming = Pass(kind=kind, accumulation=first, sample_ids=slots, progress=trainer.progress)
            losses = runner.run(coming, samples.side(batch.ids), inputs, targets)
            sums += [float(loss) for loss in losses]
    if not runner.has_last:
        return Score(math.nan, 0, {})
    counted = torch.stack(counts).sum(0).tolist() if counts else None
    # every loss, not their sum: fsum of all does not depend on which replica has which; counts are whole numbers
    told = collectives.everyone_across(trainer.placement, [sums, num_targets, counted])
    total = sum(number for _, number, _ in told)
    mean_loss = math.fsum(loss for losses, _, _ in told for loss in losses) / max(1, total)
    observed = [each for _, _, each in told if each is not None]
    if not observed:
        return Score(math.nan, 0, {})
    return Score(mean_loss, total, trainer.task.metrics(mean_loss, torch.tensor(observed, dtype=torch.float64).sum(0)))
