"""Several pipelines that train one model together: fields of a recipe, with their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from thinwire.pipeline.errors import OptionsError

MOST_REPLICAS = 1024
"""The most replicas of a pipeline."""


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """Replicas of the pipeline, each with processes and samples of its own. After every step all have equal weights."""

    count: int = 1
    """Number of replicas. A step takes so many times the samples of one pipeline."""
    shuffle: Literal["within", "across"] = "within"
    """Whether a sample stays with one replica for the whole run (within), or the order of all samples decides its
    replica (across). Feedback with a buffer for each sample needs within."""

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MOST_REPLICAS:
            raise OptionsError(f"replicas.count must be from 1 to {MOST_REPLICAS}, got {self.count}")
