"""Length and numbers of training, the optimizer, checkpoints and debugging: fields of a recipe, with their checks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from thinwire import compress
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.options.durations import is_due, is_over, misspelt, read_duration

MOST_STEPS = 10**9
"""The most steps and epochs of a run: more than anyone waits for."""
MOST_LR = 1e30
"""The largest learning rate: what an optimizer makes of it is still a float32."""
MOST_THREADS = 1024
"""The most threads of a stage process: as many as the largest machines have cores."""


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """The optimizer of every stage, and the schedule of its learning rate."""

    name: Literal["adamw", "sgd", "quantized-adam"] = "adamw"
    """The optimizer. quantized-adam freezes its second moment; then replicas exchange momentum (2206.01299)."""
    lr: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 0.0
    """Weight decay (decoupled but for sgd)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """adamw, quantized-adam: decay rates of the two moments."""
    eps: float = 1e-8
    """adamw, quantized-adam: added to the denominator."""
    momentum: float = 0.9
    """sgd: momentum."""
    freeze_after: str = "0 steps"
    """quantized-adam: how long the second moment follows the gradients: "500 steps" or "1 epoch", such as a fifth of
    training. So long, the gradients between replicas travel uncompressed."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """The learning rate after its warm-up: constant, linear to zero, or half a cosine to zero."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises from zero to its peak."""
    cosine_steps: int | None = None
    """Length of the half cosine in steps; null means the length of training (2401.07788 uses twice that)."""
    max_grad_norm: float | None = None
    """Gradients are clipped to this norm over all stages; null does not clip. quantized-adam clips its momentum once
    the second moment is frozen."""

    def __post_init__(self) -> None:
        mistakes = [
            f"optimizer.{name} must be finite and not negative, got {value}"
            for name, value in (
                ("lr", self.lr),
                ("weight_decay", self.weight_decay),
                ("warmup_steps", self.warmup_steps),
                ("max_grad_norm", self.max_grad_norm or 0.0),
            )
            if value < 0 or not math.isfinite(value)
        ]
        if math.isfinite(self.lr) and self.lr > MOST_LR:
            mistakes.append(f"optimizer.lr must be at most {MOST_LR:g}, got {self.lr}")
        if not all(0 <= beta < 1 for beta in self.betas):
            mistakes.append(f"optimizer.betas must be at least 0 and below 1, got {list(self.betas)}")
        mistakes += misspelt("optimizer.freeze_after", self.freeze_after) or self._mistakes_of_freezing()
        if mistakes:
            raise OptionsError(mistakes)

    def _mistakes_of_freezing(self) -> list[str]:
        if self.name != "quantized-adam" or read_duration(self.freeze_after)[0] > 0:
            return []
        return [
            "optimizer.freeze_after must be at least 1 step for quantized-adam, because nothing moves without a second "
            f'moment; a fifth of training is usual, such as "200 steps" of 1000; got {self.freeze_after!r}'
        ]

    def is_frozen(self, progress: compress.Progress) -> bool:
        """Whether the second moment is frozen in the coming step."""
        over = is_over(self.freeze_after, progress.step, progress.steps_per_epoch)
        return self.name == "quantized-adam" and over

    def note_on_freezing(self, steps: int, steps_per_epoch: int) -> str | None:
        """A sentence if the second moment is never frozen in so many steps."""
        if not self.sends_in_full(compress.Progress(steps - 1, steps_per_epoch)):
            return None
        return f"quantized-adam freezes nothing: optimizer.freeze_after of {self.freeze_after} is all of training"

    def sends_in_full(self, progress: compress.Progress) -> bool:
        """Whether the gradients between replicas go uncompressed in the coming step."""
        return self.name == "quantized-adam" and not self.is_frozen(progress)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The length of training, its seed and its arithmetic."""

    steps: int = 100
    """Optimizer steps."""
    epochs: int | None = None
    """Passes over the training data, in place of `steps`; null uses `steps`. Of two options, the later one counts."""
    seed: int = 0
    """Seed of weights, order of samples, dropout and stochastic rounding."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of the passes: fp32, or bf16 or fp16 by autocast, with weights that stay float32. With 16 bits, so are
    the tensors at the boundaries. fp16 scales the loss, and skips a step whose gradients are not finite."""
    recompute: Literal["none", "block"] = "none"
    """What the backward pass computes again so that a waiting micro-batch takes less memory: none, or each block, which
    then keeps only its inputs. Gradients are the same; the backward takes a forward longer. A schedule that splits the
    backward needs none."""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """Where the stages compute: cpu, cuda (the GPUs of a host in turn, by LOCAL_RANK), or auto (a GPU if there is
    one, else the CPU). No GPU has been tried yet."""
    compile: bool = False
    """Whether torch compiles each block before the first step, which takes minutes and a C++ compiler. The last bits of
    results change."""
    threads: int = 1
    """CPU threads of each stage process. The last bits of results depend on it, so it is part of the recipe."""
    evaluate_every: str = "0 steps"
    """How often held-out samples are evaluated: "1 epoch" or "500 steps"; "0 steps" evaluates only at the end."""

    def __post_init__(self) -> None:
        mistakes = [
            f"training.{name} must be at least {least}, got {value}"
            for name, value, least in (
                ("steps", self.steps, 0),
                ("epochs", self.epochs, 0),
                ("threads", self.threads, 1),
            )
            if value is not None and value < least
        ]
        mistakes += [
            f"training.{name} must be at most {most}, got {value}"
            for name, value, most in (
                ("steps", self.steps, MOST_STEPS),
                ("epochs", self.epochs, MOST_STEPS),
                ("threads", self.threads, MOST_THREADS),
            )
            if value is not None and value > most
        ]
        mistakes += misspelt("training.evaluate_every", self.evaluate_every)
        if mistakes:
            raise OptionsError(mistakes)

    def evaluates_after(self, done: int, steps_per_epoch: int) -> bool:
        """Whether held-out samples are evaluated after `done` steps; the evaluation at the end does not count."""
        return is_due(self.evaluate_every, done, steps_per_epoch)


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Checkpoints. A stopped run goes on from them as if it had never stopped."""

    every: str = "0 steps"
    """How often a checkpoint is written: "500 steps" or "1 epoch"; "0 steps" writes none."""
    keep: int = 2
    """Number of checkpoints to keep. The oldest is removed only after a new one is complete."""
    folder: str = ""
    """Folder of the checkpoints, on each stage's own disk or shared; empty means checkpoints/ in the run's folder."""
    resume: Literal["auto", "always", "never"] = "auto"
    """Whether to go on from the newest complete checkpoint: auto (if there is one), always (if there is none, the run
    stops), or never (the run starts again from step 0 and removes old checkpoints)."""
    restarts: int = 0
    """How often `thinwire train` starts all stages again from the newest checkpoint after a stage died."""

    def __post_init__(self) -> None:
        mistakes = misspelt("checkpoint.every", self.every)
        if self.keep < 1:
            mistakes.append(f"checkpoint.keep must be at least 1, got {self.keep}")
        if self.restarts < 0:
            mistakes.append(f"checkpoint.restarts must be at least 0, got {self.restarts}")
        if mistakes:
            raise OptionsError(mistakes)

    @property
    def wanted(self) -> bool:
        """Whether checkpoints are written at all."""
        return read_duration(self.every)[0] > 0

    def due_after(self, done: int, steps_per_epoch: int) -> bool:
        """Whether a checkpoint is written after `done` steps."""
        return is_due(self.every, done, steps_per_epoch)


@dataclass(frozen=True, kw_only=True)
class DebugOptions:
    """Checks that cost time."""

    check_buffers: bool = False
    """Whether to compare the buffers at both ends of every boundary, and the weights of all replicas, after each epoch
    and at the end."""
    trace: int = 0
    """The last training steps to record as a trace, for thinwire trace and thinwire report; 0 records none."""
    smoke: bool = False
    """Whether to make the shortest run that uses every part: three steps of little data, an evaluation, a save, a
    checkpoint and a trace, in a folder of its own. --smoke is short for it."""

    def __post_init__(self) -> None:
        if self.trace < 0:
            raise OptionsError(f"debug.trace must be at least 0 steps, got {self.trace}")
