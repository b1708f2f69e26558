"""Length and numbers of training, the optimizer, checkpoints and debugging: fields of a recipe, with their checks."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from thinwire import compress
from thinwire.errors import broken
from thinwire.errors.imports import find, is_path
from thinwire.errors.names import did_you_mean
from thinwire.errors.words import listed
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.options.changes import beyond
from thinwire.pipeline.options.durations import is_over, misspelt, read_duration

OPTIMIZERS = ("adamw", "sgd", "muon", "quantized-adam")
"""The optimizers that have fields of their own."""
_USUAL = {"betas": (0.9, 0.999), "eps": 1e-8, "momentum": 0.9}
"""What these take where the recipe leaves it out."""
_USUAL_OF = {"muon": {"momentum": 0.95}}
"""What one of them takes in place of that; here as torch does."""
_OF_ADAM = ("adamw", "muon", "quantized-adam")
_USED_BY = {
    "betas": ("name", _OF_ADAM),
    "eps": ("name", _OF_ADAM),
    "momentum": ("name", ("sgd", "muon")),
    "freeze_after": ("name", ("quantized-adam",)),
    "min_lr": ("schedule", ("linear", "cosine", "wsd")),
    "cosine_steps": ("schedule", ("cosine",)),
}
"""Of each field the optimizers, or the schedules, that use it. Of another optimizer, its arguments say what it uses."""
MOST_STEPS = 10**9
"""The most steps and epochs of a run: more than anyone waits for."""
MOST_LR = 1e30
"""The largest learning rate: what an optimizer makes of it is still a float32."""
MOST_THREADS = 1024
"""The most threads of a stage process: as many as the largest machines have cores."""


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """The optimizer of every stage, and the schedule of its learning rate."""

    name: str = "adamw"
    """The optimizer: adamw, sgd, muon (of the matrices inside the model, and adamw of all else), quantized-adam, whose
    second moment is frozen so that replicas exchange momentum (2206.01299), another class of torch.optim, such as
    Adafactor, or module:Class, such as bitsandbytes.optim:AdamW8bit."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of muon, and of classes of torch.optim and your own."""
    lr: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 0.0
    """Weight decay (decoupled but for sgd)."""
    no_decay: bool = False
    """Whether norms and biases, the weights of one dimension, are left out of the weight decay, as in transformers."""
    betas: tuple[float, float] | None = None
    """Decay rates of Adam's two moments; null means 0.9 and 0.999, for another class the class's default."""
    eps: float | None = None
    """Added to Adam's denominator; null means 1e-8, for another class the class's default."""
    momentum: float | None = None
    """Momentum of sgd and muon; null means 0.9 and 0.95, for another class the class's default."""
    freeze_after: str = "0 steps"
    """quantized-adam: how long the second moment follows the gradients: "500 steps" or "1 epoch", such as a fifth of
    training. Until then, gradients between replicas are not compressed."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """The learning rate after its warm-up: constant, linear to `min_lr`, half a cosine to it, or wsd (stays at its
    peak, and in the last tenth of training goes to it linearly)."""
    min_lr: float = 0.0
    """The learning rate at the end of linear, cosine and wsd."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises from zero to its peak."""
    warmup_ratio: float = 0.0
    """The warm-up as a share of training; give this or `warmup_steps`."""
    cosine_steps: int | None = None
    """Length of the half cosine in steps; null means the length of training (2401.07788 uses twice that)."""
    max_grad_norm: float | None = None
    """Gradients are clipped to this norm over all stages; null does not clip. quantized-adam clips its momentum once
    the second moment is frozen."""

    def __post_init__(self) -> None:
        for name, usual in self.usual().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, usual)
        mistakes = [
            f"optimizer.{name} must be finite and not negative, got {value}"
            for name in ("lr", "min_lr", "weight_decay", "warmup_steps", "max_grad_norm", "eps", "momentum")
            if (value := getattr(self, name) or 0.0) < 0 or not math.isfinite(value)
        ]
        if math.isfinite(self.lr) and self.lr > MOST_LR:
            mistakes.append(f"optimizer.lr must be at most {MOST_LR:g}, got {self.lr}")
        if not all(0 <= beta < 1 for beta in self.betas or ()):
            mistakes.append(f"optimizer.betas must be at least 0 and below 1, got {list(self.betas or ())}")
        mistakes += broken(
            (
                self.max_grad_norm != 0,
                "optimizer.max_grad_norm must be above 0, because nothing moves by gradients of norm 0; null does not "
                "clip",
            ),
            (
                self.min_lr <= max(0.0, self.lr),
                f"optimizer.min_lr must be at most optimizer.lr of {self.lr}, got {self.min_lr}",
            ),
            (0 <= self.warmup_ratio < 1, f"optimizer.warmup_ratio must lie in [0, 1), got {self.warmup_ratio}"),
            (
                not (self.warmup_ratio and self.warmup_steps),
                f"optimizer.warmup_ratio must be 0 beside warmup_steps, got {self.warmup_ratio} and "
                f"{self.warmup_steps}",
            ),
            (
                self.cosine_steps is None or self.cosine_steps >= 1,
                f"optimizer.cosine_steps must be at least 1 or null, got {self.cosine_steps}",
            ),
        )
        mistakes += misspelt("optimizer.freeze_after", self.freeze_after) or broken(
            (
                self.name != "quantized-adam" or read_duration(self.freeze_after)[0] > 0,
                "optimizer.freeze_after must be at least 1 step for quantized-adam, because nothing moves without a "
                f'second moment; a fifth of training is usual, such as "200 steps" of 1000; got {self.freeze_after!r}',
            )
        )
        mistakes += self._mistakes_of_name()
        if mistakes or (mistakes := self._without_effect()):
            raise OptionsError(mistakes)

    @property
    def of_another(self) -> bool:
        """Whether it is a class of torch.optim or of the user."""
        return self.name not in OPTIMIZERS

    @property
    def copies(self) -> int:
        """Tensors as large as the parameters in a checkpoint: these and the moments, as of adamw if unknown."""
        return 2 if self.name in ("sgd", "muon") else 3

    def usual(self) -> dict[str, Any]:
        """What fields of Adam and sgd are where the recipe leaves them out; nothing for another optimizer."""
        return {} if self.of_another else _USUAL | _USUAL_OF.get(self.name, {})

    def kind(self) -> type[Any]:
        """The class of another optimizer, or that of muon's matrices. OptionsError if there is none."""
        import torch

        name = "Muon" if self.name == "muon" else self.name
        found = find(name, OptionsError, "optimizer.name") if is_path(name) else getattr(torch.optim, name, None)
        if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)) or found is torch.optim.Optimizer:
            known = [name for name, each in vars(torch.optim).items() if isinstance(each, type)]
            raise OptionsError(
                f"optimizer.name must be {', '.join(OPTIMIZERS)}, a class of torch.optim or module:Class, got "
                f"{self.name!r}{did_you_mean(self.name, [*OPTIMIZERS, *known], most=1)}"
            )
        if issubclass(found, torch.optim.SparseAdam):
            raise OptionsError(
                f"optimizer.name must be one for dense gradients, which weights have here, got {self.name}"
            )
        closure = inspect.signature(found.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise OptionsError(f"optimizer.name must be one that steps once a batch, got {self.name}, which needs more")
        return found

    def numbers(self) -> dict[str, Any]:
        """The arguments of another optimizer: of the fields, those that it takes."""
        taken = inspect.signature(self.kind()).parameters
        given = {"lr": self.lr, "weight_decay": self.weight_decay, **self._given()}
        return {**{name: value for name, value in given.items() if name in taken}, **self.arguments}

    def _given(self) -> dict[str, Any]:
        """The fields of Adam and sgd that the recipe gives."""
        return {name: value for name in _USUAL if (value := getattr(self, name)) is not None}

    def _mistakes_of_name(self) -> list[str]:
        if not self.of_another and not (self.name == "muon" and self.arguments):
            beside = bool(self.arguments)
            return [f"optimizer.arguments must be left out for {self.name}, got {self.arguments}"] if beside else []
        try:
            taken = inspect.signature(self.kind()).parameters
        except OptionsError as error:
            return list(error.mistakes)
        decays = {"weight_decay": self.weight_decay} if self.weight_decay else {}
        open_ended = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
        unknown = [name for name in {**decays, **self._given()} if self.of_another and name not in taken]
        unknown += [name for name in self.arguments if not (name in taken or open_ended)]
        return [f"optimizer.{name} is no argument of {self.name}; leave it out" for name in unknown] + [
            f"optimizer.arguments must not have {name}, which would not follow the recipe; set optimizer.{name}"
            for name in ("lr", "weight_decay")
            if name in self.arguments
        ]

    def _without_effect(self) -> list[str]:
        """A sentence for each field that this optimizer, or this schedule, does not use."""
        usual, mistakes = self.usual(), list[str]()
        for name, (chosen, users) in _USED_BY.items():
            own, value, default = getattr(self, chosen), getattr(self, name), getattr(OptimizerOptions, name)
            # a momentum of 0 is what the others have, too
            harmless = not value or value in (default, usual.get(name)) or (self.of_another and name in _USUAL)
            if harmless or own in users:
                continue
            mistakes.append(
                f"optimizer.{name} must be {'null' if default is None else default} for optimizer.{chosen} {own}, got "
                f"{value}; {listed(users)} {'uses' if len(users) == 1 else 'use'} it"
            )
        return mistakes

    def is_frozen(self, progress: compress.Progress) -> bool:
        """Whether the second moment is frozen in the coming step."""
        over = is_over(self.freeze_after, progress.step, progress.steps_per_epoch)
        return self.name == "quantized-adam" and over

    def note_on_warmup(self, steps: int) -> str | None:
        """A sentence if the learning rate never falls in so many steps, because its warm-up is no shorter."""
        if not steps or self.warmup_steps < steps:
            return None
        return (
            f"the learning rate rises to the end, to {steps / self.warmup_steps:.0%} of optimizer.lr: "
            f"optimizer.warmup_steps of {self.warmup_steps} is as long as all {steps} steps; lower it, or take "
            f"optimizer.warmup_ratio"
        )

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
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the passes: fp32, or bf16 by autocast, with weights that stay float32. In bf16 the tensors at the
    boundaries have 16 bits too."""
    recompute: Literal["none", "block"] = "none"
    """What the backward pass computes again so that a waiting micro-batch takes less memory: none, or each block, which
    then keeps only its inputs. Gradients are the same; the backward pass takes longer by one forward. A
    schedule that splits the backward needs none."""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """Where the stages compute: cpu, cuda (the GPUs of a host in turn, by LOCAL_RANK), or auto (a GPU if there is
    one, else the CPU)."""
    compile: bool = False
    """Whether torch compiles each block before the first step, which takes minutes and a C++ compiler. The last bits of
    results change."""
    threads: int = 1
    """CPU threads of each stage process. The last bits of results depend on it, so it is part of the recipe."""
    evaluate_every: str = "0 steps"
    """How often held-out samples are evaluated: "1 epoch" or "500 steps"; "0 steps" evaluates only at the end."""
    best: str | None = None
    """Held-out score without compression by which the best weights are kept, in best/ of the run's folder; with its
    direction: "min loss" or "max accuracy"."""
    patience: int | None = None
    """Training ends after this many evaluations in a row without a better score; null trains all steps."""
    loss: str | None = None
    """Your own loss in place of the cross-entropy, as module:function. It takes the last layer's output and the
    targets, and returns the sum over the targets that are not -100, a scalar."""
    metrics: list[str] = field(default_factory=list)
    """Your own functions for evaluations, as module:function. Each takes a micro-batch's output and targets, and
    returns the sum over the targets that are not -100; its mean is shown under its name."""

    prompts: list[str] = field(default_factory=list)
    """Prompts that a language model answers at each evaluation, with compression on and off; for chats, the user's
    message."""
    answer_tokens: int = 64
    """Largest number of tokens in an answer."""

    def __post_init__(self) -> None:
        bounds = {
            "answer_tokens": (1, math.inf),
            "steps": (0, MOST_STEPS),
            "epochs": (0, MOST_STEPS),
            "threads": (1, MOST_THREADS),
        }
        mistakes = beyond("training", self, bounds)
        mistakes += misspelt("training.evaluate_every", self.evaluate_every)
        if self.best is not None and not re.fullmatch(r"(min|max) \S+", self.best):
            mistakes.append(f'training.best must be like "min loss" or "max accuracy", got {self.best!r:.60}')
        if self.patience is not None and (self.patience < 1 or self.best is None):
            mistakes.append(f"training.patience must be at least 1, and needs training.best, got {self.patience}")
        elif self.patience is not None and not mistakes and read_duration(self.evaluate_every)[0] == 0:
            mistakes.append(
                f"training.evaluate_every must be at least 1 step beside training.patience, which counts evaluations, "
                f"got {self.evaluate_every!r}"
            )
        if self.prompts and self.compile:
            mistakes.append("training.prompts must be left out beside training.compile: each length is another program")
        if mistakes:
            raise OptionsError(mistakes)


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
    stops), or never (the run starts from step 0, and the earlier run's folder is renamed)."""
    restarts: int = 0
    """How often `thinwire train` starts all stages again from the newest checkpoint after a stage died."""

    def __post_init__(self) -> None:
        mistakes = misspelt("checkpoint.every", self.every)
        mistakes += beyond("checkpoint", self, {"keep": (1, math.inf), "restarts": (0, math.inf)})
        if mistakes:
            raise OptionsError(mistakes)

    @property
    def wanted(self) -> bool:
        """Whether checkpoints are written at all."""
        return read_duration(self.every)[0] > 0


@dataclass(frozen=True, kw_only=True)
class DebugOptions:
    """Checks that cost time."""

    check_buffers: bool = False
    """Whether to compare the buffers at both ends of every boundary, and the weights of all replicas, after each epoch
    and at the end."""
    smoke: bool = False
    """Whether to make the shortest run that uses every part: three steps of little data, an evaluation, a save and
    a checkpoint, in a folder of its own. --smoke is short for it."""
