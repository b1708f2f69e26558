"""The file of keys: nobody but its owner reads it, and it is told from other files."""

import os

import pytest

pytest.importorskip("zmq", reason="needs pyzmq")

from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.processes.zeromq.keys import Keys


def test_a_file_holds_what_was_written_and_only_its_owner_reads_it(tmp_path):
    before = os.umask(0)
    try:
        keys = Keys.fresh()
        keys.write(tmp_path / "keys")
    finally:
        os.umask(before)
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o600
    assert Keys.read(tmp_path / "keys") == keys


def test_a_file_is_never_replaced(tmp_path):
    (tmp_path / "keys").write_text("something else")
    with pytest.raises(FileExistsError):
        Keys.fresh().write(tmp_path / "keys")


def test_no_two_pairs_are_alike_and_none_shows_itself():
    one, other = Keys.fresh(), Keys.fresh()
    assert one != other and one.fingerprint != other.fingerprint
    shown = repr(one) + one.fingerprint
    assert one.secret.decode() not in shown and one.public.decode() not in shown


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_a_file_that_others_reach_is_refused(tmp_path, mode):
    path = tmp_path / "keys"
    Keys.fresh().write(path)
    path.chmod(mode)
    with pytest.raises(OptionsError, match=f"run chmod 600 {path}"):
        Keys.read(path)


@pytest.mark.parametrize("text", [b"", b"not a key", b"x" * 39, b'"' * 40, b"\xff" * 40, b"a" * 100_000])
def test_a_file_without_a_key_is_one_sentence(tmp_path, text):
    path = tmp_path / "keys"
    path.touch(0o600)
    path.write_bytes(text)
    with pytest.raises(OptionsError, match="holds no key"):
        Keys.read(path)


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(
        OptionsError, match=r"wire\.keys must be a file that thinwire keys made, got .*nowhere: No such"
    ):
        Keys.read(tmp_path / "nowhere")
