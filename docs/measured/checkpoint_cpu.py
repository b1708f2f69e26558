"""The CPU time of checkpoints beside that of training, in one run of `quickstart` with AQ-SGD's stores on disk.

    python docs/measured/checkpoint_cpu.py FOLDER

CPU time depends less on what else the machine does than seconds do. A checkpoint is written every 10 steps.
"""

import json
import resource
import sys
import time
from pathlib import Path

from thinwire.launch.processes import forks

forks.use_one_thread()  # else the stages would be new interpreters, which know nothing of what is changed here

from thinwire.launch import cli  # noqa: E402
from thinwire.launch.run.run import Run  # noqa: E402
from thinwire.pipeline.saving.checkpoint import Checkpoints  # noqa: E402

STEPS, EVERY = 60, 10
OPTIONS = {
    "--training.steps": str(STEPS),
    "--compression.activations": 'aqsgd(q(4), store="disk")',
    "--checkpoint.every": f"{EVERY} steps",
    "--data.held_out": "0",
}
PARTS = {"save": "on the thread that trains", "_run": "in the background"}


def measure(folder: Path) -> None:
    """Have each process note the CPU seconds of checkpoints, by part, and its own."""
    spent = dict.fromkeys(PARTS, 0.0)

    def timed(name: str) -> None:
        real = getattr(Checkpoints, name)

        def wrapper(*arguments: object) -> None:
            began = time.thread_time()
            real(*arguments)
            spent[name] += time.thread_time() - began

        setattr(Checkpoints, name, wrapper)

    def go(run: Run) -> None:
        real_go(run)
        used = resource.getrusage(resource.RUSAGE_SELF)
        stage = run.trainer.stages[0].stage_index
        said = {**spent, "all": used.ru_utime + used.ru_stime}
        (folder / f"cpu-{stage}.json").write_text(json.dumps(said))

    for name in PARTS:
        timed(name)
    real_go, Run.go = Run.go, go  # type: ignore[method-assign]


def main(folder: Path) -> None:
    """Train, and print the CPU seconds of all stages for 10 steps."""
    folder = folder.resolve()
    folder.mkdir(parents=True)
    assert forks.is_safe(), "another thread runs"
    measure(folder)
    words = [word for pair in OPTIONS.items() for word in pair]
    assert cli.main(["train", "quickstart", *words, "--output", str(folder / "run")]) == 0
    stages = [json.loads(path.read_text()) for path in folder.glob("cpu-*.json")]
    sums = {name: sum(stage[name] for stage in stages) * EVERY / STEPS for name in (*PARTS, "all")}
    training = sums["all"] - sum(sums[name] for name in PARTS)
    for name, words_of in PARTS.items():
        print(
            f"{words_of}: {sums[name]:.2f} s of CPU time every {EVERY} steps, {sums[name] / training:.1%} of training"
        )
    print(f"training: {training:.2f} s of CPU time every {EVERY} steps")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
