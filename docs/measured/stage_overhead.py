"""What CompressedStage adds to a step of torch's own stage, without slow links: seconds and processor time, by turns.

    torchrun --nproc-per-node 2 docs/measured/stage_overhead.py [--channels 64] [--tokens 16] [--turns 30]

Two transformer layers in each of two stages, eight micro-batches of one sequence, 1F1B. Prints medians, and medians of
the ratios to torch's in the same turn: a machine's speed drifts by more than what is measured here.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from thinwire.compress import Key, parse
from thinwire.pipeline import CompressedStage, compressed

KINDS = ["PipelineStage", "none", "q(4)/q(8)", "q(8, step=0.2)"]
COUNT, STEPS, WARM_UP = 8, 3, 2
KEY = Key(seed=0, boundary=0, channel="activations", phase="train", step=0, microbatch=0)


def stepper(kind: str, channels: int, tokens: int) -> Callable[[], None]:
    """A step of a pipeline of this kind of stage."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    module = nn.Sequential(
        *(nn.TransformerEncoderLayer(channels, 4, 4 * channels, dropout=0.0, batch_first=True) for _ in range(2))
    )
    example = torch.empty(1, tokens, channels, requires_grad=True)
    with compressed("none" if kind == "PipelineStage" else kind):
        stage_class = PipelineStage if kind == "PipelineStage" else CompressedStage
        stage = stage_class(module, rank, 2, torch.device("cpu"), input_args=example, output_args=example)
    schedule = Schedule1F1B(stage, COUNT, loss_fn=nn.functional.mse_loss)
    x = torch.randn(COUNT, tokens, channels)
    return lambda: schedule.step(*([] if rank else [x]), **({"target": x} if rank else {}))


def main() -> None:
    """Measure all kinds in turn, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--turns", type=int, default=30)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    long, codec = torch.ones(512, 512), parse("q(4)").codec  # loads the kernels, as many short messages would
    codec.encode(long, torch.empty(codec.nbytes(long.shape, long.dtype), dtype=torch.uint8), KEY)
    steps = {kind: stepper(kind, given.channels, given.tokens) for kind in KINDS}
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for turn in range(WARM_UP + given.turns):
        for place in range(len(KINDS)):
            kind = KINDS[(turn + place) % len(KINDS)]
            wall, processor = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                steps[kind]()
            if turn >= WARM_UP:
                found[kind].append((time.perf_counter() - wall, time.process_time() - processor))
    if dist.get_rank() == 0:
        print("| | ms a step | of PipelineStage | processor, ms | of PipelineStage |\n|---|---|---|---|---|")
        for kind, times in found.items():
            cells = []
            for mine, torchs in zip(zip(*times, strict=True), zip(*found[KINDS[0]], strict=True), strict=True):
                ratios = [one / other for one, other in zip(mine, torchs, strict=True)]
                cells.append(f"{1e3 * statistics.median(mine) / STEPS:.1f} | {statistics.median(ratios):.3f}")
            print(f"| `{kind}` | {' | '.join(cells)} |")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
