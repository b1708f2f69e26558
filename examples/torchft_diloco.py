"""Thinwire's codecs in torchft's DiLoCo: replicas exchange payloads, and may die and come back.

    torchft_lighthouse --bind 127.0.0.1:29510 --min_replicas 1 --join_timeout_ms 1000 &
    export TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510
    python examples/torchft_diloco.py 0 & python examples/torchft_diloco.py 1  # CODEC EXCHANGES

All that torchft needs is another process group: one that gathers payloads and adds them in the order of replicas, so
that all have the same bits. What a codec left out of a parameter is added to its next exchange. torchft has no
authentication: use it within a private network.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceOp, Work
from torch.futures import Future
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from thinwire.compress import Key, parse

SYNC_EVERY = 10


class Payloads(ProcessGroupGloo):  # type: ignore[misc]  # torchft is not installed where types are checked
    """Sums of float tensors, from payloads of all replicas. Everything else is gloo's."""

    def __init__(self, expression: str, parameters: int, timeout: timedelta) -> None:
        """Exchange in the words of a codec whose payloads have a known length, such as q(4).

        `parameters` is how many tensors are exchanged at a time, always in the same order.
        """
        super().__init__(timeout)
        self.codec = parse(expression).codec.unscaled()  # what is left out comes later: randk must not make up for it
        if parse(expression).feedback or self.codec.varies:
            rule = "these exchanges have error feedback of their own, and payloads of one length"
            raise ValueError(f"{rule}, got {expression}; take a codec such as q(4)")
        self.errors: list[Tensor | None] = [None] * parameters
        self.calls = self.sent = 0

    def configure(self, *args: object, **kwargs: object) -> None:
        """Connect to the replicas that are there now. What was under way begins again, with the first tensor."""
        super().configure(*args, **kwargs)
        self.calls = 0

    def allreduce(self, tensors: list[Tensor], opts: object) -> Work:
        """The sum over replicas, in place."""
        if getattr(opts, "reduceOp", opts) != ReduceOp.SUM or not all(map(torch.is_floating_point, tensors)):
            work: Work = super().allreduce(tensors, opts)
            return work
        for tensor in tensors:
            self._sum(tensor)
        return _Done(tensors)

    def _sum(self, tensor: Tensor) -> None:
        key = Key(0, self.calls, "pseudo-gradients", "train", 0, 0)
        index = self.calls % len(self.errors)
        self.calls += 1
        error = self.errors[index]
        wanted = tensor if error is None else tensor + error
        mine = torch.empty(self.codec.nbytes(tensor.shape, tensor.dtype), dtype=torch.uint8)
        self.codec.encode(wanted, mine, key)
        gathered = [torch.empty_like(mine) for _ in range(self.size())]
        self.allgather([gathered], [mine], AllgatherOptions()).wait()
        self.codec.decode(mine, decoded := torch.empty_like(tensor), key)
        self.errors[index] = wanted - decoded
        tensor.zero_()
        for payload in gathered:
            self.codec.decode(payload, decoded, key)
            tensor += decoded
        self.sent += len(mine)


class _Done(Work):
    """What has already happened, as torch's collectives return it."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._future: Future[list[Tensor]] = Future()
        self._future.set_result(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def get_future(self) -> Future[list[Tensor]]:
        return self._future


def train(replica: int, expression: str = "q(4)", exchanges: int = 8) -> None:
    """Train a small model on samples of this replica's own until so many exchanges are done."""
    timeout = timedelta(seconds=20)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=0.003)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    group = Payloads(expression, len(list(model.parameters())), timeout)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    manager = Manager(
        pg=group,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timeout,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"replica-{replica}",
    )
    generator = torch.Generator().manual_seed(replica)
    try:
        with DiLoCo(manager, [model], inner, outer, SYNC_EVERY):
            while (done := manager.current_step()) < exchanges:  # one that came back goes on from the others' number
                inputs = torch.randn(32, 16, generator=generator)
                loss = nn.functional.mse_loss(model(inputs), inputs[:, :1].sin())
                inner.zero_grad()
                loss.backward()
                inner.step()
                if manager.current_step() > done:
                    total = sum(parameter.double().sum().item() for parameter in model.parameters())
                    exchange, count = manager.current_step(), manager.num_participants()
                    print(f"replica {replica}  exchange {exchange} of {count}  loss {loss.item():.4f}", end="  ")
                    print(f"sent {group.sent} bytes  sum of weights {total!r}", flush=True)
    finally:
        manager.shutdown(wait=False)


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 4:
        raise SystemExit("give the number of this replica, and then a codec and how many exchanges, if not q(4) and 8")
    replica, expression, exchanges = [*sys.argv[1:], *("q(4)", "8")[len(sys.argv) - 2 :]]
    train(int(replica), expression, int(exchanges))
