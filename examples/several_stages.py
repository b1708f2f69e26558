"""Several stages a process, AQ-SGD by sample, evaluation, and a loop of your own that goes on after a stop.

    torchrun --nproc-per-node 2 examples/several_stages.py state 6
    torchrun --nproc-per-node 2 examples/several_stages.py state 12    # goes on after step 6

The first process holds stages 0 and 2, the second one stages 1 and 3. AQ-SGD keeps a buffer for every sample, so every
pass names its samples. The folder `state` has a file for each process: weights, optimizer, and the buffers.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from thinwire.pipeline import CompressedStage, CompressionOptions, Pass, SlotCounts, Wire

STAGES, WIDTH = 4, 32
MICROBATCHES, ROWS = 4, 4
"""Micro-batches in a pass, and samples in a micro-batch."""
BATCH = MICROBATCHES * ROWS
TRAINING, HELD_OUT = 2 * BATCH, BATCH
"""Samples to train on, and to evaluate with."""


def samples(ids: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same samples in every process: inputs [n, 32] and targets [n, 32]."""
    every = torch.randn(TRAINING, WIDTH, generator=torch.Generator().manual_seed(seed))
    return every[ids], every[ids].sin()


def make_stages(modules: list[nn.Module], rank: int, wire: Wire) -> list[CompressedStage]:
    """The stages of this process; they share its wire."""
    example, device = torch.empty(ROWS, WIDTH), torch.device("cpu")
    return [
        CompressedStage(module, index, STAGES, device, input_args=example, output_args=example, wire=wire)
        for index, module in zip(range(rank, STAGES, 2), modules, strict=True)
    ]


def run(
    schedule: ScheduleInterleaved1F1B, stages: list[CompressedStage], coming: Pass, seed: int
) -> torch.Tensor | None:
    """One pass of the schedule; its mean loss in the process of the last stage."""
    assert coming.sample_ids is not None
    inputs, targets = samples(coming.sample_ids, seed)
    for stage in stages:
        stage.begin(coming)
    go, losses = schedule.step if coming.trains else schedule.eval, list[torch.Tensor]()
    if stages[0].stage_index == 0:
        go(inputs)
        return None
    go(target=targets, losses=losses)
    return torch.stack(losses).mean().detach()


def train(folder: Path, steps: int) -> list[float]:
    """Train until so many steps are done, write the state, evaluate; the losses and scores of the last stage."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    modules: list[nn.Module] = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(STAGES // 2)]
    slots = SlotCounts(positions=BATCH, samples=TRAINING, evaluation_samples=HELD_OUT)
    wire = Wire(CompressionOptions(activations="aqsgd(q(4))", gradients="q(8)"), slots=slots)
    stages = make_stages(modules, rank, wire)
    schedule = ScheduleInterleaved1F1B(list(stages), n_microbatches=MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW([weight for module in modules for weight in module.parameters()], lr=0.01)

    path, done, seen = folder / f"process-{rank}.pt", 0, []
    if path.exists():
        state = torch.load(path)
        done = state["done"]
        optimizer.load_state_dict(state["optimizer"])
        for stage, module, weights, buffers in zip(stages, modules, state["modules"], state["stages"], strict=True):
            module.load_state_dict(weights)
            stage.load_state_dict(buffers)
    for step in range(done, steps):
        ids = torch.arange(BATCH) + step % 2 * BATCH
        seen.append(run(schedule, stages, Pass(sample_ids=ids), seed=0))
        optimizer.step()
        optimizer.zero_grad()
    for stage in stages:
        stage.flush()  # wait for what was sent
    folder.mkdir(parents=True, exist_ok=True)
    state = {"modules": [module.state_dict() for module in modules], "optimizer": optimizer.state_dict()}
    torch.save({**state, "done": max(done, steps), "stages": [stage.state_dict() for stage in stages]}, path)

    held_out = torch.arange(HELD_OUT)
    seen.append(run(schedule, stages, Pass(kind="eval-on", sample_ids=held_out), seed=1))  # compressed
    seen.append(run(schedule, stages, Pass(kind="eval-off", sample_ids=held_out), seed=1))
    for stage in stages:
        stage.close()
    return [float(loss) for loss in seen if loss is not None]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("give a folder for the state, and the step to train to")
    dist.init_process_group("gloo")
    found = train(Path(sys.argv[1]), int(sys.argv[2]))
    if dist.get_rank() == 1:
        *losses, on, off = found
        print("losses", *(f"{loss:.4f}" for loss in losses))
        print(f"held out, compression on {on:.4f}, off {off:.4f}")
    dist.destroy_process_group()
