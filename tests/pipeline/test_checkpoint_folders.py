"""The folder of checkpoints over several hosts, cuts and runs: what stays, what goes, and what somebody removed."""

import errno
import os
import random
import shutil
import threading
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from support.checkpoint_process import LAYOUT, NAME, Process, newest, saved_by_two, train_and_save, undisturbed
from support.faults.disk import Disk
from support.faults.process import Crash
from support.faults.process import Process as Machine
from thinwire.compress.stores.marks import claim
from thinwire.compress.stores.store import StoreLayout
from thinwire.pipeline.errors import CheckpointError
from thinwire.pipeline.saving import checkpoint, checkpoint_folder
from thinwire.pipeline.saving.checkpoint_folder import (
    Manifest,
    manifests,
    step_folder,
    trouble,
)


def test_a_host_that_lacks_the_manifest_goes_on_with_its_own_part(tmp_path):
    """A host stopped between the last part and its manifest. It deleted its part when it went on."""
    words = dist.HashStore()
    both = [Process(tmp_path / f"host-{stage}", words, stage, num_stages=2) for stage in (0, 1)]
    for process in both:
        process.train()
        process.save()
    for process in both:
        process.checkpoints.wait()
    wanted, folder = both[1].content(), both[1].checkpoints.folder
    (step_folder(folder, 1) / "manifest.json").unlink()
    again = Process(tmp_path / "host-1", words, 1, num_stages=2)
    again.resume(newest(both[0].checkpoints.folder, (0,)))
    assert again.content() == wanted and newest(folder, (1,)).step == 1


@pytest.mark.slow
@pytest.mark.parametrize("power_cut", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_the_checkpoint_of_another_cut_stays_until_a_new_one_is_complete(tmp_path, seed, power_cut):
    """Two stages become one, with other rows. A crash behind the first file operation left no checkpoint at all."""
    draw, folder, words, reached = random.Random(seed), tmp_path / "run", dist.HashStore(), 4
    saved_by_two(folder, words, steps=4)
    claim(folder / "checkpoints/step-00000005", "")
    (folder / "checkpoints/step-00000005/stage-1").mkdir()  # unfinished
    wanted, files = {}, folder / "checkpoints"
    for crash_at in (*(draw.randrange(1, 25) for _ in range(4)), None):
        machine = Machine(draw, crash_at)
        disk = Disk(folder, machine, power_cut=draw if power_cut else None)
        with pytest.MonkeyPatch.context() as patch, suppress(Crash):
            disk.patch(patch)
            patch.setattr(checkpoint, "threading", SimpleNamespace(Thread=machine.thread, Lock=threading.Lock))
            process = Process(folder, dist.HashStore(), layout=StoreLayout(num_slots=7, row_shape=(9,)))
            try:
                manifest = newest(files, (0,))
                assert manifest is not None and manifest.step >= reached
                if manifest.cut == 1:
                    process.resume(manifest)
                    assert process.content() == wanted[process.step]
                else:
                    process.resume_in_another_cut(manifest)
                for _ in range(3 if crash_at is None else 1):
                    process.train()
                    process.save()
                    wanted[process.step] = process.content()
                    process.checkpoints.wait()
                    reached = process.step
            finally:
                machine.close()
                disk.settle()
        process.store.close()
    assert [manifest.cut for manifest in manifests(files)] == [1, 1]
    assert [path.name for path in files.glob("**/stage-*")] == ["stage-0"] * 2, "nothing of another cut"


@pytest.mark.slow
def test_parts_of_another_cut_go_from_every_disk_once_a_new_checkpoint_is_complete(tmp_path):
    """Two hosts share no folder, and each has the parts of all stages, which a new cut needs. Half of them stayed."""
    both, folders = saved_by_two(tmp_path / "shared", dist.HashStore(), steps=4), []
    for stage in (0, 1):
        folders.append(tmp_path / f"host-{stage}" / "checkpoints")
        shutil.copytree(both[0].checkpoints.folder, folders[stage])
        claim(folders[stage] / "step-00000009", "")
        (folders[stage] / "step-00000009" / f"stage-{1 - stage}").mkdir()  # unfinished
    words, layout = dist.HashStore(), StoreLayout(num_slots=7, row_shape=(9,))
    both = [Process(tmp_path / f"host-{stage}", words, stage, 2, 1, layout=layout, cut="new") for stage in (0, 1)]
    for process in both:
        process.resume_in_another_cut(newest(process.checkpoints.folder, (0, 1)))
    for step in (5, 6):
        assert not any(trouble(folder, manifests(folder)[-1], [stage]) for stage, folder in enumerate(folders))
        train_and_save(both)
        for stage, folder in enumerate(folders):
            assert [(found.step, found.cut) for found in manifests(folder)] == [(step, "new")]
            assert {part.name for part in folder.glob("*/stage-*")} == {f"stage-{stage}"}
    again = Process(tmp_path / "host-1", words, 1, 2, 1, layout=layout, cut="new")
    again.resume(newest(folders[1], (1,)))
    assert again.content() == both[1].content()


@pytest.mark.parametrize("links", [True, False])
def test_each_checkpoint_is_whole_alone_and_writes_only_the_rows_that_changed(tmp_path, monkeypatch, links):
    """Where the disk gives a file no second name, a checkpoint has copies of older rows."""
    if not links:

        def refused(*_):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "link", refused)
    wanted, process = undisturbed(tmp_path, 12), Process(tmp_path / "run", dist.HashStore(), keep=2)
    folder = process.checkpoints.folder
    for step in range(1, 13):
        train_and_save([process])
        part = step_folder(folder, step) / "stage-0"
        assert (part / f"{NAME}.{step:08d}.rows").stat().st_size == 4 * LAYOUT.row_bytes, "4 rows change in a step"
        alone = Process(tmp_path / f"alone-{step}", dist.HashStore())
        shutil.copytree(part.parent, step_folder(alone.checkpoints.folder, step))
        alone.resume(newest(alone.checkpoints.folder))
        assert alone.content() == wanted[step]
        train_and_save([alone])  # what it links to is its own
        if step < 12:
            assert alone.content() == wanted[step + 1]
    assert len(manifests(folder)) == 2
    files = {path.stat().st_ino for path in folder.rglob("*.rows")}
    assert not links or len(files) < 8, "rows that were all written anew take no room"


