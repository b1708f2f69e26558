"""How tests run what a user types: real processes, marked so that each can be found, and none outlives its test.

A launcher's stages have sessions of their own, so no process group holds them all; they inherit the mark. What starts
with `THINWIRE` or `TORCHRUN` is a fork of a process that has imported torch; `NEW_THINWIRE` is a new interpreter.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path

from support import forked
from support.processes import MARK
from thinwire.launch.processes import heartbeat

THINWIRE = [forked.THINWIRE]
NEW_THINWIRE = ["env", *THINWIRE]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TRAIN = ["-m", "thinwire.launch.train"]
TIMEOUT = 240


def node_of_two(rank, *options, address="127.0.0.1", port=29500, processes=1, restarts=0):
    """The words with which torchrun starts the processes of one of two hosts; the options begin with a recipe."""
    where = ["--nnodes", 2, "--node-rank", rank, "--nproc-per-node", processes, "--max-restarts", restarts]
    words = [*TORCHRUN, *where, "--master-addr", address, "--master-port", port, *TRAIN, *options]
    return list(map(str, words))


class Command:
    """A started command; what it writes goes to files, so that nothing waits for a reader."""

    def __init__(self, arguments, folder, environment):
        self.mark = uuid.uuid4().hex
        self._files = [folder / f"{self.mark}.{name}" for name in ("stdout", "stderr")]
        words = [str(argument) for argument in arguments]
        own = {name: str(value) for name, value in environment.items()}
        given = {"cwd": folder, "env": {**os.environ, **own, MARK: self.mark}}
        with self._files[0].open("w") as stdout, self._files[1].open("w") as stderr:
            if call := forked.call_of(words, folder):
                self.process = forked.Forked(call, self._files, **given)
            else:
                self.process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True, **given
                )

    @property
    def stdout(self):
        return self._files[0].read_text()

    @property
    def stderr(self):
        return self._files[1].read_text()

    def wait(self, timeout=TIMEOUT):
        """The exit status; AssertionError with all that was written when there is none in time."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.terminate()  # stages say then what they were doing
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            raise AssertionError(f"no end within {timeout} s\n{self.stdout}\n{self.stderr}") from None

    def wait_until(self, condition, timeout=TIMEOUT):
        """Wait until `condition()`; AssertionError when the command ends first, or the time does."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, f"ended with status {self.process.returncode}\n{self.stderr}"
            assert time.monotonic() < deadline, f"not within {timeout} s\n{self.stdout}\n{self.stderr}"
            time.sleep(0.05)

    def processes(self):
        """Every living process that this command or its offspring started: pid -> its environment."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                lines = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            environment = dict(line.decode(errors="replace").partition("=")[::2] for line in lines if line)
            if environment.get(MARK) == self.mark:
                found[int(entry.name)] = environment
        return found

    def stage_processes(self):
        """The stage processes: rank -> pid. One that was forked shows the environment of its launcher, but its name."""
        found = {}
        for pid, environment in self.processes().items():
            with suppress(OSError):
                named = Path(f"/proc/{pid}/comm").read_text().split()
                if named == [heartbeat.NAME]:
                    continue
                rank = named[1] if named[0] == "thinwire" and len(named) == 2 else environment.get("RANK")
                found |= {int(rank): pid} if rank is not None and rank.isdecimal() else {}
        return found

    def stage_process(self, rank):
        """The pid of one rank."""
        return self.stage_processes()[rank]

    def kill(self):
        """End all its processes."""
        while alive := self.processes():
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.05)
        self.process.wait()


@contextmanager
def started(arguments, folder, **environment):
    """A Command, killed on leaving if it still runs."""
    command = Command(arguments, folder, environment)
    try:
        yield command
    finally:
        command.kill()


def completed(arguments, folder, timeout=TIMEOUT, **environment):
    """A Command that has ended, with its `status`."""
    with started(arguments, folder, **environment) as command:
        command.status = command.wait(timeout)
    return command


def free_port():
    """A TCP port that nothing listens on just now, below those that the system gives to connections meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
