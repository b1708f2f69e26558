import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from support.small_disk import mounted
from thinwire.launch.shared import scratch
from thinwire.launch.shared.exit_codes import FailedError


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_process_started_later_under_the_same_number_is_another():
    assert scratch.is_alive(scratch.owner())
    assert not scratch.is_alive(f"{os.getpid()}-1")


def test_a_folder_is_removed_on_leaving(temporary):
    with scratch.folder() as made:
        assert Path(made).parent == temporary
        assert Path(made).is_dir()
    assert list(temporary.iterdir()) == []


def test_a_folder_is_elsewhere_once_tmpdir_is_gone(temporary):
    """A run that was to start again ended with a traceback."""
    with scratch.folder():
        pass
    temporary.rmdir()
    with scratch.folder() as made:
        assert made.is_dir()


def test_a_folder_is_elsewhere_while_tmpdir_is_full(temporary, monkeypatch):
    """Each start of a run failed at its first checkpoint, as the one before."""
    with mounted(temporary / "small", "size=2m") as small:
        monkeypatch.setenv("TMPDIR", str(small))
        with scratch.folder() as made:
            assert made.parent == small
        with suppress(OSError), (small / "all of it").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        with scratch.folder() as made:
            assert made.parent != small


def test_a_machine_without_a_place_for_the_folder_is_told(monkeypatch):
    def none():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(FailedError, match="TMPDIR must name a folder that can be written: No usable"), scratch.folder():
        pass


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


def test_what_another_user_put_beside_the_folders_stays_and_stops_nothing(temporary):
    """A killed run of one user made the runs of all others fail, and a pipe kept them waiting for ever."""
    theirs, pipe = (temporary / f"thinwire-{os.getpid()}-1-{name}" for name in ("theirs", "pipe"))
    theirs.mkdir(mode=0o700)
    os.mkfifo(pipe)
    with suppress(PermissionError):  # only root can give it to somebody
        os.chown(theirs, 65534, 65534)
    removed = scratch.remove_orphans()
    assert pipe.exists() and str(pipe) not in removed
    assert theirs.exists() == (os.getuid() == 0)
