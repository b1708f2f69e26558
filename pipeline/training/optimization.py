"""The loss of the whole batch, and what follows the passes: optimizer, learning rate, and the norm over all stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, Parameter
from torch.optim import Optimizer

from thinwire.compress import Progress
from thinwire.errors.calls import first_line
from thinwire.models.tasks import Task, WithLoss
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.measuring.meters import Meter
from thinwire.pipeline.options import OptimizerOptions
from thinwire.pipeline.processes.collectives import StageNumbers
from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.replicas.quantized_adam import QuantizedAdam
from thinwire.pipeline.replicas.shared import SharedWeights
from thinwire.pipeline.saving.state import module_of
from thinwire.pipeline.stages.compressed_stage import CompressedStage

_PART = 2**19
"""The elements of a gradient that are copied at a time: 4 MiB in float64."""


class WholeBatchLoss:
    """The loss function of a schedule: the share that each micro-batch has in the mean of the whole batch.

    The shares of all micro-batches and accumulation passes add up to this: the sum of the loss over the valid targets,
    divided by the number of valid targets in the whole batch, which `begin` sets. Where nothing is observed, which is
    training, a loss of the model's own counts for each valid target of its micro-batch.
    """

    def __init__(self, task: Task, meter: Meter) -> None:
        self._task, self._meter = task, meter
        self._denominator = 1
        self._observed: list[Tensor] | None = None

    def begin(self, num_targets: int, observed: list[Tensor] | None = None) -> None:
        """Set the values for the coming passes, before the first of them.

        Args:
            num_targets: valid targets of the whole batch; 0 counts as 1.
            observed: the list that gets what the task observes of each micro-batch; None observes nothing.
        """
        self._denominator, self._observed = max(1, num_targets), observed

    def __call__(self, given: Tensor | WithLoss, target: Tensor) -> Tensor:
        """The share of one micro-batch."""
        with self._meter.section("compute", "loss"):
            output, own = given if isinstance(given, WithLoss) else (given, None)
            trains = self._observed is None
            if self._observed is not None:
                self._observed.append(self._task.observe(output.detach(), target))
            loss = self._task.loss_sum(output, target)
            if trains and own is not None:
                loss = loss + own * self._task.num_valid(target)
            return loss / self._denominator


@dataclass(eq=False)
class Update:
    """From the gradients of a batch to the next weights, in step on all stages."""

    stages: Sequence[CompressedStage]
    """Those of this process."""
    where: Placement
    options: OptimizerOptions
    """The course of the learning rate, and the largest norm."""
    steps: int
    """Of the whole training."""
    shared: SharedWeights
    """Weights that several stages hold."""
    before_step: Callable[[], None] = lambda: None
    """Called before weights and moments change."""

    def __post_init__(self) -> None:
        self._squares = StageNumbers(self.where, "the gradient norm", self.stages[0].wire.timeout)

    def lr(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return self.options.lr * lr_factor(step, self.steps, self.options)

    def expect(self) -> None:
        """Make room for the norms of other stages, in the step that begins."""
        if self.options.max_grad_norm is not None:
            self._squares.expect()

    def to_momentum(self, progress: Progress, optimizers: Sequence[Optimizer]) -> None:
        """Turn gradients into a part of the momentum, where the optimizer wants that to travel in their place."""
        for stage, optimizer in zip(self.stages, optimizers, strict=True):
            if isinstance(optimizer, QuantizedAdam):
                optimizer.frozen = self.options.is_frozen(progress)
                with stage.meter.section("compute", "optimizer"):
                    optimizer.to_momentum()

    def step(self, progress: Progress, optimizers: Sequence[Optimizer], replicas: int = 1) -> Mapping[int, float]:
        """Step the optimizer of each stage, and clear the gradients: the squares of their norms, by stage.

        Those of all stages where the step clips, elsewhere of the stages here: scalars that a GPU may still
        compute. `replicas` is how many of this process take the step together.
        """
        # 1. Sum shared gradients before the norm, which counts the sum once.
        self.shared.sum_gradients(progress, replicas)
        # 2. Clip before the step, by the norm over all stages.
        most = self.options.max_grad_norm
        squares = {stage.stage_index: squared_norm(self._counted(stage)) for stage in self.stages}
        if most is not None:
            with self.stages[0].meter.section("neighbour", "waiting for the gradient norm of all stages"):
                self._squares.send(squares)
                squares = dict(enumerate(self._squares.receive()))
            for stage in self.stages:
                clip(stage.submod.parameters(), norm_of(squares), most)
        # 3. Step, then clear the gradients for the next batch.
        self.before_step()
        for stage, optimizer in zip(self.stages, optimizers, strict=True):
            with stage.meter.section("compute", "optimizer"), stage.in_memory():
                for group in optimizer.param_groups:
                    _set_lr(group, self.lr(progress.step))
                optimizer.step()
                optimizer.zero_grad()
        return squares

    def _counted(self, stage: CompressedStage) -> list[Parameter]:
        """A stage's parameters, without copies that an earlier stage counts."""
        index = stage.stage_index
        copies = () if index in self.shared.holders[:1] else self.shared.copies(index)
        left_out = {id(copy) for copy in copies}
        return [parameter for parameter in stage.submod.parameters() if id(parameter) not in left_out]


