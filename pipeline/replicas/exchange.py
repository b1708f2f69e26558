"""The replicas of the stages of one process, and the sum of their gradients after the passes of a step.

The loss of a step is divided by the valid targets of the whole batch, the samples of all replicas. So the gradient of
the whole batch is the sum of what the replicas have. Every replica ends with the same bits.

In a simulation, one process does the passes of all replicas in turn, on one copy of the weights, as passes of an
accumulated batch. It keeps the gradients of each replica apart, and the frames between them go through memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from thinwire.compress import Method
from thinwire.pipeline.errors import MismatchError
from thinwire.pipeline.handshake import differences
from thinwire.pipeline.process import Placement
from thinwire.pipeline.replicas.division import ROW, divide, num_rows
from thinwire.pipeline.replicas.links import Links
from thinwire.pipeline.replicas.member import Member, Setting
from thinwire.pipeline.stage import CompressedStage


class StageExchange:
    """The exchange of one stage: its gradients as rows, and the members of the replicas in this process.

    Args:
        parameters: those of the stage, in an order that all replicas have.
        setting: what all buckets have in common.
        here: the replicas in this process.
        links: makes the ways of the frames.
    """

    def __init__(self, parameters: Sequence[Parameter], setting: Setting, here: Sequence[int], links: Links) -> None:
        self._parameters = list(parameters)
        self._sizes = [parameter.numel() for parameter in self._parameters]
        self._rows = num_rows(sum(self._sizes))
        buckets = divide(self._rows, setting.replicas)
        self._members = {replica: [Member(setting, replica, bucket, links) for bucket in buckets] for replica in here}
        self._used: set[int] = set()

    def submit(self, replica: int, step: int) -> None:
        """Send the gradients of one replica to the owners, and clear them."""
        rows = torch.zeros(self._rows, ROW)
        for index, (part, parameter) in enumerate(zip(self._parts(rows), self._parameters, strict=True)):
            if parameter.grad is not None:
                part.copy_(parameter.grad.reshape(-1))
                parameter.grad = None
                self._used.add(index)
        for member in self._members[replica]:
            member.send_parts(rows, step)

    def finish(self, step: int) -> None:
        """Give every parameter the sum of all replicas' gradients; one that no replica used stays without."""
        for members in self._members.values():
            for member in members:
                member.send_sum(step)
        rows = torch.zeros(self._rows, ROW)
        for members in self._members.values():
            for member in members:
                member.take(rows, step)
        for index, (part, parameter) in enumerate(zip(self._parts(rows), self._parameters, strict=True)):
            if index in self._used or part.any():
                parameter.grad = part.view_as(parameter)

    def _parts(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The elements of each parameter, without the zeros behind the last one."""
        parts: tuple[Tensor, ...] = rows.view(-1)[: sum(self._sizes)].split(self._sizes)
        return parts


@dataclass(frozen=True)
class Replicas:
    """The replicas of the stages of this process.

    Args:
        count: of the whole run.
        here: those whose passes this process runs.
        exchanges: the exchange of each stage; none with one replica.
    """

    count: int = 1
    here: range = range(1)
    exchanges: Mapping[int, StageExchange] | None = None

    @property
    def before(self) -> int:
        """Replicas before those of this process."""
        return self.here.start

    @property
    def after(self) -> int:
        """Replicas behind those of this process."""
        return self.count - self.here.stop

    def submit(self, replica: int, step: int) -> None:
        """Send what one replica's passes gave its stages. With one replica, gradients stay as they are."""
        for exchange in (self.exchanges or {}).values():
            exchange.submit(replica, step)

    def finish(self, step: int) -> None:
        """Give every parameter the sum over all replicas, after all replicas here have submitted theirs."""
        for exchange in (self.exchanges or {}).values():
            exchange.finish(step)


ALONE = Replicas()


def connect(
    stages: Sequence[CompressedStage], where: Placement, count: int, method: Method, agreement: Mapping[str, Any]
) -> Replicas:
    """The replicas of these stages, connected; collective over their processes.

    Args:
        stages: the stages of this process.
        where: where they live.
        count: the number of replicas.
        method: what the gradients go through.
        agreement: JSON values by name that all replicas must agree on.

    Raises:
        MismatchError: the replicas were not started alike.
    """
    if count == 1:
        return ALONE
    here = range(where.replica, where.replica + 1) if where.num_replicas > 1 else range(count)
    wire = stages[0].wire
    links = Links(here, where.across, where.num_stages, timedelta(seconds=wire.options.timeout))
    parameters = {
        stage.stage_index: [each for each in stage.submod.parameters() if each.requires_grad] for stage in stages
    }
    shapes = {f"shapes of stage {stage}": [list(each.shape) for each in those] for stage, those in parameters.items()}
    _compare(where, {**agreement, **shapes, "gradients of replicas": str(method), "checksum": wire.options.checksum})
    exchanges = {
        stage.stage_index: StageExchange(
            parameters[stage.stage_index],
            Setting(
                stage=stage.stage_index,
                replicas=count,
                method=method,
                seed=wire.seed,
                options=wire.options,
                meter=stage.meter,
            ),
            here,
            links,
        )
        for stage in stages
    }
    return Replicas(count, here, exchanges)


def _compare(where: Placement, mine: Mapping[str, Any]) -> None:
    """Raise MismatchError, with every difference, unless all replicas have the values of the first."""
    told = where.everyone_across(mine)
    for replica, theirs in enumerate(told):
        if found := differences(told[0], theirs):
            lines = [f"  {name}: {first!r} in replica 0, {other!r} there" for name, (first, other) in found.items()]
            raise MismatchError(
                f"all replicas must be started alike; replica {replica} differs in:\n" + "\n".join(lines)
            )
