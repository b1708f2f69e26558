"""Thinwire's codecs in data parallelism: a communication hook of DistributedDataParallel, with error feedback.

    torchrun --nproc-per-node 2 examples/ddp_hook.py

Each process sends its gradients as payloads to all others. Everybody adds what arrives in the order of ranks, so all
have the same bits. What a codec left out of a parameter's gradient is added to its next one.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.compress import Codec, Key, parse


@dataclass
class Payloads:
    """What the hook remembers from step to step."""

    codec: Codec
    """One whose payloads have a known length, such as q(4): gathering needs one length."""
    group: dist.ProcessGroup | None = None
    errors: dict[Tensor, Tensor] = field(default_factory=dict)
    """What was left out so far, by parameter; save it with the parameters."""
    step: int = 0
    sent: int = 0
    """Bytes that this process sent to each other one."""


def mean_of_payloads(state: Payloads, bucket: dist.GradBucket) -> Future[Tensor]:
    """The mean of all processes' gradients: what `register_comm_hook(state, mean_of_payloads)` needs."""
    codec = state.codec.unscaled()  # what is left out comes later, so randk must not make up for it
    rank, count = dist.get_rank(state.group), dist.get_world_size(state.group)
    gradients = bucket.gradients()
    lengths = [codec.nbytes(gradient.shape, gradient.dtype) for gradient in gradients]
    keys = [
        [Key(0, bucket.index(), f"gradients of {each}", "train", state.step, 0, index) for index in range(len(lengths))]
        for each in range(count)
    ]
    mine = torch.empty(sum(lengths), dtype=torch.uint8, device=bucket.buffer().device)
    for parameter, gradient, payload, key in zip(
        bucket.parameters(), gradients, mine.split(lengths), keys[rank], strict=True
    ):
        error = state.errors.setdefault(parameter, torch.zeros_like(gradient))
        error += gradient
        codec.encode(error, payload, key)
        codec.decode(payload, decoded := torch.empty_like(gradient), key)
        error -= decoded
        error.nan_to_num_(0.0, 0.0, 0.0)  # a step that overflowed is skipped, and must not spoil the next ones
    gathered = [torch.empty_like(mine) for _ in range(count)]
    dist.all_gather(gathered, mine, group=state.group)
    bucket.buffer().zero_()
    for payloads, theirs in zip(gathered, keys, strict=True):
        for gradient, payload, key in zip(gradients, payloads.split(lengths), theirs, strict=True):
            codec.decode(payload, decoded := torch.empty_like(gradient), key)
            gradient += decoded
    state.sent += len(mine)
    state.step += bucket.is_last()
    done: Future[Tensor] = Future()
    done.set_result(bucket.buffer().div_(count))
    return done


def train(expression: str, steps: int = 40) -> tuple[list[float], int]:
    """Train a small model on samples of this process's own: the losses, and the bytes sent to each other process."""
    codec = parse(expression).codec
    if parse(expression).feedback or codec.varies:
        rule = "the hook has error feedback of its own, and gathers payloads of one length"
        raise ValueError(f"{rule}, got {expression}; take a codec such as q(4)")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)))
    state = Payloads(codec)
    model.register_comm_hook(state, mean_of_payloads)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        inputs = torch.randn(32, 16, generator=generator)
        loss = nn.functional.mse_loss(model(inputs), inputs[:, :1].sin())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, state.sent


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for codec in ("none", "q(4)"):
        losses, sent = train(codec)
        print(f"{codec}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, {sent} bytes sent by process {dist.get_rank()}")
    dist.destroy_process_group()
