"""The exchange of PowerSGD (1905.13727): a matrix of gradients D travels as two thin ones, P and Q.

In each step, with the Q of the last one, and e zero at first:

    replica i   D_i = g_i + e_i;           sends D_i Q            P = the sum;  P <- an orthonormal basis of P
                                           sends D_i^T P          Q = the sum
    all         use P Q^T as the sum of the gradients;  e_i <- D_i - P Q^T / R;  Q <- an orthonormal basis of Q

It is the arithmetic of torch's own hook (torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook) with error feedback
and warm start. Its gradients are means, ours parts of a sum, so its D is R times ours, and its result is the same.
Gaussian numbers from the seed and the parameter's name fill the first Q. A parameter that gains too little travels
whole, beside P.

Every replica computes P, Q and P Q^T from the same bytes. The last bits of such products depend on the kind of
machine. So all replicas must have the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Parameter

from thinwire.compress import Key, Progress
from thinwire.pipeline.errors import CheckpointError
from thinwire.pipeline.options.powersgd import PowerSGD
from thinwire.pipeline.replicas.member import Setting
from thinwire.pipeline.replicas.protocol import StageSum


class _Thin:
    """A matrix of gradients [n, m], and its thin ones.

    Attributes:
        left, right: [n, r] and [m, r]; their gradients are what travels.
        start: the orthonormal Q that the next step begins with.
        errors: of each replica here, [n, m]. In a step, they hold D.
    """

    def __init__(self, parameter: Parameter, rank: int, here: Sequence[int], key: Key) -> None:
        self.parameter = parameter
        rows, columns = parameter.shape[0], parameter[0].numel()
        left, right = (torch.zeros(length, rank, dtype=torch.float32) for length in (rows, columns))
        self.left, self.right = Parameter(left), Parameter(right)
        self.start = _orthonormal(torch.randn(columns, rank, generator=key.generator(), dtype=torch.float32))
        self.errors = {replica: torch.zeros(rows, columns, dtype=torch.float32) for replica in here}

    def multiply(self, replica: int) -> None:
        """Make a replica's part of P, and clear its gradient. There is none without gradient and error."""
        given, gradient = self.errors[replica], self.parameter.grad
        if gradient is not None:
            given.add_(gradient.reshape(given.shape).to(given.device))  # no view of channels_last
        self.left.grad = given @ self.start if gradient is not None or given.any() else None
        self.parameter.grad = None

    def turn(self) -> None:
        """Make P orthonormal."""
        if self.left.grad is not None:
            self.left.grad = _orthonormal(self.left.grad)

    def multiply_back(self, replica: int) -> None:
        """Make a replica's part of Q; there is none if no replica has a gradient."""
        basis = self.left.grad
        self.right.grad = None if basis is None else self.errors[replica].mT @ basis

    def finish(self, replicas: int) -> None:
        """Give the parameter its gradient P Q^T, and keep the errors and Q."""
        if self.left.grad is None or self.right.grad is None:
            return
        total = self.left.grad @ self.right.grad.mT
        for error in self.errors.values():
            error.sub_(total, alpha=1 / replicas)
        self.start = _orthonormal(self.right.grad)
        self.parameter.grad = total.view_as(self.parameter).to(self.parameter.device)


