"""Words in the rendezvous store: JSON behind the CRC-32 of its text, eight hex digits and a space.

The store belongs to torch, which sends its values without a checksum; and whoever reaches it can write there.
"""

from __future__ import annotations

import json
from typing import Any

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
