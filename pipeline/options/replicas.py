"""Several pipelines that train one model together: fields of a recipe, with their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from thinwire import compress
from thinwire.errors import broken, mistakes_in
from thinwire.errors.words import listed
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.options.changes import changed
from thinwire.pipeline.options.compression import method_of_sums
from thinwire.pipeline.options.training import MOST_LR, MOST_STEPS

MOST_REPLICAS = 1024
"""The most replicas of a pipeline."""
DAY = 86400.0
"""Seconds of a day."""


@dataclass(frozen=True, kw_only=True)
class SyncOptions:
    """How often replicas exchange. With `every` 1 they add up gradients in each step, without an outer optimizer."""

    every: int = 1
    """Optimizer steps from one exchange to the next. Above 1, each replica takes them alone; then the changes of the
    weights are averaged over the replicas, and move the common weights (DiLoCo)."""
    lr: float = 0.7
    """Learning rate of the outer optimizer, which moves the common weights by that average."""
    momentum: float = 0.9
    """Nesterov momentum of the outer optimizer; 0 for none."""

    def __post_init__(self) -> None:
        mistakes = broken(
            (1 <= self.every <= MOST_STEPS, f"replicas.sync.every must be from 1 to {MOST_STEPS}, got {self.every}"),
            (0 < self.lr <= MOST_LR, f"replicas.sync.lr must be above 0 and at most {MOST_LR:g}, got {self.lr}"),
            (0 <= self.momentum < 1, f"replicas.sync.momentum must be at least 0 and below 1, got {self.momentum}"),
        )
        if mistakes or (mistakes := self._without_effect()):
            raise OptionsError(mistakes)

    def _without_effect(self) -> list[str]:
        """A sentence if fields of the outer optimizer are set and there is none."""
        set_here = changed(self, "every")
        if self.every > 1 or not set_here:
            return []
        told = listed([f"{name} {value}" for name, value in set_here.items()])
        return [
            f"replicas.sync.every must be above 1 for replicas.sync.{told}: with 1, replicas add up their gradients in "
            f"each step, and have no outer optimizer; raise it, or drop {listed([*set_here])}"
        ]


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """Replicas of the pipeline, each with processes and samples of its own. Exchanges keep their weights equal."""

    count: int = 1
    """Number of replicas. A step takes this many times one pipeline's samples."""
    shuffle: Literal["within", "across"] = "within"
    """Whether a sample stays with one replica for the whole run (within), or the order of all samples decides its
    replica (across). Feedback with a buffer for each sample needs within."""
    gradients: str = "none"
    """Codec of the gradients of weights that replicas send each other, such as bf16 or ef(q(4)). With ef, each replica
    adds the error of a message to its next message, for its gradients and for the sums that it sends. If sync.every is
    above 1, these are outer gradients: the change of the weights since the last exchange."""
    sync: SyncOptions = field(default_factory=SyncOptions)

    def __post_init__(self) -> None:
        mistakes = broken(
            (1 <= self.count <= MOST_REPLICAS, f"replicas.count must be from 1 to {MOST_REPLICAS}, got {self.count}")
        )
        mistakes += mistakes_in(lambda: self.method)
        if mistakes or (mistakes := self._without_effect()):
            raise OptionsError(mistakes)

    def _without_effect(self) -> list[str]:
        """A sentence if fields are set that have no effect on so many replicas, or where they exchange each step."""
        sync = [f"sync.{name}" for name in changed(self.sync)]
        set_here = [f"replicas.{name}" for name in [*changed(self, "sync"), *sync]]
        if self.count == 1 and set_here:
            return [
                f"replicas.count must be above 1 for {listed(set_here)}: a single replica has no other one to exchange "
                f"with; raise it, or drop {'them' if len(set_here) > 1 else 'the field'}"
            ]
        return []

    @property
    def step_alone(self) -> bool:
        """Whether replicas take optimizer steps of their own between two exchanges."""
        return self.count > 1 and self.sync.every > 1

    def longest_wait(self, timeout: float) -> float:
        """Time-out in seconds of a replica's wait for another, where stages of a pipeline wait `timeout`.

        A slower replica falls behind in each step between two exchanges. More than a day is for no replica.
        """
        if not self.step_alone:
            return timeout
        return max(timeout, min(timeout * self.sync.every, DAY))

    def note_on_steps(self, steps: Mapping[str, int]) -> str | None:
        """A sentence if weights are saved or evaluated between two exchanges of replicas that step alone.

        `steps` has, by option, the number of steps from one save or evaluation to the next.
        """
        between = [option for option, count in steps.items() if count % self.sync.every]
        if not self.step_alone or not between:
            return None
        return (
            f"{' and '.join(between)} should be a multiple of replicas.sync.every, {self.sync.every} steps: between "
            f"two exchanges, saved and evaluated weights come from the last exchange"
        )

    @cached_property
    def method(self) -> compress.Method:
        """What the gradients go through between replicas. OptionsError if it cannot carry them."""
        return method_of_sums("replicas.gradients", self.gradients)