class PowerExchange:
    """The exchange of one stage.

    Args:
        parameters: those of the stage by name, in an order that all replicas have.
        method: its rank, and what travels whole.
        setting: that of what travels, which is not compressed further.
        here: the replicas in this process.
        make: makes an exchange from parameters, a setting, and the number of its first bucket.
        first_bucket: the number of its first bucket.

    Attributes:
        parameters: those whose gradients it adds up.
        next_bucket: the number behind its last bucket.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        method: PowerSGD,
        setting: Setting,
        here: Sequence[int],
        make: Callable[..., StageSum],
        first_bucket: int = 0,
    ) -> None:
        self.parameters: Sequence[Parameter] = list(parameters.values())
        self._method, self._setting, self._here = method, setting, here
        self.meter = setting.meter
        ranks = {name: method.rank_of(tuple(parameter.shape)) for name, parameter in parameters.items()}
        # by its name alone: no cut, and no replica, starts from another Q
        key = Key(setting.seed, 0, "powersgd", "train", 0, 0)
        self._thin = {
            name: _Thin(parameter, ranks[name], here, key.of(name))
            for name, parameter in parameters.items()
            if ranks[name]
        }
        whole = {name: parameter for name, parameter in parameters.items() if not ranks[name]}
        lefts = {f"{name} P": thin.left for name, thin in self._thin.items()}
        rights = {f"{name} Q": thin.right for name, thin in self._thin.items()}
        thinner = replace(setting, stands_for=_elements(parameters) / max(1, _elements(whole | lefts | rights)))
        self._all = make(parameters, setting, first_bucket=first_bucket)
        self._lefts = make(whole | lefts, thinner, first_bucket=self._all.next_bucket)
        self._rights = make(rights, thinner, first_bucket=self._lefts.next_bucket)
        self.next_bucket = self._rights.next_bucket
        self._parts = {"all": self._all, "P": self._lefts, "Q": self._rights}

    def submit(self, replica: int, progress: Progress) -> None:
        """Send one replica's parts of P, and what travels whole, to the owners."""
        if self._is_full(progress):
            self._all.submit(replica, progress)
            return
        for thin in self._thin.values():
            thin.multiply(replica)
        self._lefts.submit(replica, progress)

    @property
    def rounds(self) -> tuple[Callable[[Progress], None], ...]:
        """What follows once all replicas here have submitted."""
        return self._add_up, self._turn, self._add_up_again, self._finish

    def _add_up(self, progress: Progress) -> None:
        """Add up what the replicas here own, and send the sums to all."""
        (self._all if self._is_full(progress) else self._lefts).add_up(progress)

    def _turn(self, progress: Progress) -> None:
        """Take the sums; send each replica's parts of Q to the owners."""
        if self._is_full(progress):
            self._all.finish(progress)
            return
        self._lefts.finish(progress)
        for thin in self._thin.values():
            thin.turn()
        for replica in self._here:
            for thin in self._thin.values():
                thin.multiply_back(replica)
            self._rights.submit(replica, progress)

    def _add_up_again(self, progress: Progress) -> None:
        if not self._is_full(progress):
            self._rights.add_up(progress)

    def _finish(self, progress: Progress) -> None:
        """Take Q, and give every parameter its gradient."""
        if self._is_full(progress):
            return
        self._rights.finish(progress)
        for thin in self._thin.values():
            thin.finish(self._setting.replicas)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the errors of the replicas here, worker/REPLICA/NAME/0, of each Q, start/NAME, and of what is used.

        all/used, P/used and Q/used are those of the exchanges of all gradients, of P and what travels whole, and of Q.
        """
        starts = {f"start/{name}": thin.start.clone() for name, thin in self._thin.items()}
        parts = [(part, sums.state_dict()) for part, sums in self._parts.items()]
        used = {f"{part}/{name}": each for part, state in parts for name, each in state.items()}
        return used | starts | {name: error.flatten().clone() for name, error in self._errors().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take exactly what `state_dict` returned. CheckpointError if something is missing."""
        wanted = self._errors() | {f"start/{name}": thin.start for name, thin in self._thin.items()}
        for name, tensor in wanted.items():
            if name not in state or state[name].numel() != tensor.numel():
                raise CheckpointError(f"the checkpoint has nothing of PowerSGD between replicas that fits {name}")
            tensor.copy_(state[name].view_as(tensor))
        for part, sums in self._parts.items():
            prefix = f"{part}/"
            sums.load_state_dict({name[len(prefix) :]: each for name, each in state.items() if name.startswith(prefix)})

    def _errors(self) -> dict[str, Tensor]:
        return {
            f"worker/{replica}/{name}/0": thin.errors[replica]
            for name, thin in self._thin.items()
            for replica in self._here
        }

    def _is_full(self, progress: Progress) -> bool:
        return progress.step < self._method.start or self._setting.in_full(progress)


def _elements(parameters: Mapping[str, Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters.values())


def _orthonormal(matrix: Tensor) -> Tensor:
    """An orthonormal basis of the columns of a matrix, and of more directions if they are too few."""
    basis: Tensor = torch.linalg.qr(matrix).Q
    return basis.contiguous()
