"""Files that are whole or not there, whoever writes them."""

import os

import pytest

from thinwire.compress.stores.durable import write_durably


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
