"""How soon torchrun trains again after a stage was killed or stopped: two stages on this machine.

    python docs/measured/torchrun_restarts.py FOLDER

One run for each signal. Prints the seconds from the signal to the sentence of a neighbour, to new processes, to the end
of their imports, and to the next step; and the seconds that the first start took. Takes two minutes on two idle cores.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

STEPS = 3
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
PARTS = ("told", "new processes", "imported torch", "trained again")
OPTIONS = ["quickstart", "--pipeline.num_stages", "2", "--training.steps", "100000", "--optimizer.schedule", "constant"]
OPTIONS += ["--data.held_out", "0", "--checkpoint.every", "5 steps"]


def main(folder: Path) -> None:
    """Measure each signal, and print a table."""
    folder = folder.resolve()
    folder.mkdir(parents=True)
    print(f"load {os.getloadavg()}")
    print(f"| signal | first start | {' | '.join(PARTS)} |\n|---|---|{'---|' * len(PARTS)}")
    for name, number in SIGNALS.items():
        first, after = measure(folder / name, number)
        print(f"| {name} | {first:.1f} s | {' | '.join(f'{seconds:.1f} s' for seconds in after)} |", flush=True)


def measure(folder: Path, number: signal.Signals) -> tuple[float, list[float]]:
    """Seconds until a run trains, and, after a signal to its last stage, until each of `PARTS`."""
    folder.mkdir()
    said, metrics = folder / "stderr", folder / "run/metrics.jsonl"
    with socket.socket() as free, said.open("w") as stderr:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
        command += [
            "--master-port",
            str(port),
            "-m",
            "thinwire.launch.train",
            *OPTIONS,
            "--output",
            str(folder / "run"),
        ]
        began = time.perf_counter()
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= STEPS, run)
        first, before, inode = time.perf_counter() - began, stages(run.pid), metrics.stat().st_ino
        wait_until(lambda: any(folder.glob("run/checkpoints/step-*/manifest.json")), run)
        time.sleep(2)  # until its neighbour has heard that it trains
        os.kill(before[1], number)
        began = time.perf_counter()
        conditions: list[Callable[[], bool]] = [
            lambda: "stage 0 lost a peer" in said.read_text(),
            lambda: (
                len(stages(run.pid).keys() & {0, 1}) == 2 and not set(stages(run.pid).values()) & set(before.values())
            ),
            lambda: all("libtorch_cpu" in _read(f"/proc/{pid}/maps") for pid in stages(run.pid).values()),
            lambda: metrics.stat().st_ino != inode,
        ]
        return first, [wait_until(condition, run) - began for condition in conditions]
    finally:
        run.terminate()
        run.wait()


def stages(launcher: int) -> dict[int, int]:
    """The process of each rank that torchrun has started; watchers are left out."""
    found = {}
    for child in _read(f"/proc/{launcher}/task/{launcher}/children").split():
        for variable in _read(f"/proc/{child}/environ").split("\0"):
            if variable.startswith("RANK="):
                found[int(variable.removeprefix("RANK="))] = int(child)
    return found


def _read(path: str) -> str:
    """A file of /proc; nothing where its process has just ended."""
    with suppress(OSError):
        return Path(path).read_text()
    return ""


def wait_until(condition: Callable[[], bool], run: subprocess.Popen[bytes]) -> float:
    """The time at which a condition holds; AssertionError if the run ends."""
    while not condition():
        assert run.poll() is None, "torchrun has ended"
        time.sleep(0.05)
    return time.perf_counter()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
