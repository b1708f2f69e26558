"""Weights that several stages hold, such as a tied head: their copies stay equal because they get the same gradients.

The stages that hold them add up their gradients as the replicas of a stage do: each is a member of an exchange, through
the same frames, with the same errors at workers and owners. The last stage is the first member.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil

from torch import Tensor
from torch.nn import Parameter

from thinwire.compress import Method, Progress
from thinwire.pipeline.frames import CHANNELS, SHARED
from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.replicas.division import BUCKET, divide
from thinwire.pipeline.replicas.lane import SHARED_GRADIENTS, LaneEnds
from thinwire.pipeline.replicas.layout import FLAT
from thinwire.pipeline.replicas.member import InFull, Setting, never
from thinwire.pipeline.replicas.stage_exchange import StageExchange
from thinwire.pipeline.saving.checkpoint_folder import SavedStage
from thinwire.pipeline.stages.compressed_stage import CompressedStage

PREFIX = "shared/"
"""What the names of its errors begin with in a checkpoint."""


class SharedWeights:
    """The shared parameters of one set of stages, as one process sees them.

    Args:
        copies: of each stage here that holds them the parameters by name, in an order that all holders have.
        holders: all stages that hold them, in stage order; none if there are no such weights.
        where: where all stages live.
        in_full: says whether those of a step go uncompressed.
        simulated: where stages would live, if a simulation has them all in one process; it counts what would be sent.
    """

    def __init__(
        self,
        stages: Sequence[CompressedStage],
        copies: Mapping[int, Mapping[str, Parameter]],
        holders: Sequence[int],
        where: Placement,
        method: Method,
        in_full: InFull = never,
        simulated: Placement | None = None,
    ) -> None:
        self.holders, self._members = holders, [*reversed(holders)]
        self._process_of, self._replicas = (simulated or where).process_of, 1
        self._keeps_errors = method.feedback is not None
        wire = stages[0].wire
        here = {stage: self._members.index(stage) for stage in copies}
        links = LaneEnds(
            here.values(),
            wire.group,
            where.num_stages,
            wire.timeout,
            {member: partial(wire.clocks.local, where.process_of[stage]) for member, stage in enumerate(self._members)},
            places=[where.place_of(stage) for stage in self._members],
            first_tag=where.num_stages * len(CHANNELS),
        )
        setting = partial(
            Setting,
            replicas=len(holders),
            to_all=False,
            links=links,
            # what another stage has used gets a gradient here too
            everyone=lambda mine: [[True] * len(mine)],
            method=method,
            seed=wire.seed,
            options=wire.options,
            in_full=in_full,
            channels=SHARED,
            carries=SHARED_GRADIENTS,
            names=tuple(f"stage {stage}" for stage in self._members),
            copies=self._crossings,
        )
        meters = {stage.stage_index: stage.meter for stage in stages}
        self._exchanges = {
            stage: StageExchange(copies[stage], setting(stage=holders[0], meter=meters[stage], here=[member]))
            for stage, member in here.items()
        }

    def _crossings(self, source: int, to: int) -> int:
        """How many links a frame of a member to another crosses, in all pipelines that the sum under way is for."""
        first, second = (self._process_of[self._members[member]] for member in (source, to))
        return self._replicas if first != second else 0

    def copies(self, stage: int) -> Sequence[Parameter]:
        """The parameters that a stage here shares with others."""
        return self._exchanges[stage].parameters if stage in self._exchanges else ()

    def copies_of(self, parameter: Parameter) -> int:
        """The number of stages that hold a parameter of this process."""
        held = any(parameter is copy for stage in self._exchanges for copy in self.copies(stage))
        return len(self.holders) if held else 1

    def sum_gradients(self, progress: Progress, replicas: int = 1) -> None:
        """Give every copy the sum of all copies' gradients. Collective over the processes of the holders.

        `replicas` is how many a simulation does it for at once: each would do it for itself.
        """
        self._replicas = replicas
        for stage, exchange in self._exchanges.items():
            exchange.submit(self._members.index(stage), progress)
        for exchange in self._exchanges.values():
            exchange.add_up(progress)
        for exchange in self._exchanges.values():
            exchange.finish(progress)

    def average_gradients(self, progress: Progress, replicas: int = 1) -> None:
        """Give every copy the mean of all copies' gradients; else as `sum_gradients`."""
        self.sum_gradients(progress, replicas)
        for stage in self._exchanges:
            for parameter in self.copies(stage):
                assert parameter.grad is not None, "it has the sum"
                parameter.grad /= len(self.holders)

    def state_dict(self, stage: int) -> dict[str, Tensor]:
        """Copies of the errors of a stage, by their names in a checkpoint; none without feedback."""
        state = self._exchanges[stage].state_dict() if self._keeps_errors and stage in self._exchanges else {}
        return {f"{PREFIX}{name}": tensor for name, tensor in state.items()}

    def load_state_dict(self, stage: int, saved: SavedStage) -> None:
        """Take what `state_dict` returned. CheckpointError if something is missing."""
        if self.state_dict(stage):
            self._exchanges[stage].load_state_dict(saved.tensors(PREFIX))


def bytes_of_step(elements: int, processes: Sequence[int], method: Method) -> int:
    """Bytes between processes in a step to add up so many elements, headers included; `processes` are of the holders.

    Each part goes from all others to its owner, and its sum back to them.
    """
    members = [*reversed(processes)]
    buckets = divide(ceil(elements / FLAT.row), len(members), BUCKET // FLAT.row)
    return sum(
        2 * sum(other != owner for other in members) * FLAT.frame_bytes(len(part), method)
        for bucket in buckets
        for part, owner in zip(bucket.parts, members, strict=True)
        if part
    )
