"""Losses and metrics. A task sums and counts; the caller knows the whole batch and divides.

The loss of a step is the sum over its valid targets divided by their number in the WHOLE batch. The mean of micro-batch
means differs if targets are masked unevenly, and is NaN if a micro-batch has none. Metrics are made of counts that add
up, for the same reason.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from thinwire.errors.calls import call, called
from thinwire.errors.imports import find
from thinwire.models.errors import ModelError, require

TaskName = Literal["causal-lm", "classification", "token-classification"]
"""The task that a family of models is for."""
MOST_CLASSES = 1_000_000
"""The most classes: scores count each."""
IGNORE = -100
"""The target that does not count."""
_WHOLE = 9 * 2**20
"""The most logits that a loss computes with at once."""
_PART = 2**20
"""The most logits that it computes with at a time where there are more: 4 MiB in float32."""


class WithLoss(NamedTuple):
    """What the last layer of a model gives that has a loss of its own beside that of its task."""

    output: Tensor
    """What the task reads."""
    loss: Tensor
    """A float32 scalar, added to the mean loss of the micro-batch in training."""


class Task(Protocol):
    """A loss, and the metrics that belong to it."""

    unit: str
    """The unit of a mean loss."""
    scores: tuple[str, ...]
    """The names of the metrics."""

    def loss_sum(self, output: Tensor, target: Tensor) -> Tensor:
        """The summed loss of the valid targets, here cross-entropy in nats: a float32 scalar, 0 without targets."""
        logits, targets = output.flatten(0, -2), target.flatten()
        if logits.numel() <= _WHOLE:
            return _cross_entropy(logits.float(), targets)
        found: Tensor = CrossEntropyInParts.apply(logits, targets)
        return found

    def num_valid(self, target: Tensor) -> int:
        """The number of targets that count."""
        return int((target != IGNORE).sum())

    def observe(self, output: Tensor, target: Tensor) -> Tensor:
        """Counts of the valid targets, float64 [k]. Counts of parts add up to the counts of the whole."""

    def metrics(self, mean_loss: float, counts: Tensor) -> dict[str, float]:
        """The metrics, computed from the mean loss and the sum of all counts."""


class LanguageModeling(Task):
    """Predict each next token: output [B, T, V] logits, target [B, T] token ids or `IGNORE`."""

    unit = "nats per token"
    scores: tuple[str, ...] = ("perplexity",)

    def observe(self, output: Tensor, target: Tensor) -> Tensor:
        """No counts, float64 [0]: the loss is enough."""
        return torch.zeros(0, dtype=torch.float64)

    def metrics(self, mean_loss: float, counts: Tensor) -> dict[str, float]:
        """The perplexity: e to the power of the mean loss per token; infinity if that is too large for a float."""
        try:
            return {"perplexity": math.exp(mean_loss)}
        except OverflowError:
            return {"perplexity": math.inf}


class Classification(Task):
    """Classify each sample into one of `num_labels` classes: output [B, L] logits, target [B] labels or `IGNORE`.

    Or classify each word: output [B, T, L], target [B, T]. `of` names what has a label, for the unit.
    """

    scores: tuple[str, ...] = ("accuracy", "matthews")

    def __init__(self, num_labels: int, of: Literal["sample", "word"] = "sample") -> None:
        if not 2 <= num_labels <= MOST_CLASSES:
            raise ModelError(
                f"num_labels must be from 2 to {MOST_CLASSES}, got {num_labels}; check the labels of the data"
            )
        self.num_labels = num_labels
        self.unit = f"nats per {of}"

    def observe(self, output: Tensor, target: Tensor) -> Tensor:
        """Samples whose label is predicted, samples of each label, and of each prediction: float64 [1 + L + L].

        L is the number of classes, or that of the model's outputs where there are more.
        """
        valid = target != IGNORE
        labels, predicted = target[valid].cpu(), output.detach().argmax(-1)[valid].cpu()
        right, most = (labels == predicted).sum()[None], max(self.num_labels, output.shape[-1])
        return torch.cat([right, *(torch.bincount(x, minlength=most) for x in (labels, predicted))]).double()

    def metrics(self, mean_loss: float, counts: Tensor) -> dict[str, float]:
        """Accuracy and Matthews' correlation; NaN without samples."""
        right, *classes = [int(count) for count in counts.tolist()]
        labelled, predicted = classes[: len(classes) // 2], classes[len(classes) // 2 :]
        total = sum(labelled)
        return {"accuracy": right / total if total else math.nan, "matthews": matthews(right, labelled, predicted)}


class OwnTask:
    """A task with a loss or metrics of the user's own, which get output and target of a micro-batch.

    `loss` is the sum over the valid targets, a scalar; None leaves the loss as it is. `metrics` are sums over them too.
    """

    def __init__(
        self,
        task: Task,
        loss: Callable[[Tensor, Tensor], Any] | None = None,
        metrics: Mapping[str, Callable[[Tensor, Tensor], Any]] = MappingProxyType({}),
    ) -> None:
        self.task = task
        self._loss, self._metrics = loss, metrics
        self.unit = task.unit
        self.scores = (*task.scores, *metrics)

    def loss_sum(self, output: Tensor, target: Tensor) -> Tensor:
        """The summed loss of the valid targets. ModelError if the user's function gives no scalar."""
        if self._loss is None:
            return self.task.loss_sum(output, target)
        found = _called(self._loss, output, target)
        if not isinstance(found, Tensor) or found.numel() != 1:
            raise ModelError(f"the loss {called(self._loss)} must be a tensor of one number, got {found!r:.60}")
        return found.float().reshape(())

    def num_valid(self, target: Tensor) -> int:
        """How many targets count."""
        return self.task.num_valid(target)

    def observe(self, output: Tensor, target: Tensor) -> Tensor:
        """The number of valid targets, the user's sums, and the counts of the task: float64 [1 + M + k]."""
        sums = [float(_called(each, output, target)) for each in self._metrics.values()]
        return torch.cat(
            [torch.tensor([self.num_valid(target), *sums], dtype=torch.float64), self.task.observe(output, target)]
        )

    def metrics(self, mean_loss: float, counts: Tensor) -> dict[str, float]:
        """The metrics of the task, and the mean of the user's; NaN without valid targets."""
        total, *sums = counts[: 1 + len(self._metrics)].tolist()
        own = {name: each / total if total else math.nan for name, each in zip(self._metrics, sums, strict=True)}
        return {**self.task.metrics(mean_loss, counts[1 + len(self._metrics) :]), **own}


def own_task(task: Task, loss: str | None, metrics: Sequence[str]) -> Task:
    """A task with the user's functions, `module:function`, in place of those it has. ModelError if there are none."""
    task = task.task if isinstance(task, OwnTask) else task
    if loss is None and not metrics:
        return task
    names = [path.rpartition(":")[2] for path in metrics]
    known = ("loss", *task.scores)
    if len({*names, *known}) < len(names) + len(known):
        raise ModelError(
            f"training.metrics must have names of their own, other than {', '.join(known)}, got {', '.join(names)}"
        )
    fields = {**dict.fromkeys(metrics, "training.metrics"), **({} if loss is None else {loss: "training.loss"})}
    found = {path: find(path, ModelError, field) for path, field in fields.items()}
    require(
        *(
            (callable(each), f"{path} must be a function of output and targets, got {type(each).__name__}")
            for path, each in found.items()
        )
    )
    functions: dict[str, Any] = found
    named = {name: functions[path] for name, path in zip(names, metrics, strict=True)}
    return OwnTask(task, None if loss is None else functions[loss], named)


def _called(function: Callable[..., Any], output: Tensor, target: Tensor) -> Any:
    return call(function, output, target, name=called(function), takes="output and targets", error=ModelError)


def matthews(right: int, labelled: Sequence[int], predicted: Sequence[int]) -> float:
    """Matthews' correlation: 1 is perfect, 0 is as good as a constant, NaN without samples.

    For L classes it is Gorodkin's R_K, which needs the sums of the confusion matrix alone: its diagonal, and each row
    and column. It uses whole numbers until the last division. It is 0 if all labels or all predictions are one class,
    as in scikit-learn.
    """
    total = sum(labelled)
    if not total:
        return math.nan
    covariance = right * total - sum(t * p for t, p in zip(labelled, predicted, strict=True))
    spread = (total**2 - sum(t * t for t in labelled)) * (total**2 - sum(p * p for p in predicted))
    return covariance / math.sqrt(spread) if spread else 0.0


def mask_padding(target: Tensor, valid: Tensor) -> Tensor:
    """The targets [B, ...], with `IGNORE` in the rows where `valid` [B] is false."""
    rows = valid.view(-1, *[1] * (target.dim() - 1))
    return torch.where(rows, target, IGNORE)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")


class CrossEntropyInParts(torch.autograd.Function):
    """The cross-entropy of some rows at a time: torch's own holds the logits three times more, in float32.

    Gradients are those of the whole, bit for bit; the sum is added up in another order. The backward computes each part
    again, and may run twice.
    """

    repeats = True

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        """The summed loss, a float32 scalar, of logits [N, C] and targets [N]."""
        ctx.save_for_backward(logits, targets)
        parts = list(zip(*_in_parts(logits, targets), strict=True))
        # made before the parts: one made after each would lie where the next part could be
        sums = logits.new_empty(len(parts), dtype=torch.float32)
        for index, (some, wanted) in enumerate(parts):
            sums[index] = _cross_entropy(some.float(), wanted)
        return sums.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradient of the logits, in their dtype."""
        logits, targets = ctx.saved_tensors
        found = torch.empty_like(logits)
        for some, wanted, into in zip(*_in_parts(logits, targets, found), strict=True):
            with torch.enable_grad():
                leaf = some.detach().float().requires_grad_()
                loss = _cross_entropy(leaf, wanted)
            into.copy_(torch.autograd.grad(loss, leaf, gradient)[0])
        return found, None


def _in_parts(logits: Tensor, *others: Tensor) -> list[tuple[Tensor, ...]]:
    """The same rows of each, some at a time."""
    rows = max(1, _PART // logits.shape[1])
    return [each.split(rows) for each in (logits, *others)]