def test_rows_of_an_earlier_release_are_one_sentence(tmp_path):
    process = Process(tmp_path / "run", dist.HashStore())
    train_and_save([process])
    [manifest], folder = manifests(process.checkpoints.folder), process.checkpoints.folder
    slots = step_folder(folder, 1) / f"stage-0/{NAME}.slots"
    slots.write_bytes(b"")
    earlier = Manifest(1, manifest.header, {"0": {slots.name: checkpoint_folder.digest_of(slots)}})
    assert trouble(folder, earlier, [0]).endswith(
        "is of an earlier release, which kept the rows of a checkpoint in several folders"
    )
    assert trouble(folder, earlier, [0], stores=False) is None


@pytest.mark.parametrize("removed", ["step-00000003", "step-00000004", "."])
def test_a_checkpoint_holds_the_rows_of_those_that_somebody_removed_by_hand(tmp_path, removed):
    """Every later checkpoint was said to be complete, and none could be resumed: the rows saved once were gone."""
    wanted = undisturbed(tmp_path, 5)
    process = Process(tmp_path / "run", dist.HashStore())
    for _ in range(4):
        train_and_save([process])
    shutil.rmtree(process.checkpoints.folder / removed)
    train_and_save([process])
    again = Process(tmp_path / "run", dist.HashStore())
    again.resume(newest(again.checkpoints.folder))
    assert again.content() == wanted[5]
    shutil.rmtree(process.checkpoints.folder / removed, ignore_errors=True)
    train_and_save([again])
    last = Process(tmp_path / "run", dist.HashStore())
    last.resume(newest(last.checkpoints.folder))
    assert last.content() == again.content()


@pytest.mark.parametrize("removed", ["step-00000003", "step-00000004", "."])
def test_the_next_checkpoint_holds_the_rows_of_those_removed_while_one_was_written(tmp_path, removed):
    """The loss was never noticed, because the parts were listed anew: no later checkpoint could be resumed."""
    wanted = undisturbed(tmp_path, 7)
    process = Process(tmp_path / "run", dist.HashStore())
    for _ in range(4):
        train_and_save([process])
    process.train()
    folder = process.checkpoints.folder
    process.checkpoints.save(process.step, process.state, logged=lambda: shutil.rmtree(folder / removed))
    with nullcontext() if removed == "step-00000003" else pytest.raises(CheckpointError, match="No such file"):
        process.checkpoints.wait()
    for step in (6, 7):
        train_and_save([process])
        again = Process(tmp_path / f"again-{step}", dist.HashStore())
        shutil.copytree(folder, again.checkpoints.folder)
        again.resume(newest(again.checkpoints.folder))
        assert again.content() == wanted[step]


@pytest.mark.parametrize(
    "fields",
    [
        {"step": "x"},
        {"step": -1},
        {"step": True},
        {"header": []},
        {"files": {"0": {"../../secret": ""}}},
        {"files": {"1": {}}},
        {"files": {"x": {}}},
        {"files": {"0": []}},
        {"files": []},
        {"format": 2},
    ],
)
def test_a_manifest_of_other_kinds_is_one_sentence_whatever_its_digest(fields):
    """Another host sends its manifests: one with a step of letters ended every process in a traceback."""
    text = Manifest(**{"step": 3, "header": {}, "files": {}, **fields}).text()
    with pytest.raises(CheckpointError, match="is not the manifest of a checkpoint"):
        Manifest.parse(text, "what another process has")


def test_of_replicas_the_parts_of_one_hold_the_model():
    files = {str(part): {} for part in range(4)}
    assert Manifest(3, {"cuts": [[0, 2], [2, 3]] * 2}, files).model_parts == [0, 1]
    assert Manifest(3, {"cuts": [[0, 1], [1, 2], [2, 3], [3, 4]]}, files).model_parts == [0, 1, 2, 3]
    assert Manifest(3, {}, files).model_parts == [0, 1, 2, 3]
