"""Commands as forks of one process, which has imported torch once; each new interpreter would need seconds for it.

What a command starts as a new interpreter with a module of ours or of torch, as torchrun does its workers, or with a
script is a fork too: of a nursery, a process that was forked before the command began. The fork's parent is whoever
started it.
"""

import ctypes
import fcntl
import functools
import gc
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from multiprocessing import current_process, get_context
from pathlib import Path
from typing import NamedTuple

import torch

from support.processes import MARK, begin
from thinwire.launch.processes.parent import name_process
from thinwire.launch.run.parts import results

THINWIRE, TORCHRUN = (str(Path(sys.executable).with_name(name)) for name in ("thinwire", "torchrun"))
TESTS = Path(__file__).parents[1]
_CLONE_NEWNET = 0x40000000
_PR_SET_CHILD_SUBREAPER = 36


class Call(NamedTuple):
    """A command that can be forked."""

    network: str | None
    """The network namespace that it runs in, if it is not ours."""
    cores: set[int] | None
    """The cores that it runs on, if not on all."""
    run: Callable[[str], object]
    """Runs it, given what it is called by."""
    first: str
    """The folder where it looks for modules first."""
    words: list[str]
    """What it is called by, and its arguments."""


def call_of(words, folder):
    """The call that a command makes in a folder; None if it is not `thinwire`, or Python with a module or script."""
    network = cores = None
    if words[:3] == ["ip", "netns", "exec"]:
        network, words = words[3], words[4:]
    if words[:2] == ["taskset", "-c"]:
        cores, words = {int(words[2])}, words[3:]
    if words[0] == THINWIRE:
        return Call(network, cores, _thinwire, str(Path(THINWIRE).parent), words)
    if words[0] == TORCHRUN:
        words = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    if words[0] == sys.executable:
        words = [words[0], *words[1 + (words[1] == "-u") :]]
        if words[1] == "-m":
            return Call(network, cores, _module, str(folder), words[2:])
        if words[1].endswith(".py"):
            return Call(network, cores, _script, str(Path(folder, words[1]).parent), words[1:])
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
    """Become what a new interpreter would be, in a session of its own, and run the call."""
    _prepare(call, environment)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    files = [os.open(os.devnull, os.O_RDONLY), *(os.open(path, os.O_WRONLY | os.O_APPEND) for path in outputs)]
    _become(call, dict(enumerate(files)), folder, environment)
    call.run(call.words[0])


def _prepare(call, environment, files=()):
    """Go where the call runs, and have a nursery there, without these files; a stage process starts no interpreter."""
    if call.network:
        _enter(call.network)
    if call.cores:
        os.sched_setaffinity(0, call.cores)
    gc.freeze()  # what is imported is shared with the process that was forked, as long as no collection touches it
    if "RANK" not in environment:
        nursery = _own_nursery(files)
        fork_interpreters(lambda: nursery)
    results.save_picture = lambda path, *_: path.write_bytes(b"")  # it would take a third of a short run


def _become(call, files, folder, environment):
    """Become what a new interpreter would be that runs the call; it gets these files by their numbers."""
    _show_mark(environment.get(MARK))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it is where the first TMPDIR was
    for number, file in files.items():
        os.dup2(file, number)
        os.close(file)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    known = [*environment.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    sys.path[:] = [call.first, *(path for path in known if path and TESTS not in (Path(path), *Path(path).parents))]
    sys.argv = call.words


def fork_interpreters(nursery):
    """Have `subprocess` fork what it would start from this process as Python, as far as that can be forked.

    Args:
        nursery: returns the socket of a nursery that is an offspring of this process.
    """
    start, owner, lock = subprocess._fork_exec, os.getpid(), threading.Lock()

    def fork_exec(words, executables, close, kept, folder, environment, *given):
        call = call_of([os.fsdecode(word) for word in words], folder or Path.cwd())
        if call is None or not _is_ours(call) or os.getpid() != owner:
            return start(words, executables, close, kept, folder, environment, *given)
        variables = dict(os.environ)
        if environment is not None:
            variables = dict(os.fsdecode(word).split("=", 1) for word in environment)
        stdin, _, _, stdout, _, stderr, _, begun, _, leads = given[:10]
        files = {number: number if own == -1 else own for number, own in enumerate((stdin, stdout, stderr))}
        files |= {number: number for number in kept}
        ignored = [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
        wanted = (call, list(files), begun, str(folder or Path.cwd()), variables, bool(leads), ignored)
        with lock, _adopting():
            socket.send_fds(nursery(), [pickle.dumps(wanted)], list(files.values()))
            return int(nursery().recv(20))

    subprocess._fork_exec = fork_exec


def _is_ours(call):
    """Whether it is a module of ours or of torch, or a script that no library brings."""
    if call.run is _script:
        return Path(sys.prefix) not in Path(call.words[0]).parents
    return call.run is _module and call.words[0].partition(".")[0] in ("thinwire", "torch")


@contextmanager
def _adopting():
    """Offspring of this process whose parents end become its children."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    yield
    prctl(_PR_SET_CHILD_SUBREAPER, 0)


def nurse(asked):
    """Fork what is asked for on a socket, as an orphan, until nobody is left who could ask."""
    current_process()._config["daemon"] = False  # multiprocessing would forbid it
    while True:
        text, files, *_ = socket.recv_fds(asked, 1 << 20, 50)
        if not text:
            return
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            asked.close()
            child = get_context("fork").Process(target=_live_as, args=(os.getpid(), files, *pickle.loads(text)))
            child.start()
            os.write(writing, str(child.pid).encode())
            os._exit(0)
        for file in (writing, *files):
            os.close(file)
        os.waitpid(between, 0)
        asked.send(os.read(reading, 20))
        os.close(reading)


@functools.cache
def nursery():
    """The socket of a nursery for this process, which may have threads; made when it is first asked for."""
    ours, theirs = _pair()
    begin(nurse, theirs, daemon=True)
    theirs.close()
    return ours


def _pair():
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _own_nursery(files=()):
    """The socket of a nursery that is a fork of this process, without these files."""
    ours, theirs = _pair()
    if os.fork() == 0:
        for file in (ours.detach(), *files):
            os.close(file)
        nurse(theirs)
        os._exit(0)
    theirs.close()
    return ours


def _live_as(between, files, call, numbers, begun, folder, environment, leads, ignored):
    """Become what a new interpreter would be, once the process between has ended, and run the call."""
    while os.getppid() == between:
        time.sleep(0.001)
    _prepare(call, environment, files)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    if leads:
        os.setsid()
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, 200) for file in files]
    for file in files:
        os.close(file)
    given = dict(zip(numbers, high, strict=True))
    parent_waits = given.pop(begun)
    _become(call, given, folder, environment)
    rank, module = environment.get("RANK"), ".".join(call.words[0].split(".")[-2:])
    name_process(f"thinwire {rank}" if rank else module)  # /proc has the command and environment of the nursery
    # torch has read TORCH_CPP_LOG_LEVEL of another environment
    ctypes.CDLL(Path(torch.__file__).with_name("lib") / "libc10.so")["_ZN3c1011initLoggingEv"]()
    os.close(parent_waits)
    call.run(call.words[0])


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
