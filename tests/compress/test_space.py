"""Room on disks is checked before training, for all processes that share one."""

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from support import processes
from support.recipe_runs import SHORT, TINY
from support.slow_disk import LAYOUT, slots
from thinwire.compress.stores import space
from thinwire.compress.stores.disk import DiskStore
from thinwire.compress.stores.slot_file import SlotFile
from thinwire.compress.stores.space import SpaceNeed, check_space, needs_of
from thinwire.compress.stores.store import StoreError, StoreLayout
from thinwire.launch import cli
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.processes.placement import Placement

DISK = ("this machine", 1)


@pytest.fixture
def free(monkeypatch):
    """Sets how many bytes each file system has free, all of them alike."""
    return lambda nbytes: monkeypatch.setattr(space, "disk_usage", lambda place: SimpleNamespace(free=nbytes))


def check(*stores):
    check_space([needs_of("stores", ((layout.nbytes, path) for layout, path in stores))])


def test_stores_on_one_disk_are_added_up(tmp_path, free):
    wanted = [(LAYOUT, tmp_path / "a"), (StoreLayout(num_slots=100, row_shape=(10,)), Path(tmp_path, "not/yet/b"))]
    free(4960)
    check(*wanted)
    free(4959)
    with pytest.raises(StoreError) as error:
        check(*wanted)
    assert str(error.value) == (
        f"disks must have room before training for all that a run keeps: the stores of 1 process in {tmp_path} will "
        f"take 4.96 kB (4960 bytes) more, but the disk has 4.96 kB (4959 bytes) free; free some space, name a folder "
        f"on a larger disk as compression.store_folder, or keep fewer bits a value with store_bits"
    )
    assert not list(tmp_path.iterdir())


def test_every_disk_that_is_too_small_is_named(tmp_path, free):
    free(100)
    with pytest.raises(StoreError, match=rf"in {tmp_path} will take .* free; .*in /proc will take .* free; free some"):
        check((LAYOUT, tmp_path / "rows"), (LAYOUT, Path("/proc/other")))


def test_what_a_file_takes_already_is_not_needed_again(tmp_path, free):
    layout = StoreLayout(num_slots=4, row_shape=(1 << 14,))
    with closing(DiskStore(layout, tmp_path / "rows")) as store:
        store.write(slots(0, 2), torch.ones(2, 1 << 14))
        store.flush()
    free(2 * layout.row_bytes)
    check((layout, tmp_path / "rows"))
    free(2 * layout.row_bytes - 1)
    with pytest.raises(StoreError, match=rf"\({2 * layout.row_bytes} bytes\) more"):
        check((layout, tmp_path / "rows"))


def test_real_disks_have_numbers(tmp_path):
    check((LAYOUT, tmp_path / "rows"))
    with pytest.raises(StoreError, match=r"will take .*\(4611686018427387904 bytes\) more, but the disk has .*[1-9]"):
        check((StoreLayout(num_slots=1, row_shape=(1 << 60,)), tmp_path / "rows"))


def test_processes_on_one_disk_are_added_up_and_others_are_not():
    """Each of two processes once saw only itself, and a run began that the disk had no room for."""
    need = SpaceNeed(disk=DISK, folder="/fast", nbytes=358, free=500)
    there = [replace(need, disk=("another machine", 1)), replace(need, disk=("this machine", 2))]
    check_space([[need, there[1]], [there[0]]])
    with pytest.raises(StoreError, match=r"the stores of 2 processes in /fast will take .*\(716 bytes\) more"):
        check_space([[need, there[1]], [need], [there[0]]])


def room_for_everyone(rank, folder):
    """Check a disk that has room for one process's store and not for two; the sentence it is refused with."""
    free = os.statvfs(folder)
    layout = StoreLayout(num_slots=6, row_shape=(free.f_bavail * free.f_frsize // 10 // 4,))
    mine = needs_of("stores", [(layout.nbytes, Path(folder, str(rank), "rows"))])
    check_space([mine])
    try:
        everyone = collectives.everyone(Placement({0: 0, 1: 1}), [vars(need) for need in mine])
        check_space([[SpaceNeed(**need) for need in needs] for needs in everyone])
    except StoreError as error:
        return str(error)
    return "nothing"


@pytest.mark.slow
def test_real_processes_are_all_stopped_by_one_sentence(tmp_path):
    told = processes.run(room_for_everyone, 2, str(tmp_path))
    assert told[0] == told[1]
    assert f"the stores of 2 processes in {tmp_path}/0, {tmp_path}/1 will take" in told[0]


@pytest.mark.slow
def test_a_run_that_fails_leaves_no_store(tmp_path, monkeypatch, capsys):
    """Stores of a run that had failed filled the disk until the next run of its name."""
    left = []

    def fail(self, offset, row):
        left.extend(tmp_path.rglob("*.slots"))
        raise StoreError("the disk is gone")

    monkeypatch.setattr(SlotFile, "write", fail)
    codecs = ["--compression.activations", 'aqsgd(q(4), store="disk")', "--compression.gradients", "q(8)"]
    assert cli.main(["simulate", "gpt2-tiny", *TINY["gpt2-tiny"], *SHORT, *codecs, "--output", str(tmp_path)]) == 1
    assert "the disk is gone" in capsys.readouterr().err
    assert left and not list(tmp_path.rglob("*.slots"))


@pytest.mark.slow
def test_a_run_is_refused_before_it_trains(tmp_path, free, capsys):
    free(1000)
    codecs = ["--compression.activations", 'aqsgd(q(4), store="disk")', "--compression.gradients", "q(8)"]
    assert cli.main(["simulate", "gpt2-tiny", *TINY["gpt2-tiny"], *SHORT, *codecs, "--output", str(tmp_path)]) == 1
    assert "the stores and weights of 1 process in" in (told := capsys.readouterr()).err
    assert "step" not in told.out and not list(tmp_path.rglob("*.slots"))
