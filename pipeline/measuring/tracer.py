"""A tracer records the work of every stage of a process in some training steps, with times on one clock.

It keeps only the newest steps, so a trace stays small in a long training.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from thinwire.pipeline.measuring.clocks import Clock, Reading, read_clock
from thinwire.pipeline.measuring.meters import Meter
from thinwire.pipeline.measuring.spans import Recording
from thinwire.pipeline.measuring.traces import StageTrace, StepTrace


class Tracer:
    """Keeps the newest training steps of one process's stages.

    Args:
        meters: the meter of every stage of this process, by stage.
        keep: number of steps to keep; 0 records nothing and takes no time.
    """

    def __init__(self, meters: Mapping[int, Meter], keep: int) -> None:
        self.keep = keep
        self._meters = dict(meters)
        self._kept: deque[dict[int, StepTrace]] = deque(maxlen=keep)
        self._readings: list[Reading] = []

    def read_clock(self, reference: int) -> None:
        """Compare clocks with the reference process, if steps are kept; collective, before and after training."""
        if self.keep:
            self._readings.append(read_clock(reference))

    @contextmanager
    def step(self, index: int) -> Iterator[None]:
        """Record the training step inside."""
        if not self.keep:
            yield
            return
        started = time.perf_counter()
        recordings = {stage: Recording() for stage in self._meters}
        for stage, meter in self._meters.items():
            meter.recording = recordings[stage]
        try:
            yield
        finally:
            for meter in self._meters.values():
                meter.recording = None
        ended = time.perf_counter()
        self._kept.append(
            {
                stage: StepTrace(index, started, ended, tuple(recording.spans), tuple(recording.departures))
                for stage, recording in recordings.items()
            }
        )

    def traces(self) -> dict[int, StageTrace]:
        """The kept steps of each stage, on the reference's clock. It needs a reading before training and one after."""
        clock = Clock(self._readings[0], self._readings[-1])
        return {
            stage: StageTrace(
                stage, clock.error, clock.drift, tuple(step[stage].on(clock) for step in self._kept if stage in step)
            )
            for stage in self._meters
        }
