"""Adam for replicas that exchange momentum in few bits: QuantizedAdam, as in the code of 2206.01299.

Error feedback needs a sum that errors can be added to later. Adam divides by a second moment that follows the gradient,
so what a message lost would come back with another scale. So the second moment is frozen after the first steps, and
then the momentum travels in place of the gradient.

    at first  g = the sum over i of g_i, uncompressed;  m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2
    then      replica i sends b1 m / R + (1 - b1) g_i through `replicas.gradients`;  m <- the sum that all get;  v stays
    always    x <- x - lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps);  x <- x - lr decay x

R replicas have g_i of their own samples, as a part of the gradient of the whole batch; t counts steps. In terms of the
paper's code, whose gradients are means: it sends b1 m + (1 - b1) R g_i and takes the mean, which is the same. It is the
1-bit Adam family (2102.02888). Its code is `data_parallel/dist_dp_sharded_ps_compressed.py` of DS3Lab/AC-SGD.

One thing differs. An element whose gradient was zero until then has v = 0, such as the embedding of a token that did
not occur. The code divides its momentum by eps alone. Here it stays where it is, but for its decay. If no
element of a parameter had a gradient, a warning says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from thinwire.errors import ThinwireWarning


class QuantizedAdam(Optimizer):
    """Adam with a second moment that can be frozen. `to_momentum` goes before the exchange of replicas, `step` behind.

    Args:
        parameters: as any optimizer takes them; there may be none.
        lr, betas, eps, weight_decay: as those of Adam; the decay is decoupled.
        summands: how many tensors the gradient of a parameter is the sum of, one of each replica.

    Attributes:
        frozen: whether the second moment stays as it is. Set it before the passes of a step.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        summands: Callable[[Parameter], int],
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._summands = summands
        self._has_warned = False
        self.frozen = False

    @torch.no_grad()
    def to_momentum(self) -> None:
        """Turn the gradient of each parameter into its part of the momentum, once it is frozen.

        A parameter without a gradient has a part too, if it has moments: the sum must have all of them.
        """
        if not self.frozen:
            return
        for group in self.param_groups:
            decay = group["betas"][0]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(1 - decay)
                if parameter in self.state:
                    moment = self.state[parameter]["exp_avg"] * (decay / self._summands(parameter))
                    parameter.grad = moment if parameter.grad is None else parameter.grad.add_(moment)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step by what arrived: the gradient of the whole batch, or, once frozen, the momentum."""
        assert closure is None, "the passes of a step come before it"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)

    def _move(self, parameter: Parameter, arrived: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            self._warn_if_frozen(parameter)
            state |= {"step": torch.zeros((), dtype=torch.float32), "exp_avg": torch.zeros_like(parameter)}
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        first, second = group["betas"]
        momentum, square = state["exp_avg"], state["exp_avg_sq"]
        state["step"] += 1
        if self.frozen:
            momentum.copy_(arrived)
        else:
            momentum.mul_(first).add_(arrived, alpha=1 - first)
            square.mul_(second).addcmul_(arrived, arrived, value=1 - second)
        step = int(state["step"])
        rate = group["lr"] * sqrt(1 - second**step) / (1 - first**step)
        moves = square.sqrt().add_(group["eps"])
        torch.div(momentum, moves, out=moves)
        parameter.sub_(moves.masked_fill_(square == 0, 0.0), alpha=rate)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])

    def _warn_if_frozen(self, parameter: Parameter) -> None:
        """Warn, once, that a parameter without a second moment stays where it is."""
        if self.frozen and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"quantized-adam: weights of shape {list(parameter.shape)} have their first gradient after the second "
                "moment is frozen, so they stay as they are; make optimizer.freeze_after longer",
                ThinwireWarning,
                stacklevel=4,
            )
