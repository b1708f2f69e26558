"""Commands as forks of one process, which has imported torch once; each new interpreter would need seconds for it."""

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from support.processes import MARK, begin

THINWIRE = str(Path(sys.executable).with_name("thinwire"))
TESTS = Path(__file__).parents[1]
_CLONE_NEWNET = 0x40000000


class Call(NamedTuple):
    """A command that can be forked."""

    network: str | None
    """The network namespace that it runs in, if it is not ours."""
    run: Callable[[str], object]
    """Runs it, given what it is called by."""
    first: str
    """The folder where it looks for modules first."""
    words: list[str]
    """What it is called by, and its arguments."""


def call_of(words, folder):
    """The call that a command makes in a folder; None if it is not `thinwire`, or Python with a module or script."""
    network = None
    if words[:3] == ["ip", "netns", "exec"]:
        network, words = words[3], words[4:]
    if words[0] == THINWIRE:
        return Call(network, _thinwire, str(Path(THINWIRE).parent), words)
    if words[:2] == [sys.executable, "-m"]:
        return Call(network, _module, str(folder), words[2:])
    if words[0] == sys.executable and words[1].endswith(".py"):
        return Call(network, _script, str(Path(folder, words[1]).parent), words[1:])
    return None


def _thinwire(_):
    from thinwire.launch.cli import main

    sys.exit(main())


def _module(name):
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _script(path):
    runpy.run_path(path, run_name="__main__")


class Forked:
    """A call that runs in a fork, in a session of its own. It has what tests use of `subprocess.Popen`.

    Args:
        call: the call.
        outputs: the files that get what it writes to stdout and stderr.
        cwd: where it runs.
        env: all its environment variables.
    """

    def __init__(self, call, outputs, *, cwd, env):
        self.args = call.words
        self._process = begin(_live, call, outputs, cwd, env)
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def _live(call, outputs, folder, environment):
    """Become what a new interpreter would be, and run the call."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _show_mark(environment.get(MARK))
    if call.network:
        _enter(call.network)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it is where the first TMPDIR was
    _write_to(*outputs)
    known = [*environment.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    sys.path[:] = [call.first, *(path for path in known if path and TESTS not in (Path(path), *Path(path).parents))]
    sys.argv = call.words
    call.run(call.words[0])


def _write_to(stdout, stderr):
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115


def _show_mark(mark):
    """Overwrite the mark where it lies: /proc shows the variables that a process began with, and forks share them."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    place = libc.getenv(MARK.encode())
    if mark and place:
        ctypes.memmove(place, mark.encode(), len(mark))


def _enter(network):
    descriptor = os.open(Path("/run/netns", network), os.O_RDONLY | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {network}")
