"""What checkpoints cost: one run of `quickstart` that writes some in every other block of steps.

    python docs/measured/checkpoint_cost.py FOLDER

It takes 6 minutes on two idle cores. The stores of AQ-SGD are on disk. A block has 40 steps. Every other block does all
that a run with checkpoints every 10 steps does, and the blocks between do none of it. A checkpoint is due after 5 steps
of each 10, so that the last one of a block is written while the block trains, as in a run; at its end a block waits for
what is not written yet. Neighbouring blocks make a pair, and each pair gives a ratio, so what else the machine does
spoils pairs and not the median.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

from thinwire.launch.processes import forks

forks.use_one_thread()  # else the stages would be new interpreters, which know nothing of what is changed here

from thinwire.launch import cli  # noqa: E402
from thinwire.launch.run.parts.checkpoints import Checkpointing  # noqa: E402
from thinwire.launch.run.run import Run  # noqa: E402
from thinwire.pipeline.training.trainer import StepRecord  # noqa: E402

BLOCK, EVERY, PAIRS = 40, 10, 7
OPTIONS = {
    "--training.steps": str(2 * BLOCK * PAIRS + BLOCK),
    "--compression.activations": 'aqsgd(q(4), store="disk")',
    "--checkpoint.every": f"{EVERY} steps",
    "--data.held_out": "0",
}


def alternate(times: Path) -> None:
    """Have the run write checkpoints in every other block only, and note when each step has ended."""
    real = Run._after_step

    def writes(done: int) -> bool:
        return (done - 1) // BLOCK % 2 == 1

    def checkpoints(part: Checkpointing, done: int, record: StepRecord | None) -> None:
        if done % EVERY == EVERY // 2 and writes(done):
            part._write(done)

    def after_step(run: Run, record: StepRecord) -> None:
        real(run, record)
        done = record.step + 1
        if done % BLOCK == 0:
            run.checkpoints.saver.wait()  # what a block began, it pays for
        if run.trainer.reports:
            with times.open("a") as file:
                file.write(json.dumps([done, time.perf_counter()]) + "\n")

    Checkpointing.after_step, Run._after_step = checkpoints, after_step


def main(folder: Path) -> None:
    """Train, and print the ratio of every pair of blocks."""
    folder = folder.resolve()
    folder.mkdir(parents=True)
    assert forks.is_safe(), "another thread runs"
    times = folder / "times.jsonl"
    alternate(times)
    words = [word for pair in OPTIONS.items() for word in pair]
    assert cli.main(["train", "quickstart", *words, "--output", str(folder / "run")]) == 0
    ended = dict(json.loads(line) for line in times.read_text().splitlines())
    seconds = [ended[start + BLOCK] - ended[start] for start in range(BLOCK, 2 * BLOCK * PAIRS + 1, BLOCK)]
    # block 1 (steps 40 to 80) writes checkpoints, block 2 does not, and so on
    ratios = [seconds[index] / seconds[index + 1] - 1 for index in range(0, len(seconds), 2)]
    print(f"a step: {1000 * min(seconds) / BLOCK:.0f} to {1000 * max(seconds) / BLOCK:.0f} ms; load {os.getloadavg()}")
    print("more time with checkpoints, pair by pair:", ", ".join(f"{ratio:+.1%}" for ratio in ratios))
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"checkpoints every {EVERY} steps take {middle:+.1%} of time (median of {PAIRS} pairs, quartiles {low:+.1%} to "
        f"{high:+.1%}), so {1 - 1 / (1 + middle):.1%} of throughput"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
