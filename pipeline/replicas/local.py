"""Replicas that step alone between two exchanges: their own weights, and the outer optimizer of the common weights.

    x        the common weights: those after the last exchange, equal in all replicas
    x_i      the weights of replica i; after H optimizer steps of its own:
    d_i      x - x_i, what it moved, is exchanged as its outer gradient
    d        the mean of all d_i, as they arrived, each weighted by the samples of its replica
    M        b M + d, the momentum of the outer optimizer
    x        x - lr (b M + d)
    x_i      a x_i + (1 - a) x

This is DiLoCo (2311.08105), which has a = 0: then all x_i are x. With lr 1 and b 0 the replicas take the mean of their
weights.

Streaming DiLoCo (2501.18512, Algorithm 2) exchanges groups of layers in turn (see groups.py), and trains on while d_i
travels: sent after step t, d moves x and x_i after step t + tau (`overlap`). Only one group travels at a time.

The modules of the stages hold x, except while the passes of a replica run. So evaluations and saved weights are those
of the last exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from thinwire.compress import Progress
from thinwire.pipeline.checkpoint_folder import SavedStage
from thinwire.pipeline.devices.device import copy_to_host
from thinwire.pipeline.errors import CheckpointError, WireError
from thinwire.pipeline.options import SyncOptions
from thinwire.pipeline.replicas.exchange import Replicas
from thinwire.pipeline.replicas.groups import due
from thinwire.pipeline.replicas.shares import evenly
from thinwire.pipeline.shared import SharedWeights
from thinwire.pipeline.stage import CompressedStage
from thinwire.pipeline.state import beside, parameters_of

MakeOptimizer = Callable[[Iterable[Parameter]], Optimizer]


class StageCopies:
    """The weights of one stage: the common ones, and those of each replica in this process.

    Args:
        parameters: those that the stage trains, by all their names; they hold the common weights.
        here: the replicas in this process.
        make_optimizer: makes the optimizer of a replica.
        sync: the outer optimizer.
    """

    def __init__(
        self, parameters: Mapping[str, Parameter], here: Iterable[int], make_optimizer: MakeOptimizer, sync: SyncOptions
    ) -> None:
        self._parameters = list({id(parameter): parameter for parameter in parameters.values()}.values())
        places = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        self._places = {name: places[id(parameter)] for name, parameter in parameters.items()}
        self._common = [parameter.data for parameter in self._parameters]
        self._alpha = sync.alpha
        self._own = {replica: [weights.clone() for weights in self._common] for replica in here}
        self.optimizers = {replica: make_optimizer(self._parameters) for replica in here}
        group = [{"params": self._parameters}]  # torch refuses an empty list of parameters, and takes an empty group
        self.outer = SGD(group, lr=sync.lr, momentum=sync.momentum, nesterov=sync.momentum > 0)

    def use(self, replica: int | None) -> None:
        """Give the parameters the weights of a replica, or with None the common ones."""
        for parameter, weights in zip(
            self._parameters, self._common if replica is None else self._own[replica], strict=True
        ):
            parameter.data = weights

    def put_moves(self, replica: int, group: Sequence[Parameter], weight: float) -> None:
        """Set the gradients of a group to `weight` times what a replica moved its weights by: common minus its own."""
        for place in self._places_of(group):
            self._parameters[place].grad = (self._common[place] - self._own[replica][place]).mul_(weight)

    def take(self) -> dict[str, Tensor]:
        """The gradients by the names of parameters; they are cleared."""
        found = {name: self._parameters[place].grad for name, place in self._places.items()}
        self.outer.zero_grad()
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def average(self, totals: Mapping[str, Tensor], count: int) -> None:
        """Set the gradients to means, from sums over `count` replicas."""
        for name, total in totals.items():
            parameter = self._parameters[self._places[name]]
            parameter.grad = (total / count).to(parameter.device)  # from a checkpoint it comes to the host

    def adopt(self, group: Sequence[Parameter]) -> None:
        """Give every replica the common weights of a group, but for the share of its own that it keeps."""
        for own in self._own.values():
            for place in self._places_of(group):
                if self._alpha:
                    own[place].mul_(self._alpha).add_(self._common[place] * (1 - self._alpha))
                else:
                    own[place].copy_(self._common[place])

    def _places_of(self, group: Sequence[Parameter]) -> list[int]:
        members = {id(parameter) for parameter in group}
        return [place for place, parameter in enumerate(self._parameters) if id(parameter) in members]

    def common_state(self) -> dict[str, Tensor]:
        """Copies of the common weights and of the momentum of the outer optimizer, PLACE/weights and PLACE/momentum."""
        weights = {f"{place}/weights": copy_to_host(each) for place, each in enumerate(self._common)}
        kept = [self.outer.state.get(parameter, {}).get("momentum_buffer") for parameter in self._parameters]
        return weights | {
            f"{place}/momentum": copy_to_host(each) for place, each in enumerate(kept) if each is not None
        }

    def take_common(self, state: Mapping[str, Tensor]) -> None:
        """Take what `common_state` returned in another replica, and give the weights to the replicas here.

        WireError if it is not of these parameters: then nothing is taken.
        """
        for place, common in enumerate(self._common):
            for kind in ("weights", "momentum"):
                given = state.get(f"{place}/{kind}", common if kind == "momentum" else None)
                if given is None or given.shape != common.shape or given.dtype != common.dtype:
                    got = "none" if given is None else f"{given.dtype} {list(given.shape)}"
                    wanted = f"{common.dtype} {list(common.shape)}"
                    raise WireError(f"the {kind} of parameter {place} must be {wanted}, got {got}")
        for place, (parameter, common) in enumerate(zip(self._parameters, self._common, strict=True)):
            common.copy_(state[f"{place}/weights"])
            if (momentum := state.get(f"{place}/momentum")) is not None:
                self.outer.state[parameter]["momentum_buffer"] = momentum.to(parameter.device)
        for own in self._own.values():
            for weights, common in zip(own, self._common, strict=True):
                weights.copy_(common)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the weights of each replica, own/REPLICA/NAME, and of its optimizer, inner/REPLICA/NAME/KEY."""
        own = {
            f"own/{replica}/{name}": copy_to_host(weights[place])
            for replica, weights in self._own.items()
            for name, place in self._places.items()
        }
        inner = {
            f"inner/{replica}/{name}/{key}": copy_to_host(value)
            for replica, optimizer in self.optimizers.items()
            for name, place in self._places.items()
            for key, value in optimizer.state.get(self._parameters[place], {}).items()
            if isinstance(value, Tensor)
        }
        return own | inner

    def load_state_dict(self, saved: Sequence[SavedStage]) -> None:
        """Take the weights and optimizers of the replicas here from the parts of any cut. CheckpointError without."""
        for replica, own in self._own.items():
            weights: dict[str, Tensor] = {}
            for part in saved:
                weights |= part.tensors(f"replicas/own/{replica}/", self._places)
            if missing := [name for name in self._places if name not in weights]:
                raise CheckpointError(
                    f"the checkpoint has no weights of replica {replica}: {missing[0]}; one of thinwire train with "
                    f"replicas.membership elastic is of one replica, so go on with thinwire train"
                )
            kept: dict[str, dict[str, Tensor]] = {}
            for path, value in self._inner(saved, f"replicas/inner/{replica}/"):
                name, _, key = path.rpartition("/")
                kept.setdefault(name, {})[key] = beside(self._parameters[self._places[name]], key, value)
            for name, place in self._places.items():
                own[place].copy_(weights[name])
                if name in kept:
                    self.optimizers[replica].state[self._parameters[place]] = kept[name]

    def _inner(self, saved: Sequence[SavedStage], prefix: str) -> Iterator[tuple[str, Tensor]]:
        """What the optimizer of a replica keeps for the parameters of this stage, NAME/KEY; no more is read."""
        for part in saved:
            wanted = {path for path in part.names(prefix) if path.rpartition("/")[0] in self._places}
            yield from part.tensors(prefix, wanted).items()


