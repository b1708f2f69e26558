"""What a file is by its bytes, where its name promises something else."""

import re
from pathlib import Path

import numpy as np

_READ = 2**16
_CONTROLS = bytes({*range(32)} - {*b"\t\n\v\f\r\x1b"})
"""Bytes that text has none of. They are a tenth of packed data, and more of numbers."""
_STRAY = 32
"""So many of them may be there by accident."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NO_BRACKETS = bytes({*range(256)} - {*b"[]{}"})
_KINDS = (
    (rb"version https://git-lfs", "a pointer of Git LFS: git lfs pull fetches the file itself"),
    (rb"\x1f\x8b", "packed by gzip: unpack it"),
    (rb"\x28\xb5\x2f\xfd", "packed by zstd: unpack it"),
    (rb"BZh[1-9]1AY&SY", "packed by bzip2: unpack it"),
    (rb"\xfd7zXZ\0", "packed by xz: unpack it"),
    (rb"PK\x03\x04", "a zip archive: unpack it"),
    (rb".{257}ustar", "a tar archive: unpack it"),
    (rb"ARROW1|\xff\xff\xff\xff.{3}\0", "an Arrow file: write it as parquet"),
    (rb"GGUF", "a GGUF file: take the model as safetensors"),
    (rb"\xff\xfe|\xfe\xff", "text in UTF-16: convert it to UTF-8"),
)


def told_by(path: Path) -> str | None:
    """What a file is and what to do with it, in words; None if it may be what its name says.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        begin = file.read(512)
    return next((said for kind, said in _KINDS if re.match(kind, begin, re.DOTALL)), None)


def not_text(path: Path) -> str | None:
    """Why a file is not text, as `told_by`; None if it may be text, in UTF-8 or in an encoding of single bytes."""
    if said := told_by(path):
        return said
    with path.open("rb") as file:
        begin = file.read(_READ)
    controls = len(begin) - len(begin.translate(None, _CONTROLS))
    if controls <= max(_STRAY, len(begin) // 100):
        return None
    return f"no text: {controls} of its first {len(begin)} bytes are control characters; write what it holds as text"


def nests_beyond(path: Path, most: int) -> bool:
    """Whether lists and objects in a file of JSON are nested more than `most` levels deep. OSError as `told_by`."""
    depth, rest = 0, b""  # the rest is of a string that has not ended: its quote, and half of an escape
    with path.open("rb") as file:
        while piece := file.read(2**20):
            outside = _STRING.sub(b"", rest + piece + b"|")
            escapes = len(piece) - len(piece.rstrip(b"\\"))
            rest = b"" if outside.endswith(b"|") else b'"' + b"\\" * (escapes % 2)
            brackets = np.frombuffer(outside.translate(None, _NO_BRACKETS), np.uint8)
            depths = depth + np.cumsum(np.where((brackets == ord("[")) | (brackets == ord("{")), 1, -1))
            if depths.size:
                if depths.max() > most:
                    return True
                depth = max(0, int(depths[-1]))
    return False
