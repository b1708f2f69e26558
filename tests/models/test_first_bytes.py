import bz2
import gzip
import io
import lzma
import tarfile
import zipfile

import numpy as np
import pytest

from support.parts import read
from thinwire.models.data.parts import Part
from thinwire.models.errors import ModelError
from thinwire.models.first_bytes import nests_beyond, not_text, told_by

TEXT = b"the cat sat on a mat\n" * 50


def tar():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a"), io.BytesIO())
    return file.getvalue()


def zipped():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a", TEXT)
    return file.getvalue()


FOREIGN = {
    "gzip": (gzip.compress(TEXT), "packed by gzip: unpack it"),
    "bzip2": (bz2.compress(TEXT), "packed by bzip2: unpack it"),
    "xz": (lzma.compress(TEXT), "packed by xz: unpack it"),
    "zstd": (b"\x28\xb5\x2f\xfd\x04", "packed by zstd: unpack it"),
    "zip": (zipped(), "a zip archive: unpack it"),
    "tar": (tar(), "a tar archive: unpack it"),
    "arrow": (b"ARROW1\0\0", "an Arrow file: write it as parquet"),
    "utf-16": (TEXT.decode().encode("utf-16"), "text in UTF-16: convert it to UTF-8"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "a pointer of Git LFS: git lfs pull fetches"),
    "tokens": (np.arange(2000, dtype=np.uint16).tobytes(), "no text: 2208 of its first 4000"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_that_is_no_text_is_told_by_its_first_bytes(tmp_path, kind):
    """Its bytes were trained on."""
    content, told = FOREIGN[kind]
    (tmp_path / "train.bin").write_bytes(content)
    with pytest.raises(ModelError, match=f"train.bin must hold text, and is {told}"):
        read("text", Part(str(tmp_path / "train.bin")))


@pytest.mark.parametrize("content", [b"", TEXT, "é ü\r\n".encode("latin-1") * 99, "日本\n".encode() * 99, TEXT + b"\0"])
def test_text_of_any_encoding_by_bytes_is_text(tmp_path, content):
    (tmp_path / "text").write_bytes(content)
    assert told_by(tmp_path / "text") is not_text(tmp_path / "text") is None


@pytest.mark.parametrize("before", [0, 1, 2**20 - 9, 2**20 - 4, 2**20 - 3, 2**20 - 1])
def test_nesting_is_counted_beyond_strings_wherever_a_piece_of_the_file_ends(tmp_path, before):
    (tmp_path / "a.json").write_bytes(b" " * before + rb'{"a[[[\"[\\": [["[[[", "]]]", ["\\\\"]]]}' + b"\n{}" * 9)
    assert not nests_beyond(tmp_path / "a.json", 4)
    assert nests_beyond(tmp_path / "a.json", 3)
