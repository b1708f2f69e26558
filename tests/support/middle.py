"""A network namespace in which every TCP connection passes through this process, which damages one of them once."""

import ctypes
import os
import random
import shutil
import socket
import struct
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

PORT = 9
_MARK, _SO_ORIGINAL_DST, _CLONE_NEWNET = 1, 80, 0x40000000
DAMAGES = ("flipped", "noise", "dropped", "twice", "cut", "reset", "silent", "one silent")
"""What may happen to bytes on their way; the last four end, or silence, a connection or all of them."""


def missing():
    """Why this machine can have no such namespace; empty if it can."""
    if os.geteuid() != 0:
        return "needs root, for a network namespace whose connections pass through a test"
    if absent := [tool for tool in ("ip", "iptables") if not shutil.which(tool)]:
        return f"needs {' and '.join(absent)}, for a network namespace whose connections pass through a test"
    try:
        with middle():
            return ""
    except subprocess.CalledProcessError as error:
        return f"needs a network namespace with iptables: {error.stderr.strip()}"


@contextmanager
def middle():
    """A `Middle`; its namespace ends with it."""
    name = f"thinwire-middle-{os.getpid()}-{time.monotonic_ns()}"
    subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True, text=True)
    try:
        redirect = f"iptables -w -t nat -A OUTPUT -p tcp -m mark ! --mark {_MARK} -j REDIRECT --to-ports {PORT}"
        for line in ("ip link set lo up", redirect):
            words = ["ip", "netns", "exec", name, *line.split()]
            subprocess.run(words, check=True, capture_output=True, text=True)
        one = Middle(name)
        try:
            yield one
        finally:
            one.close()
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


class Middle:
    """What is between all processes of a namespace.

    Attributes:
        name: of the namespace.
        passed: how many bytes have passed.
        damaged: where something happened: which connection, whether on its way back, and its byte.
    """

    def __init__(self, name):
        self.name = name
        self.forget()
        self._sockets, self._lock = [], threading.Lock()
        begun = threading.Event()
        threading.Thread(target=self._accept, args=[begun], daemon=True).start()
        begun.wait()

    def forget(self):
        """Pass on as it comes from now on, and count anew."""
        self.passed, self.accepted, self.damaged = 0, 0, None
        self._at, self._damage, self._draw, self._silent, self._then = None, None, None, False, None

    def prepare(self, damage, at, seed):
        """Do damage to what passes as byte `at` of all; a callable is called then instead."""
        self.forget()
        self._damage, self._at, self._draw = damage, at, random.Random(seed)

    def end_all(self):
        """Close every connection that there is."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for one in sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self):
        """End it all."""
        self._listener.close()
        self.end_all()

    def _accept(self, begun):
        descriptor = os.open(Path("/run/netns", self.name), os.O_RDONLY | os.O_CLOEXEC)
        assert ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) == 0  # of this thread alone
        os.close(descriptor)
        self._listener = socket.create_server(("127.0.0.1", PORT))
        begun.set()
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            number, self.accepted = self.accepted, self.accepted + 1
            threading.Thread(target=self._serve, args=(here, number), daemon=True).start()

    def _serve(self, here, number):
        _, port, host = struct.unpack("!2sH4s8x", here.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16))
        if (there := _reached(socket.inet_ntoa(host), port)) is None:
            _reset(here)
            return
        for one in (here, there):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._sockets += [here, there]
        back = threading.Thread(target=self._pass, args=(there, here, number, True), daemon=True)
        back.start()
        self._pass(here, there, number, False)
        back.join()
        here.close()
        there.close()

    def _pass(self, source, sink, number, back):
        silent = False
        with suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:
                    before, self.passed = self.passed, self.passed + len(data)
                    mine = self._at is not None and before <= self._at < self.passed
                if mine and callable(self._damage):
                    self._damage()
                    self.damaged = number, back, data[:16]
                elif mine:
                    place = self._at - before
                    self.damaged = number, back, data[max(0, place - 8) : place + 8]
                    data, what = self._changed(bytearray(data), place)
                    silent = what == "one silent"
                    self._silent = what == "silent"
                    if what in ("cut", "reset"):
                        sink.sendall(data)
                        for one in (source, sink):
                            (_reset if what == "reset" else _end)(one)
                        return
                if not silent and not self._silent:
                    sink.sendall(data)
        for one in (source, sink):
            _end(one)

    def _changed(self, data, place):
        """The data, damaged from a place on; and what becomes of the connection."""
        count = min(self._draw.choice((1, 4, 64, 4096)), len(data) - place)
        if self._damage == "flipped":
            data[place] ^= 1 << self._draw.randrange(8)
        elif self._damage == "noise":
            data[place : place + count] = self._draw.randbytes(count)
        elif self._damage == "dropped":
            del data[place : place + count]
        elif self._damage == "twice":
            data[place:place] = data[place : place + count]
        else:
            del data[place:]
        return data, self._damage


def _reached(host, port):
    """A socket in the namespace of this thread that is connected to a port; None if nothing listens there for long."""
    for _ in range(300):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, _MARK)
        with suppress(OSError):
            one.connect((host, port))
            return one
        one.close()
        time.sleep(0.1)
    return None


def _end(one):
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


def _reset(one):
    with suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        one.shutdown(socket.SHUT_RDWR)
