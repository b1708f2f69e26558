"""The pair of keys of a run: who holds it may connect, and is trusted; nobody else gets a byte in, or reads one.

One pair for all processes is the simplest that holds against a stranger who reaches every port and the rendezvous
store: no key travels over either. It tells no process from another.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import zmq
from zmq.utils import z85

from thinwire.pipeline.errors import OptionsError

_LENGTH = 40
"""Characters of a key in Z85."""


@dataclass(frozen=True)
class Keys:
    """A pair of CURVE keys."""

    public: bytes = field(repr=False)
    secret: bytes = field(repr=False)

    @classmethod
    def fresh(cls) -> Keys:
        """A pair that nobody else has."""
        return cls(*zmq.curve_keypair())

    @classmethod
    def read(cls, path: Path) -> Keys:
        """The pair in a file. OptionsError if it is not there, holds no key, or others may read it."""
        try:
            with path.open("rb") as file:
                mode, text = os.fstat(file.fileno()).st_mode, file.read(_LENGTH + 2).strip()
        except OSError as error:
            raise OptionsError(
                f"wire.keys must be a file that thinwire keys made, got {path}: {error.strerror or error}"
            ) from error
        if mode & 0o077:
            raise OptionsError(f"nobody but its owner may read the file of wire.keys; run chmod 600 {path}")
        try:
            return cls(zmq.curve_public(text), text)
        except (ValueError, zmq.ZMQError) as error:
            raise OptionsError(f"wire.keys must be a file that thinwire keys made; {path} holds no key") from error

    def write(self, path: Path) -> None:
        """Put the pair into a new file that its owner alone can read. FileExistsError if there is one."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(self.secret + b"\n")

    @property
    def fingerprint(self) -> str:
        """Tells pairs apart, and gives nothing away."""
        return sha256(self.public).hexdigest()[:16]

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Have a socket accept those who prove that they know this pair; who may connect, ZAP says (`admits`)."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.zap_domain = b"thinwire"
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def prove(self, socket: zmq.Socket[bytes]) -> None:
        """Have a socket connect only to an end that proves that it has this pair, and prove the same."""
        socket.curve_serverkey = self.public
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret

    def admits(self, mechanism: bytes, credentials: bytes) -> bool:
        """Whether who connects proved to hold this pair."""
        return mechanism == b"CURVE" and credentials == z85.decode(self.public)
