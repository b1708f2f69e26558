"""The running statistics of batch norms: each replica has those of its own samples, and all take their mean.

    s        the common statistics, equal in all replicas
    s_i      those of replica i, which its passes update; sent with its weights or gradients
    s        the mean of all s_i that were sent;  all s_i <- s

The mean is taken with each exchange of the weights, and each replica counts alike. Statistics travel uncompressed, and
every replica adds up for itself, so they arrive together with the gradients. The modules hold s, except while the
passes of a replica run: statistics are what evaluations and saved weights need, and in training no module reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import Parameter

from thinwire.compress import Progress
from thinwire.pipeline.devices.device import copy_to_host
from thinwire.pipeline.errors import CheckpointError
from thinwire.pipeline.replicas.stage_exchange import StageExchange
from thinwire.pipeline.saving.checkpoint_folder import SavedStage

MakeExchange = Callable[[int, Mapping[str, Parameter]], StageExchange]


class Statistics:
    """The running statistics of the stages of this process; of models without batch norms there are none.

    Args:
        buffers: those of each stage's modules by name; they hold the common statistics. None without replicas.
        here: the replicas in this process.
        make: makes the exchange that adds up those of a stage, as if they were gradients.
    """

    def __init__(
        self,
        buffers: Mapping[int, Mapping[str, Tensor]] = MappingProxyType({}),
        here: Collection[int] = range(1),
        make: MakeExchange | None = None,
    ) -> None:
        self._buffers = {(stage, name): each for stage, found in buffers.items() for name, each in found.items()}
        self._common = {key: each.data for key, each in self._buffers.items()}
        self._own = {replica: {key: each.clone() for key, each in self._common.items()} for replica in here}
        # what travels is float32: a count of micro-batches too, which is exact up to 16 million of them
        travelling = {key: torch.empty_like(each, dtype=torch.float32) for key, each in self._common.items()}
        self._carriers = {key: Parameter(each, requires_grad=False) for key, each in travelling.items()}
        self._exchanges = [
            make(stage, {name: self._carriers[stage, name] for name in found})
            for stage, found in buffers.items()
            if found and make is not None
        ]

    def use(self, replica: int | None) -> None:
        """Give the modules the statistics of a replica, or with None the common ones."""
        for key, held in (self._common if replica is None else self._own[replica]).items():
            self._buffers[key].data = held

    def enter(self, replica: int) -> None:
        """Before the passes of a replica in a step with an exchange: it goes on from the common statistics."""
        self._adopt(replica)
        self.use(replica)

    def submit(self, replica: int, progress: Progress) -> None:
        """Send the statistics of one replica."""
        for key, own in self._own[replica].items():
            self._carriers[key].grad = own.to(torch.float32, copy=True)
        for exchange in self._exchanges:
            with exchange.meter.exchanging():
                exchange.submit(replica, progress)

    def average(self, progress: Progress, weight: int) -> None:
        """Give all replicas here the mean: the sum of what was submitted, over `weight`; collective."""
        for exchange in self._exchanges:
            with exchange.meter.exchanging():
                exchange.finish(progress)  # every replica adds up for itself
        for key, common in self._common.items():
            total, self._carriers[key].grad = self._carriers[key].grad, None
            assert total is not None, "every replica has sent its statistics"
            mean = total / weight
            common.copy_(mean if common.is_floating_point() else mean.round())
        for replica in self._own:
            self._adopt(replica)

    def _adopt(self, replica: int) -> None:
        """Give a replica the common statistics."""
        for key, own in self._own[replica].items():
            own.copy_(self._common[key])

    def state_dict(self, stage: int) -> dict[str, Tensor]:
        """Copies of the statistics of each replica here in a stage, statistics/REPLICA/NAME."""
        return {
            f"statistics/{replica}/{name}": copy_to_host(each)
            for replica, own in self._own.items()
            for (of, name), each in own.items()
            if of == stage
        }

    def load_state_dict(self, stage: int, saved: Sequence[SavedStage]) -> None:
        """Take the statistics of the replicas here from the parts of any cut. CheckpointError without."""
        for replica, everywhere in self._own.items():
            own = {name: each for (of, name), each in everywhere.items() if of == stage}
            found: dict[str, Tensor] = {}
            for part in saved if own else ():
                found |= part.tensors(f"replicas/statistics/{replica}/", own)
            if missing := [name for name in own if name not in found]:
                raise CheckpointError(f"the checkpoint has no statistics of replica {replica}: {missing[0]}")
            for name, each in own.items():
                each.copy_(found[name])
