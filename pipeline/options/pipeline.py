"""The cut of the model, the order of the work, and the way of frames: fields of a recipe, with their checks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.options.changes import beyond
from thinwire.pipeline.processes.backends import TRANSPORTS, TransportName, names_of


@dataclass(frozen=True, kw_only=True)
class WireOptions:
    """How frames are sent and checked."""

    transport: TransportName = "gloo"
    """What carries messages between processes: gloo, which is part of torch, for private networks; zmq, which encrypts
    messages, admits only processes with the keys, and repairs broken connections; nccl, which carries frames from GPU
    to GPU, and was run on one GPU only; or auto: nccl between two GPUs of a host, else gloo."""
    keys: str | None = None
    """For zmq: the file that `thinwire keys` made, the same on every machine; with null, `thinwire train` makes fresh
    keys for each run on one machine."""
    connections: int = 1
    """For zmq: connections from each process to each other one; several fill a long fast link better."""
    timeout: float = 300.0
    """Time-out in seconds: for waiting on another stage, and for a stage that is silent before its first or after its
    last step. Where replicas step alone, they wait for each other replicas.sync.every times as long, up to a day."""
    heartbeat: float = 10.0
    """Seconds of silence after which the others treat a stage in training as dead. A stage sends heartbeats while it
    computes, so it is silent only if it is stopped or stuck, or if its host or link is gone."""
    checksum: bool = True
    """Whether a CRC-32 protects whole frames; false protects only their headers."""
    nonfinite: Literal["raise", "send"] = "raise"
    """What to do with NaN or infinity in a tensor, a loss or a gradient norm: "raise" stops the run and names it, at
    the sender and where a payload decodes to such numbers; "send" passes them on. In a loop of your own, gradients in
    float16 always go on: its scaler skips a step in which they overflow."""

    def __post_init__(self) -> None:
        mistakes = [
            f"wire.{name} must be from {least:g} to 1e6 seconds, got {value}"
            for name, value, least in (("timeout", self.timeout, 0.01), ("heartbeat", self.heartbeat, 1))
            if not least <= value <= 1e6
        ]
        if self.nonfinite not in ("raise", "send"):
            mistakes.append(f"wire.nonfinite must be raise or send, got {self.nonfinite!r}")
        if self.transport not in TRANSPORTS:
            raise OptionsError(
                [*mistakes, f"wire.transport must be {names_of(lambda _: True)}, got {self.transport!r}"]
            )
        most, several = TRANSPORTS[self.transport].connections, names_of(lambda transport: transport.connections > 1)
        if not 1 <= self.connections <= most:
            mistakes.append(
                f"wire.connections must be {f'from 1 to {most}' if most > 1 else 1} for wire.transport "
                f"{self.transport}, got {self.connections}; {several} may have several"
            )
        if mistakes:
            raise OptionsError(mistakes)


MOST_STAGES, MOST_MICROBATCHES = 10_000, 100_000
"""Beyond these, the order of the work takes minutes to make."""


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """The cut of the model into stages, and the order of the work."""

    num_stages: int = 4
    """Number of stages that the model is cut into."""
    schedule: str = "gpipe"
    """Order of the work: a schedule of torch.distributed.pipelining (gpipe, 1f1b, looped-bfs, interleaved-1f1b,
    interleaved-zero-bubble, zbv-zero-bubble, dualpipev); 1f1b-wan, which is 1F1B for slow links; or module:name, a
    schedule of your own."""
    stages_per_process: int | None = None
    """Stages that each process holds; null takes the schedule's own number: 1, or 2 if the schedule interleaves."""
    layers: list[int] | list[str] | None = None
    """The number of layers of each stage; or, for each stage except the last, the name of its last layer (`thinwire
    predict RECIPE` lists the names). null makes the cut whose slowest stage has the least compute."""
    num_microbatches: int = 4
    """Micro-batches in one pass through the pipeline."""
    microbatch_size: int = 4
    """Samples in a micro-batch."""
    accumulation: int = 1
    """Passes through the pipeline before the optimizer steps."""

    def __post_init__(self) -> None:
        from thinwire.pipeline.schedules import SCHEDULES, check_order

        bounds = {
            "num_stages": (1, MOST_STAGES),
            "num_microbatches": (1, MOST_MICROBATCHES),
            "microbatch_size": (1, math.inf),
            "accumulation": (1, math.inf),
        }
        mistakes = beyond("pipeline", self, bounds)
        try:
            spec = SCHEDULES[self.schedule]
            if not mistakes:
                mistakes += spec.mistakes(self.num_stages, self.per_process, self.num_microbatches)
            if not mistakes and self.schedule not in SCHEDULES:  # a schedule of the user's own
                check_order(self.schedule, self.num_stages, self.num_processes, self.num_microbatches)
        except OptionsError as error:
            mistakes += error.mistakes
        mistakes += self._layers_mistakes()
        if mistakes:
            raise OptionsError(mistakes)

    def _layers_mistakes(self) -> list[str]:
        if self.layers is None:
            return []
        named = any(isinstance(entry, str) for entry in self.layers)
        if len(self.layers) == self.num_stages - named:
            return []
        wanted = "a name for each stage except the last" if named else "a number for each stage"
        return [
            f"pipeline.layers must have {wanted}, got {len(self.layers)} for {self.num_stages} stages; give as many, "
            f"or add --pipeline.layers null for a cut of equal costs"
        ]

    @property
    def per_process(self) -> int:
        """The number of stages in a process."""
        from thinwire.pipeline.schedules import SCHEDULES

        chosen = self.stages_per_process
        return chosen if chosen is not None else SCHEDULES[self.schedule].stages_per_process

    @property
    def num_processes(self) -> int:
        """The number of processes that the pipeline needs."""
        return self.num_stages // self.per_process

    @property
    def pass_size(self) -> int:
        """Samples in one pass."""
        return self.num_microbatches * self.microbatch_size

    @property
    def batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.pass_size * self.accumulation
