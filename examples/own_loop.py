"""A training loop of your own: two stages, torch's own schedule, compressed activations and gradients.

    torchrun --nproc-per-node 2 examples/own_loop.py

Each process holds one stage. `CompressedStage` takes the place of `torch.distributed.pipelining.PipelineStage`; all
else is plain torch.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe

from thinwire.pipeline import CompressedStage, CompressionOptions, Wire

MICROBATCHES, SAMPLES, WIDTH = 4, 8, 64
"""Micro-batches in a step, samples in a micro-batch, and the width of the tensor that crosses the boundary."""


def stage_module(rank: int) -> nn.Module:
    """The layers of one stage, with weights from a seed of its own."""
    torch.manual_seed(rank)
    if rank == 0:
        return nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh())
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def make_stage(module: nn.Module, rank: int, num_stages: int) -> CompressedStage:
    """The stage of this process. Examples of one micro-batch give the shapes of the tensors."""
    inputs = torch.empty(SAMPLES, 16) if rank == 0 else torch.empty(SAMPLES, WIDTH)
    outputs = torch.empty(SAMPLES, WIDTH) if rank == 0 else torch.empty(SAMPLES, 1)
    wire = Wire(CompressionOptions(activations="q(4)", gradients="q(8)"))
    return CompressedStage(
        module, rank, num_stages, torch.device("cpu"), input_args=inputs, output_args=outputs, wire=wire
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same samples in every process: inputs [32, 16] and targets [32, 1]."""
    inputs = torch.randn(MICROBATCHES * SAMPLES, 16, generator=torch.Generator().manual_seed(step % 4))
    return inputs, inputs[:, :1].sin()


def train(steps: int = 40) -> None:
    """Train, and print the loss and the bytes sent."""
    rank, num_stages = dist.get_rank(), dist.get_world_size()
    module = stage_module(rank)
    stage = make_stage(module, rank, num_stages)
    schedule = ScheduleGPipe(stage, n_microbatches=MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for step in range(steps):
        inputs, targets = batch(step)
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
            print(f"step {step}  loss {torch.stack(losses).mean():.4f}")
        optimizer.step()
        optimizer.zero_grad()
    stage.flush()  # wait for what was sent, before the process group ends
    traffic = next(iter(stage.meter.sent.values()))
    print(f"stage {rank} sent {traffic.bytes} bytes instead of {traffic.uncompressed}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