def _set_lr(group: dict[str, Any], lr: float) -> None:
    """Set the learning rate of a group, in place where the optimizer keeps a tensor of it."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def make_optimizer(
    parameters: Iterable[Parameter],
    options: OptimizerOptions,
    summands: Callable[[Parameter], int] = lambda _: 1,
    ends: Collection[int] = (),
) -> Optimizer:
    """The optimizer of one stage, which may have no parameters.

    Args:
        parameters: those of the stage; frozen ones are left out.
        summands: how many tensors the gradient of a parameter is the sum of: one of each replica, and of each
            stage that holds it.
        ends: the ids of the parameters that read tokens or write the output, for muon.
    """
    group = _groups([each for each in parameters if each.requires_grad], options)
    if options.of_another or options.name == "muon":
        try:
            muon = options.name == "muon"
            made: Optimizer = Muon(group, options, ends) if muon else options.kind()(group, **options.numbers())
        except Exception as error:
            raise OptionsError(f"optimizer {options.name} cannot be made: {first_line(error)}") from error
        return made
    if options.name == "sgd":
        return torch.optim.SGD(group, **_numbers(options, "momentum"), fused=_may_fuse(group))
    if options.name == "quantized-adam":
        return QuantizedAdam(group, **_numbers(options, "betas", "eps"), summands=summands)
    return _adamw(group, options)


def _adamw(groups: list[dict[str, Any]], options: OptimizerOptions) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, **_numbers(options, "betas", "eps"), fused=_may_fuse(groups))


def _numbers(options: OptimizerOptions, *names: str) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("lr", "weight_decay", *names)}


def _may_fuse(groups: Sequence[dict[str, Any]]) -> bool:
    """Whether torch can step these in one pass, which takes no memory; its other steps copy one parameter or all."""
    return all(each.is_floating_point() for group in groups for each in group["params"])


def _groups(parameters: Sequence[Parameter], options: OptimizerOptions) -> list[dict[str, Any]]:
    """The groups of an optimizer: all, or first those that decay. torch refuses no parameters, and takes no group."""
    flat = [each for each in parameters if each.ndim < 2] if options.no_decay and options.weight_decay else []
    if not flat:
        return [{"params": list(parameters)}]
    return [{"params": [each for each in parameters if each.ndim >= 2]}, {"params": flat, "weight_decay": 0.0}]


class Muon(Optimizer):
    """torch's Muon for the matrices inside a model, and AdamW for all else, with one learning rate.

    Args:
        groups: the parameters, as any optimizer takes them.
        options: the numbers of both; `arguments` are those of Muon.
        ends: the ids of the parameters of embeddings and heads, which are not inside.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], options: OptimizerOptions, ends: Collection[int]) -> None:
        super().__init__(list(groups), {})

        def inside(parameter: Parameter) -> bool:
            return parameter.ndim == 2 and id(parameter) not in ends

        matrices, others = (
            [{**group, "params": [each for each in group["params"] if inside(each) == wanted]} for group in groups]
            for wanted in (True, False)
        )
        # the step of a matrix is as long as AdamW's, so that both have the same learning rate
        numbers = {"weight_decay": options.weight_decay, "momentum": options.momentum}
        given = {"adjust_lr_fn": "match_rms_adamw", **numbers, **options.arguments}
        self._both: tuple[Optimizer, ...] = torch.optim.Muon(matrices, lr=options.lr, **given), _adamw(others, options)
        self.param_groups = [group for each in self._both for group in each.param_groups]
        for each in self._both:
            each.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step of both."""
        assert closure is None, "the passes of a step come before it"
        for each in self._both:
            each.step()


def ends_of(stage: CompressedStage) -> set[int]:
    """The ids of a stage's parameters that read tokens, and of those of the model's last layer that has any."""
    module = module_of(stage)
    layers = module.layers if stage.is_last else ()
    last = [layer for layer in layers if next(layer.parameters(), None) is not None][-1:]
    found = [each for each in module.modules() if isinstance(each, Embedding)] + last
    return {id(parameter) for each in found for parameter in each.parameters()}


def lr_factor(step: int, total: int, options: OptimizerOptions) -> float:
    """The learning rate of step `step` (from 0) as a part of its peak.

    Rises linearly in the warm-up, then follows the chosen course until `total` steps.
    """
    warmup = options.warmup_steps or math.ceil(options.warmup_ratio * total)
    if step < warmup:
        return (step + 1) / warmup
    length = max(1, total - warmup)
    done = step - warmup
    falls = math.ceil(total / 10)
    through = min(1.0, done / (options.cosine_steps or length))
    courses: dict[str, Callable[[], float]] = {
        "constant": lambda: 1.0,
        "linear": lambda: max(0.0, 1 - done / length),
        "cosine": lambda: 0.5 * (1 + math.cos(math.pi * through)),
        "wsd": lambda: min(1.0, max(0.0, (total - step) / falls)),
    }
    least = options.min_lr / options.lr if options.lr else 0.0
    return least + (1 - least) * courses[options.schedule]()


def norm_of(squares: Mapping[int, float]) -> float:
    """The norm of the gradients of all stages, of the squares of each. The sum is in stage order, for its last bits."""
    return math.sqrt(sum(squares[stage] for stage in sorted(squares)))


def squared_norm(parameters: Iterable[Parameter]) -> Any:
    """Sum of squares of the gradients of one stage, a scalar float64; large ones in parts, because torch copies them.

    It stays a tensor: without clipping, a GPU has the work of the optimizer before anybody waits for the norm.
    """
    gradients = [_real(parameter.grad) for parameter in parameters if parameter.grad is not None]
    parts = [part for gradient in gradients for part in _rows(gradient)]
    if not parts:
        return torch.zeros((), dtype=torch.float64)
    # one tensor for all: a small one after each copy would pin the gaps that the copies leave in the heap
    norms = torch.empty(len(parts), dtype=torch.float64, device=parts[0].device)
    for part, norm in zip(parts, norms, strict=True):
        torch.linalg.vector_norm(part, dtype=torch.float64, out=norm)
    return norms.square().sum()


def _real(gradient: Tensor) -> Tensor:
    """The numbers of a gradient, which may be sparse or complex."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.view_as_real(values) if values.is_complex() else values


def _rows(gradient: Tensor) -> Sequence[Tensor]:
    """The rows of a large gradient, in parts; a small one as it is."""
    if gradient.numel() <= _PART:
        return [gradient]
    parts: Sequence[Tensor] = gradient.split(max(1, _PART // gradient[0].numel()))
    return parts


def clip(parameters: Iterable[Parameter], norm: float, max_norm: float) -> None:
    """Scale the gradients of one stage so that the norm over all stages, `norm`, becomes at most `max_norm`."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients and norm > max_norm:  # of LoRA, a stage may have none
        torch._foreach_mul_(gradients, max_norm / norm)
