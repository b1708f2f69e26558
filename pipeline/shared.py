"""Weights that several stages hold, such as DeBERTa's relative embeddings. A common gradient keeps the copies equal.

All blocks read these weights, so each stage holds a copy. After the backward, the gradients of the copies are summed
from the last stage to the first, and the sum goes back the same way. The order depends only on the stages, so the
placement of stages does not change the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from thinwire.pipeline.measuring.meters import Meter, Traffic, count
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.processes.collectives import Kind
from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.processes.transport import reaching


@dataclass(frozen=True)
class SharedWeights:
    """The shared parameters of one set of stages, as one process sees them.

    Args:
        holders: the stages that hold copies, in stage order.
        parameters: this process's copies, of one dtype: stage -> the same parameters in the same order.
        meters: the meters of those stages.
        placement: where all stages live.
        simulated: where they would live, if a simulation has them all in one process; it counts what would be sent.
    """

    holders: Sequence[int]
    parameters: Mapping[int, Sequence[Parameter]]
    meters: Mapping[int, Meter]
    placement: Placement
    simulated: Placement | None = None

    def copies_of(self, parameter: Parameter) -> int:
        """The number of stages that hold a parameter of this process."""
        held = any(parameter is copy for copies in self.parameters.values() for copy in copies)
        return len(self.holders) if held else 1

    def sum_gradients(self, replicas: int = 1) -> None:
        """Give every copy the sum of all copies' gradients. Collective over the processes of the holders.

        `replicas` is how many a simulation does it for at once: each would do it for itself.
        """
        if not self.parameters:
            return
        # every process goes through the same pairs of stages in the same order, so no two wait for each other
        # 1. last to first: each holder adds its own, in stage order
        total = None
        for later, stage in pairwise([None, *reversed(self.holders)]):
            assert stage is not None
            received = self._pass_on(total, later, stage, replicas)
            if stage in self.parameters:
                mine = _flat([_gradient(parameter) for parameter in self.parameters[stage]])
                total = mine if received is None else received.to(mine.device) + mine
        # 2. first to last: the first holder has the sum of all, and hands it on unchanged
        for earlier, stage in pairwise([None, *self.holders]):
            assert stage is not None
            received = self._pass_on(total, earlier, stage, replicas)
            if stage in self.parameters:
                total = total if received is None else received
                assert total is not None
                _spread(total, self.parameters[stage])

    def average_gradients(self, replicas: int = 1) -> None:
        """Give every copy the mean of all copies' gradients; else as `sum_gradients`."""
        self.sum_gradients(replicas)
        for parameters in self.parameters.values():
            for parameter in parameters:
                assert parameter.grad is not None, "it has the sum"
                parameter.grad /= len(self.holders)

    def _pass_on(self, total: Tensor | None, source: int | None, destination: int, replicas: int) -> Tensor | None:
        """Move a sum from one holder to the next. The sum in the process of the destination, None elsewhere."""
        if source is None:
            return None
        sender, receiver, here = *(self.placement.process_of[stage] for stage in (source, destination)), dist.get_rank()
        if sender == receiver:
            if self.simulated is not None and total is not None:
                process_of = self.simulated.process_of
                for _ in range(replicas if process_of[source] != process_of[destination] else 0):
                    self._count(total, source, destination)
            return total if here == receiver else None
        what = f"the shared weights' gradients between stages {source} and {destination}"
        if here == sender:
            assert total is not None
            with self.meters[source].section("wait", f"sending {what}"), reaching(f"sending {what}"):
                collectives.send(Kind.SHARED, total.cpu().view(torch.uint8), receiver)
            self._count(total, source, destination)
        if here != receiver:
            return None
        copies = self.parameters[destination]
        nbytes = sum(copy.nbytes for copy in copies)
        with self.meters[destination].section("wait", f"waiting for {what}"), reaching(f"waiting for {what}"):
            return collectives.receive(Kind.SHARED, nbytes, sender).view(copies[0].dtype)

    def _count(self, sent: Tensor, source: int, destination: int) -> None:
        nbytes = sent.numel() * sent.element_size()
        traffic = Traffic(frames=1, bytes=nbytes, uncompressed=nbytes)
        count(self.meters[source].sent, (min(source, destination), "shared weights", "train"), traffic)


def _gradient(parameter: Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _spread(flat: Tensor, parameters: Sequence[Parameter]) -> None:
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter).to(parameter.device, copy=True)
