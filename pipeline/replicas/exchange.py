"""The replicas of the stages of one process, and the sum of their gradients after the passes of a step.

The loss of a step is divided by the valid targets of the whole batch, the samples of all replicas. So the gradient of
the whole batch is the sum of what the replicas have. Every replica ends with the same bits.

In a simulation, one process does the passes of all replicas in turn, on one copy of the weights, as passes of an
accumulated batch. It keeps the gradients of each replica apart, and the frames between them go through memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from thinwire.compress import Progress
from thinwire.models.batch_norm import running_statistics
from thinwire.pipeline.errors import MismatchError
from thinwire.pipeline.options import ReplicaOptions
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.replicas.lane import GRADIENTS, OUTER_GRADIENTS, STATISTICS, LaneEnds
from thinwire.pipeline.replicas.layout import FLAT, TILES
from thinwire.pipeline.replicas.member import InFull, Setting, never
from thinwire.pipeline.replicas.stage_exchange import StageExchange
from thinwire.pipeline.replicas.statistics import Statistics
from thinwire.pipeline.saving.state import module_of, trained
from thinwire.pipeline.stages.compressed_stage import CompressedStage
from thinwire.pipeline.wire.channel import AS_IT_IS
from thinwire.pipeline.wire.handshake import differences


@dataclass(frozen=True)
class Replicas:
    """The replicas of the stages of this process.

    Args:
        options: how many there are in the whole run, and when they exchange.
        here: those whose passes this process runs.
        exchanges: that of each stage; none with one replica.
        statistics: of the batch norms of the stages; none with one replica.
    """

    options: ReplicaOptions = field(default_factory=ReplicaOptions)
    here: range = range(1)
    exchanges: Mapping[int, StageExchange] = field(default_factory=dict)
    statistics: Statistics = field(default_factory=Statistics)

    @property
    def count(self) -> int:
        """Replicas of the whole run."""
        return self.options.count

    def state_dict(self, stage: int) -> dict[str, Tensor]:
        """Copies of what the exchange of a stage remembers."""
        return self.exchanges[stage].state_dict() if stage in self.exchanges else {}

    def load_state_dict(self, stage: int, state: Mapping[str, Tensor]) -> None:
        """Take exactly what `state_dict` returned. CheckpointError if something is missing."""
        if stage in self.exchanges:
            self.exchanges[stage].load_state_dict(state)

    def submit(self, replica: int, progress: Progress) -> None:
        """Send what one replica's passes gave its stages. With one replica, gradients stay as they are.

        Its statistics are few bytes, and go first, so they are there with the gradients.
        """
        self.statistics.submit(replica, progress)
        for exchange in self.exchanges.values():
            with exchange.meter.exchanging():
                exchange.submit(replica, progress)

    def add_up(self, progress: Progress) -> None:
        """Give parameters the sums, and batch norms the mean statistics, of all replicas; all here have submitted."""
        self.statistics.average(progress, self.count)
        # in two rounds: the frames of one stage travel while another one computes
        for exchange in self.exchanges.values():
            with exchange.meter.exchanging():
                exchange.add_up(progress)
        for exchange in self.exchanges.values():
            with exchange.meter.exchanging():
                exchange.finish(progress)


def connect(
    stages: Sequence[CompressedStage],
    where: Placement,
    options: ReplicaOptions,
    agreement: Mapping[str, Any],
    in_full: InFull = never,
) -> Replicas:
    """The replicas of these stages, connected; collective over their processes.

    Args:
        agreement: JSON values by name that all replicas must agree on.
        in_full: says whether the gradients of a step go uncompressed.

    Raises:
        MismatchError: the replicas were not started alike.
    """
    count, method = options.count, options.method
    if count == 1:
        return Replicas()
    here = range(where.replica, where.replica + 1) if where.num_replicas > 1 else range(count)
    wire = stages[0].wire
    times = {
        replica: partial(wire.clocks.local, where.counterpart(dist.get_rank(), replica))
        for replica in range(count)
        if replica not in here
    }
    timeout = timedelta(seconds=options.longest_wait(wire.options.timeout))
    # frames are matched by group and tag, so two trainers of one process must not share a group
    links = LaneEnds(here, collectives.another_across(where, timeout), where.num_stages, timeout, times)
    parts = {stage.stage_index: (trained(stage), running_statistics(module_of(stage))) for stage in stages}
    shapes = {
        f"shapes of stage {stage}": [[name, *each.shape] for those in both for name, each in those.items()]
        for stage, both in parts.items()
    }
    _compare(where, {**agreement, **shapes, "gradients of replicas": str(method), "checksum": wire.options.checksum})
    settings = {
        stage.stage_index: Setting(
            stage=stage.stage_index,
            replicas=count,
            here=here,
            to_all=options.step_alone,
            links=links,
            everyone=partial(collectives.everyone_across, where),
            method=method,
            seed=wire.seed,
            options=wire.options,
            meter=stage.meter,
            layout=TILES if options.step_alone else FLAT,
            carries=OUTER_GRADIENTS if options.step_alone else GRADIENTS,
            in_full=in_full,
        )
        for stage in stages
    }
    exchanges = {stage: StageExchange(weights, settings[stage]) for stage, (weights, _) in parts.items()}

    def make(stage: int, carriers: Mapping[str, Parameter]) -> StageExchange:
        """The exchange of the statistics of a stage; its buckets have numbers behind those of the weights."""
        plain = replace(
            settings[stage],
            to_all=True,
            everyone=lambda mine: [mine],  # all statistics are there in each step, so nobody asks the others which
            method=AS_IT_IS,
            in_full=never,
            layout=FLAT,
            channels=("statistics", "sums"),
            carries=STATISTICS,
        )
        return StageExchange(carriers, plain, exchanges[stage].next_bucket)

    statistics = Statistics({stage: found for stage, (_, found) in parts.items()}, here, make)
    return Replicas(options, here, exchanges, statistics)


def _compare(where: Placement, mine: Mapping[str, Any]) -> None:
    """Raise MismatchError, with every difference, unless all replicas have the values of the first."""
    told = collectives.everyone_across(where, mine)
    for replica, theirs in enumerate(told):
        if found := differences(told[0], theirs):
            lines = [f"  {name}: {first!r} in replica 0, {other!r} there" for name, (first, other) in found.items()]
            raise MismatchError(
                f"all replicas must be started alike; replica {replica} differs in:\n" + "\n".join(lines)
            )
