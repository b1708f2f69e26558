"""Send one very large message from a stage to the next, and check every value that arrives.

    torchrun --nproc-per-node 2 docs/measured/large_frame.py none 1.1e9      # a frame of 2.2 GB, 17 GB of memory
    torchrun --nproc-per-node 2 docs/measured/large_frame.py "q(4)" 2.2e9    # more than 2^31 elements

The message has rows of 1,000 bf16 values. Neighboring rows differ, so a row in the wrong place has a large error.
"""

import resource
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe

from thinwire.pipeline import CompressedStage, compressed

WIDTH, PART = 1000, 10_000


def rows(start: int, stop: int) -> Tensor:
    """These rows of the message, bf16 [stop - start, WIDTH]."""
    number = 1 + torch.arange(start, stop).remainder(1009)[:, None]
    return (number * torch.linspace(-1, 1, WIDTH)).bfloat16()


class Source(nn.Module):
    """Makes the message from its number of rows."""

    def forward(self, x: Tensor) -> Tensor:
        """One sample: [1, rows, WIDTH]."""
        made = torch.empty(1, int(x.item()), WIDTH, dtype=torch.bfloat16)
        for start in range(0, made.shape[1], PART):
            part = made[0, start : start + PART]
            part.copy_(rows(start, start + len(part)))
        return made


class Check(nn.Module):
    """The largest error of a row beside its largest value."""

    def forward(self, got: Tensor) -> Tensor:
        """One number: [1, 1]."""
        worst = torch.zeros(())
        for start in range(0, got.shape[1], PART):
            part = got[0, start : start + PART].float()
            sent = rows(start, start + len(part)).float()
            worst = torch.maximum(worst, ((part - sent).abs().amax(1) / sent.abs().amax(1)).max())
        return worst.reshape(1, 1)


def main() -> None:
    """Send the message, and print what came."""
    codec, count = sys.argv[1], int(float(sys.argv[2])) // WIDTH
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x = torch.full((1, 1), float(count), dtype=torch.float64)
    message = torch.empty(1, count, WIDTH, dtype=torch.bfloat16, device="meta")
    examples = (x, message) if rank == 0 else (message, torch.empty(1, 1))
    with compressed(codec):
        stage = CompressedStage(Check() if rank else Source(), rank, 2, torch.device("cpu"), *examples)
    started = time.perf_counter()
    with torch.inference_mode():
        output = ScheduleGPipe(stage, 1).eval(*([] if rank else [x]))
    if rank:
        print(f"{time.perf_counter() - started:.0f} s, largest error {output.item():.4f} of a row's largest value")
    for traffic in stage.meter.sent.values():
        print(f"sent {traffic.bytes:,} bytes")
    print(f"process {rank}: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB of memory at most")
    stage.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
