"""The data of a run is read once a host, by whichever of its processes comes first."""

import os
import threading
from pathlib import Path

import pytest
import torch

from support.commands import THINWIRE, completed
from support.tiny_run import write_recipe
from thinwire.launch.plan import host_data
from thinwire.launch.shared import scratch, variables
from thinwire.models.data import load as loading
from thinwire.models.data.options import DataOptions

OPTIONS = DataOptions(name="text", block_size=16)


@pytest.fixture
def reads(tmp_path, monkeypatch):
    """The seeds of all reads; two processes of this host share a folder."""
    found = []

    def load(options, *, seed):
        found.append(seed)
        return loading.load(options, seed=seed)

    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    monkeypatch.setattr(host_data, "load", load)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv(variables.FAILURES, str(tmp_path))
    return found


def test_the_second_process_maps_what_the_first_has_read(reads):
    first, second = (host_data.load_once(OPTIONS, 0) for _ in range(2))
    assert reads == [0]
    assert second.training.digest == first.training.digest and torch.equal(
        second.training.tokens, first.training.tokens
    )
    host_data.load_once(OPTIONS, 1)
    host_data.load_once(DataOptions(name="text", block_size=8), 1)
    assert reads == [0, 1, 1], "other data has another file"


def test_the_file_goes_once_all_have_it(reads, tmp_path):
    host_data.load_once(OPTIONS, 0)
    kept = host_data.load_once(OPTIONS, 0)
    host_data.discard()
    assert not list(tmp_path.glob("data-*"))
    assert int(kept.training.tokens.sum()) > 0


def test_a_process_alone_shares_nothing(reads, monkeypatch, tmp_path):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    host_data.load_once(OPTIONS, 0)
    host_data.load_once(OPTIONS, 0)
    assert reads == [0, 0] and not list(tmp_path.glob("data-*"))


def test_data_that_cannot_be_written_or_read_is_read_again(reads, monkeypatch, tmp_path):
    monkeypatch.setattr(host_data.torch, "save", lambda data, path: path.write_text("half"))
    host_data.load_once(OPTIONS, 0)
    host_data.load_once(OPTIONS, 0)

    def fails(data, path):
        raise TypeError("cannot pickle a lock")

    monkeypatch.setattr(host_data.torch, "save", fails)
    host_data.load_once(OPTIONS, 2)
    assert reads == [0, 0, 2] and not list(tmp_path.glob("*.part"))


def test_who_comes_second_waits_for_who_is_reading(reads, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    read = host_data.load

    def slowly(options, *, seed):
        begun.set()
        go_on.wait()
        return read(options, seed=seed)

    monkeypatch.setattr(host_data, "load", slowly)
    both = [threading.Thread(target=host_data.load_once, args=(OPTIONS, 0)) for _ in range(2)]
    both[0].start()
    begun.wait()
    both[1].start()
    go_on.set()
    for one in both:
        one.join()
    assert reads == [0]


def test_the_folder_of_the_parent_is_ours_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = scratch.of_parent()
    assert folder == scratch.of_parent() and folder.stat().st_mode & 0o777 == 0o700
    assert folder.name.startswith(f"thinwire-{os.getppid()}-")
    assert scratch.remove_orphans() == [], "our parent lives"
    folder.chmod(0o777)
    with pytest.raises(PermissionError):
        scratch.of_parent()


SOURCE = """
import os
import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()

def words(split):
    with open("read", "a") as file:
        print(os.getpid(), file=file)
    return ["some words, many times; " * 83]
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_launcher_with_a_thread_calls_a_source_for_all(tmp_path):
    """It does not fork: each stage process is a new interpreter."""
    write_recipe(tmp_path)
    (tmp_path / "my_words.py").write_text(SOURCE)
    ended = completed([*THINWIRE, "train", "tiny.yaml", "--data.name", "my_words:words", "--output", "run"], tmp_path)
    assert ended.status == 0, ended.stderr
    first, second = Path(tmp_path, "read").read_text().split()  # called twice, and compared
    assert first == second
