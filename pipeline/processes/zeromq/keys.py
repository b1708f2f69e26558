"""The pair of keys of a run. A process with the keys may connect and is trusted; others can read and send nothing.

One pair for all processes is the simplest protection against a stranger who can reach every port and the rendezvous
store, because no key is sent over them. It does not separate the processes of a run from each other.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

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
        """A new random pair."""
        return cls(*zmq.curve_keypair())

    @classmethod
    def read(cls, path: Path) -> Keys:
        """The pair in a file. OptionsError if there is no such file, it holds no key, or others may read it."""
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
        """Write the pair into a new file that only its owner can read. FileExistsError if the file exists.

        If it cannot be written, as on a full disk, no file is left.
        """
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(self.secret + b"\n")
        except OSError:
            path.unlink(missing_ok=True)
            raise

    @property
    def fingerprint(self) -> str:
        """A text that differs from pair to pair, and reveals nothing about the keys."""
        return sha256(self.public).hexdigest()[:16]

    def serve(self, socket: zmq.Socket[Any]) -> None:
        """Let a socket accept processes that prove they have this pair. ZAP decides who may connect (`admits`)."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.zap_domain = b"thinwire"
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def prove(self, socket: zmq.Socket[Any]) -> None:
        """Let a socket connect only to a process that proves it has this pair, and prove the same to it."""
        socket.curve_serverkey = self.public
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret

    def admits(self, mechanism: bytes, credentials: bytes) -> bool:
        """Whether the process that connects has proved that it has this pair."""
        return mechanism == b"CURVE" and credentials == z85.decode(self.public)
