"""The loss of the whole batch, and what follows the passes: optimizer, learning rate, and the norm over all stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from thinwire.models.tasks import Task
from thinwire.pipeline.meters import Meter
from thinwire.pipeline.options import OptimizerOptions
from thinwire.pipeline.replicas.quantized_adam import QuantizedAdam
from thinwire.pipeline.tracing.spans import Work


class WholeBatchLoss:
    """The loss function of a schedule: the share that each micro-batch has in the mean of the whole batch.

    The shares of all micro-batches and accumulation passes add up to this: the sum of the loss over the valid targets,
    divided by the number of valid targets in the whole batch, which `begin` sets.
    """

    def __init__(self, task: Task, meter: Meter) -> None:
        self._task, self._meter = task, meter
        self._denominator, self._factor = 1, 1.0
        self._observed: list[Tensor] | None = None

    def begin(self, num_targets: int, observed: list[Tensor] | None = None, factor: float = 1.0) -> None:
        """Set the values for the coming passes, before the first of them.

        Args:
            num_targets: valid targets of the whole batch; 0 counts as 1.
            observed: the list that gets what the task observes of each micro-batch; None observes nothing.
            factor: a power of two that every share is multiplied by.
        """
        self._denominator, self._observed, self._factor = max(1, num_targets), observed, factor

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """The share of one micro-batch."""
        with self._meter.section("compute", work=Work("loss")):
            if self._observed is not None:
                self._observed.append(self._task.observe(output.detach(), target))
            return self._task.loss_sum(output, target) / self._denominator * self._factor


def make_optimizer(
    parameters: Iterable[Parameter], options: OptimizerOptions, parts: Callable[[Parameter], int] = lambda _: 1
) -> torch.optim.Optimizer:
    """The optimizer of one stage, which may have no parameters.

    `parts` says in how many parts the gradient of a parameter comes: one of each replica, and of each stage that holds
    it.
    """
    group = [{"params": list(parameters)}]  # torch refuses an empty list of parameters, and takes an empty group
    if options.name == "sgd":
        # foreach: the same arithmetic, in three calls for all parameters
        return torch.optim.SGD(
            group, lr=options.lr, momentum=options.momentum, weight_decay=options.weight_decay, foreach=True
        )
    if options.name == "quantized-adam":
        return QuantizedAdam(
            group,
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
            parts=parts,
        )
    return torch.optim.AdamW(
        group, lr=options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay
    )


def lr_factor(step: int, total: int, options: OptimizerOptions) -> float:
    """The learning rate of step `step` (from 0) as a part of its peak.

    Rises linearly over `warmup_steps`, then follows the chosen course until `total` steps.
    """
    if step < options.warmup_steps:
        return (step + 1) / options.warmup_steps
    length = max(1, total - options.warmup_steps)
    done = step - options.warmup_steps
    courses: dict[str, Callable[[], float]] = {
        "constant": lambda: 1.0,
        "linear": lambda: max(0.0, 1 - done / length),
        "cosine": lambda: 0.5 * (1 + math.cos(math.pi * min(1.0, done / (options.cosine_steps or length)))),
    }
    return courses[options.schedule]()


def squared_norm(parameters: Iterable[Parameter]) -> float:
    """Sum of squares of the gradients of one stage, in float64."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    return float(torch.stack(norms).square().sum()) if norms else 0.0


def clip(parameters: Iterable[Parameter], norm: float, max_norm: float) -> None:
    """Scale the gradients of one stage so that the norm over all stages, `norm`, becomes at most `max_norm`."""
    if norm > max_norm:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, max_norm / norm)
