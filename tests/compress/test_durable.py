"""Files that are whole or not there, whoever writes them."""

import os
from pathlib import Path

import pytest

from thinwire.compress.stores.durable import write_durably, write_for_user
from thinwire.errors.files import SIGNATURE


def test_several_processes_may_write_one_file_at_the_same_time(tmp_path, monkeypatch):
    """In containers that share the folder all had one pid, and one took away the unfinished file of the other."""
    path, others, fsync = tmp_path / "newest.json", iter([b"theirs"]), os.fsync

    def slow(descriptor):
        for content in others:
            write_durably(path, content)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    monkeypatch.setattr(os, "getpid", lambda: 10)
    write_durably(path, b"ours")
    assert path.read_text() == "ours"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_durably(path, b"before")

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(path), "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_durably(path, b"after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_of_a_user_is_whole_or_as_it_was(tmp_path, monkeypatch):
    old, new, newer = (f"{word} {SIGNATURE}".encode() for word in ("old", "new", "newer"))
    (tmp_path / "file").write_bytes(old)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_for_user(tmp_path / "link", new)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_bytes() == new
    with monkeypatch.context() as patched, pytest.raises(OSError, match="full"):
        patched.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("full")))
        write_for_user(tmp_path / "file", newer)
    assert (tmp_path / "file").read_bytes() == new and len([*tmp_path.iterdir()]) == 2


def test_a_device_is_written_to_and_never_replaced():
    write_for_user(Path("/dev/null"), b"anything")
    assert Path("/dev/null").is_char_device()