@dataclass
class Flight:
    """The exchange of a group that is under way."""

    group: int
    sent: int
    """Optimizer steps that were done when it was sent."""
    rounds: list[Callable[[], None]]
    """Those that are left, in order."""
    count: int
    """Rounds of the whole exchange."""
    arrived: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """The sums over all replicas, by stage and by the names of parameters; all are there after the last round."""


class LocalSteps:
    """All stages of this process between two exchanges.

    Args:
        stages: of this process.
        replicas: those of the stages.
        make_optimizer: makes the optimizer of a replica of a stage.
        shared: weights that several stages hold, or None.
        weigh: what the moves of a replica are multiplied by before they are sent, 1 on average.
    """

    def __init__(
        self,
        stages: Sequence[CompressedStage],
        replicas: Replicas,
        make_optimizer: MakeOptimizer,
        shared: SharedWeights | None,
        weigh: Callable[[int], float] = evenly,
    ) -> None:
        self._replicas, self._shared, self._weigh = replicas, shared, weigh
        self._sync = replicas.options.sync
        self._flight: Flight | None = None
        self._copies = {
            stage.stage_index: StageCopies(trained(stage), replicas.here, make_optimizer, self._sync)
            for stage in stages
        }

    @property
    def outer(self) -> list[Optimizer]:
        """The outer optimizer of each stage."""
        return [copies.outer for copies in self._copies.values()]

    def optimizers(self, replica: int) -> list[Optimizer]:
        """The optimizers of a replica, one for each stage."""
        return [copies.optimizers[replica] for copies in self._copies.values()]

    def use(self, replica: int | None) -> None:
        """Give the modules the weights and statistics of a replica, or with None the common ones."""
        for copies in self._copies.values():
            copies.use(replica)
        self._replicas.statistics.use(replica)

    def after_step(self, done: int, steps: int, progress: Progress) -> None:
        """Go on with the exchange under way, and begin what is due after `done` of all `steps`; collective.

        At the end every group is exchanged, but for one whose sums have just moved the weights.
        """
        landed, last = None, done == steps
        if self._flight is not None:
            landed = self._go_on(self._flight, done, last=last)
        groups = range(self._sync.groups) if last else due(self._sync, done)
        for group in groups:
            if group != landed:
                self._send(group, done, progress)
                if last or not self._sync.overlap:
                    self._land()
        if self._flight is not None and self._flight.rounds:
            self._replicas.leave(self._flight.group)

    def begin(self, done: int, steps: int) -> int:
        """The first step of training in this process, if `done` of all `steps` are done."""
        return done

    def step_after(self, step: int) -> int:
        """The step that comes after a step."""
        return step + 1

    def settle(self) -> None:
        """Wait for what is under way between replicas, before a checkpoint; collective. It counts when it is due."""
        while self._flight is not None and self._flight.rounds:
            self._next_round(self._flight)
        self._replicas.statistics.collect()

    def _send(self, group: int, done: int, progress: Progress) -> None:
        """Send what all replicas moved the weights of a group by; with the first group their statistics, too."""
        for replica in self._replicas.here:
            if group == 0:
                self._replicas.statistics.submit(replica, progress)
            for stage, copies in self._copies.items():
                copies.put_moves(replica, self._group(stage, group), self._weigh(replica))
            self._replicas.submit(replica, progress, group)
        rounds = self._replicas.rounds(progress, group)
        self._flight = Flight(group, done, rounds, len(rounds))

    def _go_on(self, flight: Flight, done: int, *, last: bool) -> int | None:
        """Take the rounds for which it is time, spread over the steps; the group, if its sums moved the weights."""
        elapsed = done - flight.sent
        if last or elapsed == self._sync.overlap:
            self._land()
            return flight.group
        while flight.rounds and elapsed * flight.count >= self._sync.overlap * (1 + flight.count - len(flight.rounds)):
            self._next_round(flight)
        return None

    def _next_round(self, flight: Flight) -> None:
        """Take one round, and keep the sums that it gives, out of the way of the next step's gradients."""
        flight.rounds.pop(0)()
        for stage, copies in self._copies.items():
            flight.arrived[stage] = flight.arrived.get(stage, {}) | copies.take()

    def _land(self) -> None:
        """Move the common weights of the group under way by the average, and give them to all; collective.

        With the first group, the common statistics become the mean of what was sent.
        """
        self.settle()
        flight, self._flight = self._flight, None
        assert flight is not None, "a group is under way"
        with torch.no_grad():
            for stage, copies in self._copies.items():
                copies.average(flight.arrived[stage], self._replicas.weight)
            # copies of shared weights went through codecs apart, and must stay equal; the first group has them all
            if self._shared is not None and flight.group == 0:
                self._shared.average_gradients()
            for stage, copies in self._copies.items():
                copies.outer.step()
                copies.outer.zero_grad()
                copies.adopt(self._group(stage, flight.group))
            if flight.group == 0:
                self._replicas.statistics.average(self._replicas.weight)

    def _group(self, stage: int, group: int) -> Sequence[Parameter]:
        return self._replicas.exchanges[stage][group].parameters

    def state_dict(self, stage: int) -> dict[str, Tensor]:
        """Copies of the weights and optimizers of the replicas here, and of what has arrived but does not count yet.

        Settle first. The state of the outer optimizer is not among it.
        """
        own = self._copies[stage].state_dict() | self._replicas.statistics.state_dict(stage)
        flight = self._flight
        if flight is None:
            return own
        arrived = {f"arrived/{name}": copy_to_host(total) for name, total in flight.arrived[stage].items()}
        return own | arrived | {"sent": torch.tensor([flight.group, flight.sent])}

    def load_state_dict(self, stage: int, saved: Sequence[SavedStage]) -> None:
        """Take what `state_dict` returned in any process. CheckpointError if something is missing.

        What has arrived but does not count yet is left out: the next exchange has all that the replicas moved.
        """
        self._copies[stage].load_state_dict(saved)
        self._replicas.statistics.load_state_dict(stage, saved)

    def load_flight(self, stage: int, saved: SavedStage) -> None:
        """Take what has arrived but does not count yet."""
        if "sent" not in saved.names("replicas/"):
            return
        group, sent = saved.tensors("replicas/", {"sent"})["sent"].tolist()
        if self._flight is None:
            self._flight = Flight(group, sent, [], 0)
        self._flight.arrived[stage] = saved.tensors("replicas/arrived/")
        if group == 0:
            self._replicas.statistics.load_sums(stage, saved)


def trained(stage: CompressedStage) -> dict[str, Parameter]:
    """The parameters that a stage trains, by all their names in the unsplit model."""
    return {name: each for name, each in parameters_of(stage.submod).items() if each.requires_grad}
