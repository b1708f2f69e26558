"""The running statistics of batch norms: each replica has those of its own samples, and all take their mean.

    s        the common statistics, equal in all replicas
    s_i      those of replica i, which its passes update; sent with its weights or gradients
    s        the mean of all s_i that were sent;  all s_i <- s

The mean is taken with each exchange of the weights.
Each replica counts alike. Statistics travel uncompressed,
and every replica adds up for itself, so they arrive together with the gradients. The modules hold s, except while the
passes of a replica run: statistics are what evaluations and saved weights need, and in training no module reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from thinwire.compress import Progress
from thinwire.pipeline.devices.device import copy_to_host
from thinwire.pipeline.errors import CheckpointError
from thinwire.pipeline.replicas.stage_exchange import StageExchange
from thinwire.pipeline.saving.checkpoint_folder import SavedStage

MakeExchange = Callable[[Mapping[str, Parameter]], StageExchange]


class StageStatistics:
    """The running statistics of one stage.

    Args:
        buffers: those of its modules by name, not empty; they hold the common statistics.
        here: the replicas in this process.
        make: makes the exchange that adds them up, as if they were gradients.

    Attributes:
        common: the common statistics by name.
    """

    def __init__(self, buffers: Mapping[str, Tensor], here: Collection[int], make: MakeExchange) -> None:
        self._buffers = dict(buffers)
        self.common = {name: buffer.data for name, buffer in buffers.items()}
        self._own = {replica: {name: each.clone() for name, each in self.common.items()} for replica in here}
        # what travels is float32: a count of micro-batches too, which is exact up to 16 million of them
        carriers = {name: torch.empty_like(each, dtype=torch.float32) for name, each in self.common.items()}
        self._carriers = {name: Parameter(each, requires_grad=False) for name, each in carriers.items()}
        self._exchange = make(self._carriers)

    def use(self, replica: int | None) -> None:
        """Give the modules the statistics of a replica, or with None the common ones."""
        for name, held in (self.common if replica is None else self._own[replica]).items():
            self._buffers[name].data = held

    def submit(self, replica: int, progress: Progress) -> None:
        """Send the statistics of one replica."""
        for name, own in self._own[replica].items():
            self._carriers[name].grad = own.to(torch.float32, copy=True)
        with self._exchange.meter.exchanging():
            self._exchange.submit(replica, progress)

    def average(self, progress: Progress, weight: int) -> None:
        """Give all replicas here the mean: the sum of what was submitted, over `weight`; collective."""
        with self._exchange.meter.exchanging():
            self._exchange.finish(progress)  # every replica adds up for itself
        for name, common in self.common.items():
            total, self._carriers[name].grad = self._carriers[name].grad, None
            assert total is not None, "every replica has sent its statistics"
            mean = total / weight
            common.copy_(mean if common.is_floating_point() else mean.round())
        for replica in self._own:
            self.adopt(replica)

    def adopt(self, replica: int) -> None:
        """Give a replica the common statistics."""
        for name, own in self._own[replica].items():
            own.copy_(self.common[name])

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the statistics of each replica here, statistics/REPLICA/NAME."""
        return {
            f"statistics/{replica}/{name}": copy_to_host(each)
            for replica, own in self._own.items()
            for name, each in own.items()
        }

    def load_state_dict(self, saved: Sequence[SavedStage]) -> None:
        """Take the statistics of the replicas here from the parts of any cut. CheckpointError without."""
        for replica, own in self._own.items():
            found: dict[str, Tensor] = {}
            for part in saved:
                found |= part.tensors(f"replicas/statistics/{replica}/", own)
            if missing := [name for name in own if name not in found]:
                raise CheckpointError(f"the checkpoint has no statistics of replica {replica}: {missing[0]}")
            for name, each in own.items():
                each.copy_(found[name])


@dataclass(frozen=True)
class Statistics:
    """The running statistics of the stages of this process, by stage; of models without batch norms there are none."""

    stages: Mapping[int, StageStatistics] = field(default_factory=dict)

    def use(self, replica: int | None) -> None:
        """Give the modules the statistics of a replica, or with None the common ones."""
        for each in self.stages.values():
            each.use(replica)

    def enter(self, replica: int) -> None:
        """Before the passes of a replica in a step with an exchange: it goes on from the common statistics."""
        for each in self.stages.values():
            each.adopt(replica)
        self.use(replica)

    def submit(self, replica: int, progress: Progress) -> None:
        """Send the statistics of one replica."""
        for each in self.stages.values():
            each.submit(replica, progress)

    def average(self, progress: Progress, weight: int) -> None:
        """Give all replicas here the mean: the sum of what was submitted, over `weight`; collective."""
        for each in self.stages.values():
            each.average(progress, weight)

    def state_dict(self, stage: int) -> dict[str, Tensor]:
        """Copies of the statistics of each replica here in a stage."""
        return self.stages[stage].state_dict() if stage in self.stages else {}

    def load_state_dict(self, stage: int, saved: Sequence[SavedStage]) -> None:
        """Take the statistics of the replicas here from the parts of any cut. CheckpointError without."""
        if stage in self.stages:
            self.stages[stage].load_state_dict(saved)
