"""What a run's seconds went to, as one process sees it: training steps, evaluations, and saves; each apart."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, get_args

Activity = Literal["training", "evaluation", "saving"]


class Times:
    """Seconds by what they were for.

    Args:
        before: what `state_dict` returned of a run that this one goes on from; empty where it starts anew.

    Attributes:
        seconds: what was spent on each; `training` is optimizer steps alone.
    """

    def __init__(self, before: Mapping[str, float]) -> None:
        self.seconds: dict[Activity, float] = {purpose: before.get(purpose, 0.0) for purpose in get_args(Activity)}
        self._started = time.perf_counter() - before.get("all", 0.0)

    @property
    def all(self) -> float:
        """Seconds since the run began, those of nothing in particular included."""
        return time.perf_counter() - self._started

    @contextmanager
    def spent_on(self, purpose: Activity) -> Iterator[None]:
        """Charge the time inside."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[purpose] += time.perf_counter() - started

    def state_dict(self) -> dict[str, float]:
        """What was spent so far, as JSON values."""
        return {**{str(purpose): spent for purpose, spent in self.seconds.items()}, "all": self.all}
