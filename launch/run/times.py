"""The seconds of a run in one process: training steps, evaluations and saves, each on its own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, get_args

Activity = Literal["training", "evaluation", "saving"]


class Times:
    """Seconds by activity.

    Args:
        before: the `state_dict` of the run that this one goes on from; empty for a new run.

    Attributes:
        seconds: seconds of each activity; `training` is optimizer steps alone.
    """

    def __init__(self, before: Mapping[str, float]) -> None:
        self.seconds: dict[Activity, float] = {
            purpose: float(before.get(purpose, 0.0)) for purpose in get_args(Activity)
        }
        self._started = time.perf_counter() - float(before.get("all", 0.0))

    @property
    def all(self) -> float:
        """Seconds since the run began, with the time between activities."""
        return time.perf_counter() - self._started

    @contextmanager
    def spent_on(self, purpose: Activity) -> Iterator[None]:
        """Add the time of the code inside to an activity."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[purpose] += time.perf_counter() - started

    def state_dict(self) -> dict[str, float]:
        """The seconds so far, as JSON values."""
        return {**{str(purpose): spent for purpose, spent in self.seconds.items()}, "all": self.all}
