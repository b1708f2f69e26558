"""`thinwire keys`: a file for its owner alone, and a sentence where there can be none."""

import resource

import pytest

pytest.importorskip("zmq", reason="needs pyzmq")

from thinwire.launch import cli
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.options import WireOptions
from thinwire.pipeline.processes.backends import group_arguments
from thinwire.pipeline.processes.zeromq.keys import Keys


def test_it_makes_a_file_of_keys(tmp_path, capsys):
    assert cli.main(["keys", str(tmp_path / "keys")]) == 0
    keys = Keys.read(tmp_path / "keys")
    told = capsys.readouterr()
    assert keys.secret.decode() not in told.out + told.err


def test_it_replaces_no_file(tmp_path, capsys):
    (tmp_path / "keys").write_text("mine")
    assert cli.main(["keys", str(tmp_path / "keys")]) == 2
    assert "needs the name of a new file, but" in capsys.readouterr().err
    assert (tmp_path / "keys").read_text() == "mine"


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path, capsys):
    assert cli.main(["keys", str(tmp_path / "nowhere/keys")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_disk_that_is_full_keeps_no_file_without_keys(tmp_path, capsys):
    """The same command was refused ever after, because the file existed."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        assert cli.main(["keys", str(tmp_path / "keys")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot write" in capsys.readouterr().err
    assert not (tmp_path / "keys").exists()


def test_gloo_and_a_single_process_need_no_keys():
    assert group_arguments(WireOptions(), 2) == {"backend": "gloo"}
    assert group_arguments(WireOptions(transport="zmq"), 1) == {"backend": "gloo"}


def test_without_keys_there_is_no_group(monkeypatch):
    monkeypatch.delenv("THINWIRE_KEYS", raising=False)
    with pytest.raises(OptionsError, match=r"wire\.keys must name a file of keys"):
        group_arguments(WireOptions(transport="zmq"), 2)


def test_keys_of_the_transport_are_read_before_the_data(folder, capsys):
    assert cli.main(["keys", "run.keys"]) == 0
    (folder / "run.keys").chmod(0o644)
    assert cli.main(["train", "tiny.yaml", "--wire.transport", "zmq", "--wire.keys", "run.keys"]) == 2
    told = capsys.readouterr().err
    assert "run chmod 600 run.keys" in told and "reading the data" not in told
