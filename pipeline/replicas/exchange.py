"""The replicas of the stages of one process, and the sum of their gradients after the passes of a step.

The loss of a step is divided by the valid targets of the whole batch, the samples of all replicas. So the gradient of
the whole batch is the sum of what the replicas have. Every replica ends with the same bits.

In a simulation, one process does the passes of all replicas in turn, on one copy of the weights, as passes of an
accumulated batch. It keeps the gradients of each replica apart, and the frames between them go through memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from thinwire.compress import Method, Progress, parse
from thinwire.compress.stores.store import Store
from thinwire.pipeline.ends import StageEnds
from thinwire.pipeline.errors import CheckpointError, MismatchError
from thinwire.pipeline.handshake import differences
from thinwire.pipeline.options import ReplicaOptions
from thinwire.pipeline.options.powersgd import PowerSGD
from thinwire.pipeline.process import Placement
from thinwire.pipeline.replicas.division import BUCKET, Bucket, divide
from thinwire.pipeline.replicas.ends import LaneEnds
from thinwire.pipeline.replicas.groups import divide_layers
from thinwire.pipeline.replicas.lane import GRADIENTS, OUTER_GRADIENTS
from thinwire.pipeline.replicas.layout import FLAT, TILES, StageRows
from thinwire.pipeline.replicas.member import BucketMember, BucketSide, InFull, Lanes, Listener, Setting, never
from thinwire.pipeline.replicas.powersgd import PowerExchange
from thinwire.pipeline.replicas.protocol import Exchange
from thinwire.pipeline.stage import CompressedStage

Everyone = Callable[[Sequence[float]], Sequence[float]]
"""Gives the numbers of this stage in each process that has it, those of one process behind the other; collective."""
IN_FULL = parse("none")


class StageExchange:
    """The exchange of one stage: its gradients as rows, and the members of the replicas in this process.

    Args:
        parameters: those of the stage by name, in an order that all replicas have.
        setting: what all buckets have in common.
        here: the replicas in this process.
        links: makes the ways of the frames.
        member: what each replica is in the exchange of a bucket.
        everyone: gives the numbers of this stage in each process that has it; collective.
        first_bucket: the number of its first bucket; another exchange of the stage may have those before.

    Attributes:
        parameters: those whose gradients it adds up.
        next_bucket: the number behind its last bucket.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        setting: Setting,
        here: Sequence[int],
        links: LaneEnds,
        member: Callable[[Lanes, Bucket], BucketSide],
        everyone: Everyone,
        first_bucket: int = 0,
    ) -> None:
        self.parameters: Sequence[Parameter] = list(parameters.values())
        self._rows = StageRows({name: parameter.shape for name, parameter in parameters.items()}, setting.layout)
        buckets = divide(self._rows.count, setting.replicas, BUCKET // setting.layout.row, first_bucket)
        self.next_bucket = first_bucket + len(buckets)
        self._buckets = buckets
        self._longest = max((len(bucket.rows) for bucket in buckets), default=0)
        self._given: Sequence[Tensor | None] = []
        self._members = {
            replica: [member(Lanes(setting, replica, bucket.index, links), bucket) for bucket in buckets]
            for replica in here
        }
        self._has_owners = member is not Listener
        self._everyone = everyone
        self.meter = setting.meter
        # by parameter: had a gradient here in this step; had one in any replica in any step, the same in all replicas
        self._seen = torch.zeros(len(self.parameters), dtype=torch.bool)
        self._used = torch.zeros(len(self.parameters), dtype=torch.bool)
        self._keeps_errors = setting.method.feedback is not None

    def submit(self, replica: int, progress: Progress) -> None:
        """Send the gradients of one replica, and clear them."""
        gradients = [parameter.grad for parameter in self.parameters]
        if not self._used.all():
            seen = [gradient is not None for gradient in gradients]
            self._seen |= torch.tensor(seen, dtype=torch.bool)
        for parameter in self.parameters:
            parameter.grad = None
        flat, scratch = self._rows.flat(gradients), self._scratch()
        for bucket, member in zip(self._buckets, self._members[replica], strict=True):
            rows = self._rows.window(flat, bucket.rows)
            if rows is None:
                rows = scratch[: len(bucket.rows)]
                self._rows.gather(flat, bucket.rows, rows)
            member.send_parts(rows, progress)
        # the sums take their place: new memory is as slow as a copy
        self._given = gradients

    @property
    def rounds(self) -> tuple[Callable[[Progress], None], ...]:
        """What follows once all replicas here have submitted."""
        return (self.add_up, self.finish) if self._has_owners else (self.finish,)

    def add_up(self, progress: Progress) -> None:
        """Add up the parts that the replicas here own, and send the sums to all."""
        for members in self._members.values():
            for member in members:
                member.send_sum(progress)

    def finish(self, progress: Progress) -> None:
        """Give every parameter the sum of all replicas' gradients; collective.

        One that no replica has used so far has none. What arrived does not say that: a codec without a point at zero
        makes something of zeros.
        """
        self._learn_used()
        room, scratch, self._given = self._rows.room(self._given), self._scratch(), []
        for index, bucket in enumerate(self._buckets):
            window = self._rows.window(room, bucket.rows)
            rows = scratch[: len(bucket.rows)] if window is None else window
            for members in self._members.values():
                members[index].take(rows, progress)
            if window is None:
                self._rows.scatter(rows, bucket.rows, room)
        for used, total, parameter in zip(self._used.tolist(), self._rows.read(room), self.parameters, strict=True):
            if used:
                parameter.grad = total.to(parameter.device)

    def _scratch(self) -> Tensor:
        """Memory for the rows of a bucket that has pieces of several tensors."""
        return torch.empty(self._longest, self._rows.layout.row, dtype=torch.float32)

    def _learn_used(self) -> None:
        """Mark the parameters that any replica used in this step; collective, until all of them are marked."""
        # all replicas have marked the same, so all of them ask, or none does
        if not self._used.all():
            told = torch.tensor(self._everyone(self._seen.tolist()))
            self._used |= told.view(-1, len(self._used)).bool().any(0)
            self._seen.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all errors of the replicas here: worker/REPLICA/NAME/FIRST and owner/NAME/FIRST; and `used`.

        Errors are float32 [elements]: those of a parameter from the first one on, in the order of the layout. An error
        of an owner belongs to the elements, whichever replica owns them. `used` is bool [parameters]: whether any
        replica has used them so far.
        """
        errors = {
            f"{prefix}/{name}": values[piece].clone()
            for prefix, rows, store in self._errors()
            for values in [store.read(_every_slot(store)).view(-1)]
            for name, piece in self._rows.pieces(rows)
        }
        return {"used": self._used.clone(), **errors}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take exactly what `state_dict` returned. CheckpointError if something is missing."""
        if "used" not in state or state["used"].shape != self._used.shape:
            raise CheckpointError("the checkpoint does not say which parameters of this stage its replicas have used")
        self._used.copy_(state["used"])
        for prefix, rows, store in self._errors():
            pieces = [f"{prefix}/{name}" for name, _ in self._rows.pieces(rows)]
            if missing := [name for name in pieces if name not in state]:
                raise CheckpointError(f"the checkpoint has no errors of gradients between replicas {missing[0]}")
            values = torch.cat([state[name] for name in pieces])
            store.write(_every_slot(store), values.view(-1, *store.layout.row_shape))

    def _errors(self) -> Iterator[tuple[str, range, Store]]:
        """Where each error belongs, its rows, and its store."""
        for replica, members in self._members.items() if self._keeps_errors else ():
            for member in members:
                yield from ((f"worker/{replica}", rows, store) for rows, store in member.errors("parts"))
                yield from (("owner", rows, store) for rows, store in member.errors("sums"))


def _every_slot(store: Store) -> Tensor:
    return torch.arange(store.layout.num_slots)


@dataclass(frozen=True)
class Replicas:
    """The replicas of the stages of this process.

    Args:
        options: how many there are in the whole run, and when they exchange.
        here: those whose passes this process runs.
        exchanges: those of each stage, one of each group of its layers; none with one replica.
    """

    options: ReplicaOptions = field(default_factory=ReplicaOptions)
    here: range = range(1)
    exchanges: Mapping[int, Sequence[Exchange]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Replicas of the whole run."""
        return self.options.count

    @property
    def weight(self) -> int:
        """What sums over all replicas are divided by to be means."""
        return self.count

    def state_dict(self, stage: int) -> dict[str, Tensor]:
        """Copies of what the exchanges of a stage remember."""
        exchanges = self.exchanges.get(stage, ())
        return {
            prefix + name: each
            for prefix, exchange in zip(_prefixes(exchanges), exchanges, strict=True)
            for name, each in exchange.state_dict().items()
        }

    def load_state_dict(self, stage: int, state: Mapping[str, Tensor]) -> None:
        """Take exactly what `state_dict` returned. CheckpointError if something is missing."""
        exchanges = self.exchanges.get(stage, ())
        for prefix, exchange in zip(_prefixes(exchanges), exchanges, strict=True):
            own = {name[len(prefix) :]: each for name, each in state.items() if name.startswith(prefix)}
            exchange.load_state_dict(own)

    def submit(self, replica: int, progress: Progress, group: int = 0) -> None:
        """Send what one replica's passes gave its stages. With one replica, gradients stay as they are."""
        for exchange in self._of(group):
            with exchange.meter.exchanging():
                exchange.submit(replica, progress)

    def rounds(self, progress: Progress, group: int = 0) -> list[Callable[[], None]]:
        """What follows, in order, once all replicas here have submitted.

        After the last, every parameter of the group has the sum over all replicas.
        """
        exchanges = self._of(group)
        # round by round: the frames of one stage travel while another one computes
        rounds = list(zip(*(exchange.rounds for exchange in exchanges), strict=True))
        return [
            partial(self._go_on, list(zip(exchanges, together, strict=True)), progress, ends=together is rounds[-1])
            for together in rounds
        ]

    def finish(self, progress: Progress) -> None:
        """Give every parameter the sum over all replicas, after all replicas here have submitted theirs."""
        for go_on in self.rounds(progress):
            go_on()

    def leave(self, group: int) -> None:
        """Go on with the exchange of a group in a later step: what lies between is hidden behind that step."""
        for exchange in self._of(group):
            exchange.meter.leave_exchange()

    def _of(self, group: int) -> list[Exchange]:
        """The exchange of a group in each stage."""
        return [exchanges[group] for exchanges in self.exchanges.values()]

    def _go_on(
        self, together: Sequence[tuple[Exchange, Callable[[Progress], None]]], progress: Progress, *, ends: bool
    ) -> None:
        """One round of each stage."""
        for exchange, go_on in together:
            with exchange.meter.exchanging(ends=ends):
                go_on(progress)


ALONE = Replicas()


def _prefixes(exchanges: Sequence[Exchange]) -> list[str]:
    """What the names of the state of each group begin with; nothing if there is one group."""
    return [f"groups/{group}/" for group in range(len(exchanges))] if len(exchanges) > 1 else [""] * len(exchanges)


def connect(
    stages: Sequence[CompressedStage],
    where: Placement,
    options: ReplicaOptions,
    agreement: Mapping[str, Any],
    in_full: InFull = never,
) -> Replicas:
    """The replicas of these stages, connected; collective over their processes.

    Args:
        stages: the stages of this process.
        where: where they live.
        options: how many replicas there are, and what they send each other.
        agreement: JSON values by name that all replicas must agree on.
        in_full: says whether the gradients of a step go uncompressed.

    Raises:
        MismatchError: the replicas were not started alike.
    """
    count, method = options.count, options.method
    if count == 1:
        return ALONE
    here = range(where.replica, where.replica + 1) if where.num_replicas > 1 else range(count)
    wire = stages[0].wire
    times = {
        replica: partial(wire.clocks.local, where.counterpart(dist.get_rank(), replica))
        for replica in range(count)
        if replica not in here
    }
    timeout = timedelta(seconds=options.longest_wait(wire.options.timeout))
    # frames are matched by group and tag, so two trainers of one process must not share a group
    links = LaneEnds(here, where.another_across(timeout), where.num_stages, timeout, times)
    if len(here) > 1:
        _give_wires(stages, options)
    groups = {stage.stage_index: divide_layers(stage.submod, options.groups) for stage in stages}
    shapes = {
        f"shapes of stage {stage}": [[name, *each.shape] for those in groups[stage] for name, each in those.items()]
        for stage in groups
    }
    _compare(where, {**agreement, **shapes, "gradients of replicas": str(method), "checksum": wire.options.checksum})
    member = _MEMBERS[options.sync.sums if options.step_alone else "owner"]
    make = partial(StageExchange, here=here, links=links, member=member, everyone=where.gather_across)
    exchanges = {
        stage.stage_index: _in_turn(
            groups[stage.stage_index],
            partial(make_exchange, setting=_setting(stage, options, in_full), method=method, here=here, make=make),
        )
        for stage in stages
    }
    return Replicas(options, here, exchanges)


def _setting(stage: CompressedStage, options: ReplicaOptions, in_full: InFull) -> Setting:
    """What all buckets of a stage have in common."""
    return Setting(
        stage=stage.stage_index,
        replicas=options.count,
        method=IN_FULL if isinstance(options.method, PowerSGD) else options.method,
        seed=stage.wire.seed,
        options=stage.wire.options,
        meter=stage.meter,
        layout=TILES if options.step_alone else FLAT,
        carries=OUTER_GRADIENTS if options.step_alone else GRADIENTS,
        in_full=in_full,
    )


_MEMBERS: Mapping[str, Callable[[Lanes, Bucket], BucketSide]] = {"owner": BucketMember, "all": Listener}


def make_exchange(
    parameters: Mapping[str, Parameter],
    setting: Setting,
    method: Method | PowerSGD,
    here: Sequence[int],
    make: Callable[..., StageExchange],
    first_bucket: int = 0,
) -> Exchange:
    """An exchange through a method; `make` makes one from parameters, a setting, and the number of its first bucket."""
    if isinstance(method, PowerSGD):
        return PowerExchange(parameters, method, setting, here, make, first_bucket)
    return make(parameters, setting, first_bucket=first_bucket)


def _in_turn(groups: Sequence[Mapping[str, Parameter]], make: Callable[..., Exchange]) -> list[Exchange]:
    """The exchange of each group, whose buckets have numbers behind those of the group before."""
    exchanges: list[Exchange] = []
    for parameters in groups:
        first = exchanges[-1].next_bucket if exchanges else 0
        exchanges.append(make(parameters, first_bucket=first))
    return exchanges


def _give_wires(stages: Sequence[CompressedStage], options: ReplicaOptions) -> None:
    """Give each replica with codecs of its own a wire between all stages, which are in this process."""
    wire = stages[0].wire
    for replica in sorted(options.overrides):
        codecs = options.codecs(replica, wire.compression)
        if codecs == wire.compression:  # it has passes of its own alone
            continue
        own = wire.beside(codecs, f"replica-{replica}")
        for stage in stages:
            stage.all_ends.own[replica] = (own, StageEnds())


def _compare(where: Placement, mine: Mapping[str, Any]) -> None:
    """Raise MismatchError, with every difference, unless all replicas have the values of the first."""
    told = where.everyone_across(mine)
    for replica, theirs in enumerate(told):
        if found := differences(told[0], theirs):
            lines = [f"  {name}: {first!r} in replica 0, {other!r} there" for name, (first, other) in found.items()]
            raise MismatchError(
                f"all replicas must be started alike; replica {replica} differs in:\n" + "\n".join(lines)
            )
