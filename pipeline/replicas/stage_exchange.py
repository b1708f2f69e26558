"""The exchange of one stage: the gradients of all its parameters, added up over the replicas.

Every replica ends with the same bits. In a simulation one process has the members of all replicas, and the frames
between them go through memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from thinwire.compress import Progress
from thinwire.compress.stores.store import Store
from thinwire.pipeline.errors import CheckpointError
from thinwire.pipeline.replicas.division import BUCKET, divide
from thinwire.pipeline.replicas.layout import StageRows
from thinwire.pipeline.replicas.member import Member, Setting


class StageExchange:
    """The exchange of one stage: its gradients as rows, and the members of the replicas in this process.

    Args:
        parameters: those of the stage by name, in an order that all replicas have.
        setting: what all buckets have in common.
        first_bucket: the number of its first bucket; another exchange of the stage may have those before.

    Attributes:
        parameters: those whose gradients it adds up.
        next_bucket: the number behind its last bucket.
    """

    def __init__(self, parameters: Mapping[str, Parameter], setting: Setting, first_bucket: int = 0) -> None:
        self.parameters: Sequence[Parameter] = list(parameters.values())
        self._rows = StageRows({name: parameter.shape for name, parameter in parameters.items()}, setting.layout)
        buckets = divide(self._rows.count, setting.replicas, BUCKET // setting.layout.row, first_bucket)
        self.next_bucket = first_bucket + len(buckets)
        self._buckets = buckets
        self._longest = max((len(bucket.rows) for bucket in buckets), default=0)
        self._given: Sequence[Tensor | None] = []
        self._members = {replica: [Member(setting, replica, bucket) for bucket in buckets] for replica in setting.here}
        self._everyone = setting.everyone
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

    def add_up(self, progress: Progress) -> None:
        """Once all replicas here have submitted, add up the parts that they own, and send the sums to all."""
        for members in self._members.values():
            for member in members:
                member.send_sum(progress)

    def finish(self, progress: Progress) -> None:
        """Give every parameter the sum of all replicas' gradients; collective.

        One that no replica has used so far has none. What arrived does not say that: a codec without a point at zero
        makes something of zeros.
        """
        # all replicas have marked the same as used, so all of them ask, or none does
        if not self._used.all():
            told = torch.tensor(self._everyone(self._seen.tolist()))
            self._used |= told.any(0)
            self._seen.zero_()
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
                parameter.grad = total.to(parameter.device, parameter.dtype)

    def _scratch(self) -> Tensor:
        """Memory for the rows of a bucket that has pieces of several tensors."""
        return torch.empty(self._longest, self._rows.layout.row, dtype=torch.float32)

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
        for members in self._members.values() if self._keeps_errors else ():
            for member in members:
                yield from member.errors()


def _every_slot(store: Store) -> Tensor:
    return torch.arange(store.layout.num_slots)
