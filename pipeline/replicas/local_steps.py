"""Replicas that step alone between two exchanges: their own weights, and the outer optimizer of the common weights.

    x        the common weights: those after the last exchange, equal in all replicas
    x_i      the weights of replica i; after H optimizer steps of its own:
    d_i      x - x_i, what it moved, is exchanged as its outer gradient
    d        the mean of all d_i, as they arrived
    M        b M + d, the momentum of the outer optimizer
    x        x - lr (b M + d)
    x_i      x

This is DiLoCo (2311.08105). With lr 1 and b 0 the replicas take the mean of their weights.

The modules of the stages hold x, except while the passes of a replica run. So evaluations and saved weights are those
of the last exchange.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from thinwire.pipeline.devices.device import copy_to_host
from thinwire.pipeline.errors import CheckpointError
from thinwire.pipeline.options import SyncOptions
from thinwire.pipeline.saving.checkpoint_folder import SavedStage
from thinwire.pipeline.saving.state import beside, check_optimizer

HELD = "held by all"
"""How checkpoints call the steps after which the common weights were exchanged."""
_JSON = ".json"
"""The end of the names of what an optimizer keeps that is no tensor, such as a number of steps."""
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
        self._parameters = parameters
        self._common = {parameter: parameter.data for parameter in parameters.values()}  # each once
        self._own = {replica: {one: weights.clone() for one, weights in self._common.items()} for replica in here}
        self.optimizers = {replica: make_optimizer(self._common) for replica in here}
        group = [{"params": [*self._common]}]  # torch refuses an empty list of parameters, and takes an empty group
        self.outer = SGD(group, lr=sync.lr, momentum=sync.momentum, nesterov=sync.momentum > 0)

    def use(self, replica: int | None) -> None:
        """Give the parameters the weights of a replica, or with None the common ones."""
        for parameter, weights in (self._common if replica is None else self._own[replica]).items():
            parameter.data = weights

    def put_moves(self, replica: int) -> None:
        """Set the gradients to what a replica moved its weights by: common minus its own."""
        for parameter, own in self._own[replica].items():
            parameter.grad = self._common[parameter] - own

    def average(self, count: int) -> None:
        """Turn the gradients from sums over `count` replicas into means."""
        for parameter in self._common:
            if parameter.grad is not None:
                parameter.grad /= count

    def step(self) -> None:
        """Move the common weights by the gradients, and give them to the replicas here."""
        self.outer.step()
        self.outer.zero_grad()
        for own in self._own.values():
            for parameter, weights in own.items():
                weights.copy_(self._common[parameter])

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the weights of each replica, own/REPLICA/NAME, and of its optimizer, inner/REPLICA/NAME/KEY.

        CheckpointError if the optimizer keeps what no checkpoint holds.
        """
        for optimizer in self.optimizers.values():
            check_optimizer(optimizer)
        own = {
            f"own/{replica}/{name}": copy_to_host(weights[parameter])
            for replica, weights in self._own.items()
            for name, parameter in self._parameters.items()
        }
        inner = {
            f"inner/{replica}/{name}/{key}": copy_to_host(value)
            for replica, optimizer in self.optimizers.items()
            for name, parameter in self._parameters.items()
            for key, value in _as_tensors(optimizer.state.get(parameter, {}))
        }
        return own | inner

    def load_state_dict(self, saved: Sequence[SavedStage]) -> None:
        """Take the weights and optimizers of the replicas here from the parts of any cut. CheckpointError without."""
        for replica, own in self._own.items():
            weights: dict[str, Tensor] = {}
            for part in saved:
                weights |= part.tensors(f"replicas/own/{replica}/", self._parameters)
            if missing := [name for name in self._parameters if name not in weights]:
                raise CheckpointError(f"the checkpoint has no weights of replica {replica}: {missing[0]}")
            kept: dict[str, dict[str, Tensor]] = {}
            for path, value in self._inner(saved, f"replicas/inner/{replica}/"):
                name, _, key = path.rpartition("/")
                if key.endswith(_JSON):
                    value, key = json.loads(bytes(value.tolist())), key.removesuffix(_JSON)
                kept.setdefault(name, {})[key] = beside(self._parameters[name], key, value)
            for name, parameter in self._parameters.items():
                own[parameter].copy_(weights[name])
                if name in kept:
                    self.optimizers[replica].state[parameter] = kept[name]

    def _inner(self, saved: Sequence[SavedStage], prefix: str) -> Iterator[tuple[str, Tensor]]:
        """What the optimizer of a replica keeps for the parameters of this stage, NAME/KEY; no more is read."""
        for part in saved:
            wanted = {path for path in part.names(prefix) if path.rpartition("/")[0] in self._parameters}
            yield from part.tensors(prefix, wanted).items()


def _as_tensors(kept: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """What an optimizer keeps for a parameter, by name; what is no tensor as the bytes of its JSON, uint8 [N]."""
    for key, value in kept.items():
        yield (
            (key, value)
            if isinstance(value, Tensor)
            else (key + _JSON, torch.tensor([*json.dumps(value).encode()]).byte())
        )
