"""Words in the rendezvous store: JSON behind the CRC-32 of its text, eight hex digits and a space.

The store belongs to torch, which sends its values without a checksum; and whoever reaches it can write there.
"""

from __future__ import annotations

import json
import socket
import struct
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from isal import isal_zlib

from thinwire.pipeline.errors import WireError


def written(value: Any) -> str:
    """A JSON value as a word for the store."""
    text = json.dumps(value)
    return f"{isal_zlib.crc32(text.encode()):08x} {text}"


def read(word: bytes, must: str) -> Any:
    """The value of a word. WireError if it is none, or damaged; `must` says who must post what."""
    checksum, _, text = word.partition(b" ")
    try:
        if checksum != b"%08x" % isal_zlib.crc32(text):
            raise ValueError("it does not match its CRC-32: it was damaged, or another program wrote it")
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"{must}, and the rendezvous store has something else: {error}") from error


def limit_answers(store: dist.Store, limit: timedelta) -> None:
    """Let calls of a store over TCP raise DistNetworkError when an answer takes longer than `limit`.

    torch waits for an answer without limit, also behind its own time-out: for ever where bytes were lost on the way.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return
    seconds, rest = divmod(limit // timedelta(microseconds=1), 1_000_000)
    for each in Path("/dev").glob("fd/*"):  # torch does not say which socket is the store's
        with suppress(OSError), socket.fromfd(int(each.name), socket.AF_INET, socket.SOCK_STREAM) as one:
            if one.getpeername()[1:2] == (store.port,):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, rest))
