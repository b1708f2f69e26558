"""Replicas that may be lost and come back, each a pipeline of two stages, under torchft's manager.

    torchft_lighthouse --bind 127.0.0.1:29510 --min_replicas 1 --join_timeout_ms 60000 &
    export TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510
    torchrun --standalone --max-restarts 5 --nproc-per-node 2 examples/torchft_replicas.py 0 &
    torchrun --standalone --max-restarts 5 --nproc-per-node 2 examples/torchft_replicas.py 1  # CODEC EXCHANGES

The stages of a replica exchange activations and gradients over a wire of their own. Every 10 steps each stage exchanges
what its weights moved with the same stage of the other replicas (torchft's DiLoCo), in payloads of a codec: a process
group gathers them and adds them in the order of replicas, so that all have the same bits. If a stage dies, torchrun
starts its replica again, which takes the weights of another one; the others go on. torchft's ports take what anybody
sends, and unpickle it: use it within a private network.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceOp, Work
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.rendezvous import rendezvous
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo
from torchft.work import _DummyWork

from thinwire.compress import Key, parse
from thinwire.models.digest import tensor_lines, weights_digest
from thinwire.pipeline import CompressedStage, CompressionOptions, Wire

SYNC_EVERY, WIDTH = 10, 64
MICROBATCHES, ROWS = 4, 8
"""Micro-batches in a step, and samples in a micro-batch."""
TIMEOUT = timedelta(seconds=20)


class Payloads(ProcessGroupGloo):  # type: ignore[misc]  # torchft is not installed where types are checked
    """Sums of float tensors, from payloads of all replicas. Everything else is gloo's."""

    def __init__(self, expression: str, parameters: int) -> None:
        """Exchange in the words of a codec whose payloads have a known length, such as q(4).

        `parameters` is how many tensors are exchanged at a time, always in the same order. What the codec left out of
        one is added to its next exchange.
        """
        super().__init__(TIMEOUT)
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
        done: Work = _DummyWork(tensors)
        return done

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


def make_stage(index: int) -> CompressedStage:
    """A stage of a pipeline of two: the same first weights in every replica."""
    torch.manual_seed(index)
    module = nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh()) if index == 0 else nn.Linear(WIDTH, 1)
    crossing = torch.empty(ROWS, WIDTH)
    inputs, outputs = (torch.empty(ROWS, 16), crossing) if index == 0 else (crossing, torch.empty(ROWS, 1))
    wire = Wire(CompressionOptions(activations="q(4)", gradients="q(8)"))
    return CompressedStage(module, index, 2, torch.device("cpu"), input_args=inputs, output_args=outputs, wire=wire)


def join() -> None:
    """Connect the stages of this start: torchrun keeps its store, and with it the addresses of those that have died."""
    store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)


def store_of(index: int) -> tuple[str, dist.TCPStore | None, int]:
    """Host, store and port of a store that is of this start of the replica alone; its first stage holds it.

    torchrun keeps its own store when it starts the stages again, and with it the address of the manager that has died.
    """
    host = os.environ["MASTER_ADDR"]
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if index == 0 else None
    port = torch.tensor([0 if store is None else store.port])
    dist.broadcast(port, 0)
    return host, store, int(port)


def train(replica: int, expression: str = "q(4)", exchanges: int = 8) -> None:
    """Train this process's stage on samples of the replica's own until so many exchanges are done."""
    index = dist.get_rank()
    stage = make_stage(index)
    module = stage.submod
    schedule = ScheduleGPipe(stage, n_microbatches=MICROBATCHES, loss_fn=nn.functional.mse_loss)
    inner = torch.optim.AdamW(module.parameters(), lr=0.003)
    outer = torch.optim.SGD(module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    group = Payloads(expression, len(list(module.parameters())))
    host, store, port = store_of(index)

    def load(state: dict[str, dict[str, object]]) -> None:
        module.load_state_dict(state["module"])
        inner.load_state_dict(state["inner"])

    manager = Manager(
        pg=group,
        load_state_dict=load,
        state_dict=lambda: {"module": module.state_dict(), "inner": inner.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=TIMEOUT,
        rank=index,
        world_size=2,
        store_addr=host,
        store_port=port,
        replica_id=f"replica-{replica}",
    )
    generator = torch.Generator().manual_seed(replica)
    try:
        with DiLoCo(manager, [module], inner, outer, SYNC_EVERY):
            while (done := manager.current_step()) < exchanges:  # one that came back goes on from the others' number
                inputs, losses = torch.randn(MICROBATCHES * ROWS, 16, generator=generator), list[Tensor]()
                inner.zero_grad()
                schedule.step(*([inputs] if index == 0 else []), target=inputs[:, :1].sin(), losses=losses)
                stage.flush()
                inner.step()  # with the exchange, if it is due
                if manager.current_step() > done:
                    digest = weights_digest(tensor_lines(module.state_dict()))
                    said = f"replica {replica}  stage {index}  exchange {manager.current_step()}"
                    print(f"{said} of {manager.num_participants()}  sent {group.sent} bytes  {digest}", flush=True)
    finally:
        manager.shutdown(wait=False)
        del store


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 4:
        raise SystemExit("give the number of this replica, and then a codec and how many exchanges, if not q(4) and 8")
    replica, expression, exchanges = [*sys.argv[1:], *("q(4)", "8")[len(sys.argv) - 2 :]]
    join()
    train(int(replica), expression, int(exchanges))
    dist.destroy_process_group()
