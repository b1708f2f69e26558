import os
import tempfile
from pathlib import Path

import pytest

from thinwire.launch.hosts import namespaces
from thinwire.launch.shared import scratch


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_process_started_later_under_the_same_number_is_another():
    assert scratch.is_alive(scratch.owner())
    assert not scratch.is_alive(f"{os.getpid()}-1")
    assert namespaces._in_use(f"{namespaces.NETWORK_PREFIX}-{scratch.owner()}-0-switch")
    assert not namespaces._in_use(f"{namespaces.NETWORK_PREFIX}-{os.getpid()}-1-0-switch")


def test_a_folder_is_removed_on_leaving(temporary):
    with scratch.folder() as made:
        assert Path(made).parent == temporary
        assert Path(made).is_dir()
    assert list(temporary.iterdir()) == []


def test_only_folders_of_processes_that_are_gone_are_orphans(temporary):
    """A killed run left its folder for good."""
    kept = [temporary / "thinwire-notes", temporary / "thinwire-1-data", temporary / f"x-{os.getpid()}-1-abc"]
    left = temporary / f"thinwire-{os.getpid()}-1-abc_1"
    for path in (*kept, left):
        path.mkdir()
    (left / "0.json").write_text("{}")
    with scratch.folder() as made:
        assert scratch.remove_orphans() == [str(left)]
        assert sorted(temporary.iterdir()) == sorted([*kept, Path(made)])
