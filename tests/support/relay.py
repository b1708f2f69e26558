"""A process's way to another one through a relay that a test can break, hold up, slow down, or close."""

import socket
import threading
import time
from contextlib import suppress

SEEN_BYTES = 1 << 16
MORE, COMMAND = 1, 4
"""Flags of a frame of ZeroMQ that nothing encrypts: its message goes on in the next frame; it is a command."""
_GREETING_BYTES = 64


class _Frames:
    """Where the frames of ZeroMQ begin in what passes in one direction."""

    def __init__(self):
        self._left, self._header = _GREETING_BYTES, b""

    def begin_in(self, data):
        """The places in `data` of the flags of frames."""
        at = 0
        while at < len(data):
            if self._left:
                passed = min(self._left, len(data) - at)
                self._left, at = self._left - passed, at + passed
                continue
            if not self._header:
                yield at
            self._header, at = self._header + data[at : at + 1], at + 1
            if len(self._header) == (9 if self._header[0] & 2 else 2):
                self._left, self._header = int.from_bytes(self._header[1:]), b""


class Relay:
    """Listens on loopback and passes every connection on to `endpoint` (tcp://host:port), after `delay` seconds.

    `seen` are the first bytes that it passed on, `passed` is the number of all; `accepted` and `ended` are numbers of
    connections.
    """

    def __init__(self, endpoint, delay=0.0):
        self._delay = delay
        self.point_at(endpoint)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets, self._lock, self._flowing = [], threading.Lock(), threading.Event()
        self._flowing.set()
        self.accepted, self.ended, self.passed, self.seen = 0, 0, 0, bytearray()
        self._damages, self._draw = False, None
        threading.Thread(target=self._accept, daemon=True).start()

    def point_at(self, endpoint):
        """Pass new connections on to another one."""
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._target = host, int(port)

    def cut(self):
        """Reset every connection that there is; what was on the way is lost."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for one in sockets:
            with suppress(OSError):
                # linger 0: the peer gets a reset when the socket's own thread closes it; a thread that still reads
                # from a socket that is closed here would read from the next one with this number
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                one.shutdown(socket.SHUT_RDWR)

    def hush(self):
        """Pass nothing on, and keep all connections."""
        self._flowing.clear()

    def go_on(self):
        """The opposite of `hush`."""
        self._flowing.set()

    def damage(self):
        """Change a byte of what comes back next."""
        self._damages = True

    def change_flags(self, draw):
        """Change a flag of one frame in eight from now on, as a draw of random numbers says."""
        self._draw = draw

    def close(self):
        """End it all."""
        self._listener.close()
        self.cut()
        self._flowing.set()

    def _accept(self):
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            self._flowing.wait()
            try:
                there = socket.create_connection(self._target)
            except OSError:
                here.close()
            else:
                with self._lock:
                    self._sockets += [here, there]
                threading.Thread(target=self._serve, args=(here, there), daemon=True).start()

    def _serve(self, here, there):
        back = threading.Thread(target=self._pass, args=(there, here, True), daemon=True)
        back.start()
        self._pass(here, there)
        back.join()
        here.close()
        there.close()
        self.ended += 1

    def _pass(self, source, sink, back=False):
        frames = _Frames()
        with suppress(OSError):
            while data := source.recv(1 << 16):
                places = [*frames.begin_in(data)]
                self._flowing.wait()
                if self._delay:
                    time.sleep(self._delay)
                if back and self._damages:
                    self._damages, data = False, data[:-1] + bytes([data[-1] ^ 1])
                if self._draw is not None:
                    data = bytearray(data)
                    for place in places:
                        data[place] ^= self._draw.choice([0] * 14 + [MORE, COMMAND])
                self.seen += data[: max(0, SEEN_BYTES - len(self.seen))]  # before anyone can answer
                sink.sendall(data)
                self.passed += len(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
