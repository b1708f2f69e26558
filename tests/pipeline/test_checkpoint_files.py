"""Checkpoints as files: whole or nothing, whatever stops or damages their writing."""

import errno
import io
import os
import random
import shutil
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file

from support.checkpoint_process import Process, newest, saved_by_two, undisturbed
from support.faults.disk import Disk
from support.faults.process import Crash
from support.faults.process import Process as Machine
from support.small_disk import mounted
from thinwire.compress.stores.marks import claim
from thinwire.errors.files import MARK
from thinwire.pipeline.errors import CheckpointError
from thinwire.pipeline.processes import posts
from thinwire.pipeline.saving import checkpoint
from thinwire.pipeline.saving.checkpoint import write_tensors
from thinwire.pipeline.saving.checkpoint_folder import MANIFEST, TENSORS, digest_of, manifests, step_folder


@pytest.mark.parametrize("medium", ["memory", "disk"])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("keep", [1, 2])
def test_any_step_goes_on_as_if_nothing_had_happened(tmp_path, medium, every, keep):
    wanted = undisturbed(tmp_path, 14)
    process = Process(tmp_path / "run", dist.HashStore(), keep=keep, medium=medium)
    for stop in (4, 9, 14):
        while process.step < stop:
            process.train()
            if process.step % every == 0:
                process.save()
        process.checkpoints.wait()
        folder = process.checkpoints.folder
        assert len(manifests(folder)) <= keep
        process.store.close()
        process = Process(tmp_path / "run", dist.HashStore(), keep=keep, medium=medium)
        process.resume(newest(folder))
        assert process.content() == wanted[stop // every * every]


def test_what_is_saved_does_not_change_with_training(tmp_path):
    wanted = undisturbed(tmp_path, 3)
    process = Process(tmp_path / "run", dist.HashStore())
    process.train()
    process.save()
    process.train()
    process.checkpoints.wait()
    again = Process(tmp_path / "again", dist.HashStore())
    shutil.copytree(process.checkpoints.folder, again.checkpoints.folder)
    again.resume(newest(again.checkpoints.folder))
    assert again.content() == wanted[1]


def test_a_checkpoint_is_whole_once_every_stage_is(tmp_path):
    words = dist.HashStore()
    one, other = (Process(tmp_path / "run", words, stage=stage, num_stages=2) for stage in (0, 1))
    for process in (one, other):
        process.train()
    one.save()
    assert manifests(one.checkpoints.folder) == []
    other.save()
    for process in (one, other):
        process.checkpoints.wait()
    assert [manifest.step for manifest in manifests(one.checkpoints.folder)] == [1]


def test_words_that_all_stages_have_read_are_forgotten(tmp_path):
    """The store of words had two more for every checkpoint, in the memory of every process."""
    words, counts = dist.HashStore(), []
    both = [Process(tmp_path / str(stage), words, stage, num_stages=2) for stage in range(2)]
    for _ in range(6):
        for process in both:
            process.train()
            process.save()
        for process in both:
            process.checkpoints.wait()
        counts.append(words.num_keys())
    assert counts[1:] == counts[:1] * 5


def test_a_stage_that_cannot_write_is_named_by_all_and_the_next_checkpoint_has_its_rows(tmp_path, monkeypatch):
    wanted = undisturbed(tmp_path, 2)
    words = dist.HashStore()
    one, other = (Process(tmp_path / "run", words, stage=stage, num_stages=2) for stage in (0, 1))
    blocked = step_folder(other.checkpoints.folder, 1) / "stage-1"
    claim(blocked.parent, "")
    blocked.write_text("a file where a folder must be")
    for process in (one, other):
        process.train()
        process.save()
    with pytest.raises(CheckpointError, match=r"checkpoint 1 could not be written.*stage 1"):
        one.checkpoints.wait()
    with pytest.raises(CheckpointError, match="checkpoint 1 could not be written"):
        other.checkpoints.wait()
    assert manifests(one.checkpoints.folder) == []
    for process in (one, other):
        process.train()
        process.save()
    for process in (one, other):
        process.checkpoints.wait()
    again = Process(tmp_path / "run", words, stage=0, num_stages=2)
    again.resume(newest(again.checkpoints.folder, (0, 1)))
    assert again.content() == wanted[2]


@pytest.mark.parametrize("made_by", ["another run", "somebody"])
def test_a_step_that_another_made_meanwhile_keeps_its_parts(tmp_path, made_by):
    """Two runs with one checkpoint.folder wrote parts in the place of each other's, and a failed save removed them."""
    process = Process(tmp_path / "run", dist.HashStore())
    target = step_folder(process.checkpoints.folder, 1)
    if made_by == "another run":
        claim(target, "another")
    (target / "stage-0").mkdir(parents=True)
    (target / "stage-0" / "img").write_text("theirs")
    process.train()
    process.save()
    with pytest.raises(CheckpointError, match=f"another run made {target}|no run made {target}/stage-0"):
        process.checkpoints.wait()
    assert [path.read_text() for path in target.rglob("img")] == ["theirs"]
    process.train()
    process.save()
    process.checkpoints.wait()
    assert [manifest.step for manifest in manifests(process.checkpoints.folder)] == [2]


def test_a_full_disk_is_told_by_all_and_gives_its_room_back(tmp_path):
    words = dist.HashStore()
    with mounted(tmp_path / "run", "size=256k") as folder:
        one, other = (Process(folder, words, stage=stage, num_stages=2, keep=1) for stage in (0, 1))
        for process in (one, other):
            process.train()
            process.save()
        for process in (one, other):
            process.checkpoints.wait()
        full = folder / "something else"
        with suppress(OSError):
            full.write_bytes(bytes(1 << 20))
        for process in (one, other):
            process.train()
            process.save()
        for process in (one, other):
            with pytest.raises(CheckpointError, match=r"checkpoint 2 could not be written.*No space left on device"):
                process.checkpoints.wait()
        assert {path.name for path in step_folder(folder / "checkpoints", 2).rglob("*")} <= {MARK}
        full.unlink()
        for process in (one, other):
            process.train()
            process.save()
        for process in (one, other):
            process.checkpoints.wait()
        assert [manifest.step for manifest in manifests(folder / "checkpoints")] == [3]


def test_a_process_that_fails_leaves_the_others_the_folder_they_write_to(tmp_path, monkeypatch):
    """It removed that folder under a part that was just begun; the other told `No such file` in place of the cause."""
    words, real, begun = dist.HashStore(), checkpoint.make_folder, threading.Event()
    one, other = saved_by_two(tmp_path / "run", words, 1, keep=1)

    def first_full_then_slow(path):
        if threading.current_thread() is one.checkpoints._thread:
            assert begun.wait(30)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path.parent)
        begun.set()
        one.checkpoints._thread.join(30)
        path.mkdir()

    monkeypatch.setattr(checkpoint, "make_folder", first_full_then_slow)
    for process in (one, other):
        process.train()
        process.save()
    with pytest.raises(CheckpointError, match=r"checkpoint 2 could not be written.*stage 0: No space left on device"):
        other.checkpoints.wait()
    with pytest.raises(CheckpointError, match="No space left on device"):
        one.checkpoints.wait()
    assert [path.name for path in step_folder(one.checkpoints.folder, 2).rglob("*")] == [MARK]


def test_a_disk_that_is_full_for_one_manifest_leaves_the_checkpoint_to_the_other_process(tmp_path, monkeypatch):
    """A process without room for its manifest removed its part; another one completed the checkpoint without it, and
    removed the one before.
    """
    words, real = dist.HashStore(), checkpoint.write_durably
    both_know, failed = threading.Barrier(2, timeout=30), threading.Event()
    one, other = saved_by_two(tmp_path / "run", words, 1, keep=1)

    def full_for_one(path, content):
        if path.name == MANIFEST:
            both_know.wait()
            if threading.current_thread() is one.checkpoints._thread:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            assert failed.wait(30)
        real(path, content)

    monkeypatch.setattr(checkpoint, "write_durably", full_for_one)
    for process in (one, other):
        process.train()
        process.save()
    with pytest.raises(CheckpointError, match=r"checkpoint 2 could not be written.*No space left on device"):
        one.checkpoints.wait()
    failed.set()
    other.checkpoints.wait()
    again = Process(tmp_path / "run", words, stage=0, num_stages=2)
    again.resume(newest(again.checkpoints.folder, (0, 1)))
    assert again.content() == one.content()


def test_a_folder_in_place_of_a_manifest_goes_with_its_checkpoint(tmp_path):
    wanted = undisturbed(tmp_path, 2)
    process = Process(tmp_path / "run", dist.HashStore())
    for _ in range(2):
        process.train()
        process.save()
    process.checkpoints.wait()
    folder = process.checkpoints.folder
    (step_folder(folder, 2) / "manifest.json").unlink()
    (step_folder(folder, 2) / "manifest.json").mkdir()
    again = Process(tmp_path / "run", dist.HashStore())
    again.resume(newest(folder))
    assert again.content() == wanted[1]
    assert not step_folder(folder, 2).exists()


def test_torch_reads_the_tensors_of_a_part(tmp_path):
    import torch.distributed.checkpoint as dcp

    process = Process(tmp_path / "run", dist.HashStore())
    process.train()
    process.save()
    process.checkpoints.wait()
    found = {"weights/w": torch.zeros(3)}
    part = step_folder(process.checkpoints.folder, 1) / "stage-0"
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(part)), no_dist=True)
    assert found["weights/w"].equal(process.weight) and process.weight.any()


@pytest.mark.slow
@pytest.mark.parametrize("power_cut", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_a_crash_anywhere_leaves_a_whole_checkpoint_or_the_one_before(tmp_path, seed, power_cut):
    """The process ends at a file operation or between two, four times in a row: while it resumes, saves or deletes.

    Half a deleted checkpoint was an error, and after a power cut names were gone that nobody had waited for.
    """
    wanted, draw, folder = undisturbed(tmp_path, 12), random.Random(seed), tmp_path / "run"
    folder.mkdir()
    reached = 0
    for _ in range(4):
        machine = Machine(draw, draw.randrange(1, 120))
        disk = Disk(folder, machine, power_cut=draw if power_cut else None)
        with pytest.MonkeyPatch.context() as patch, suppress(Crash):
            disk.patch(patch)
            patch.setattr(checkpoint, "threading", SimpleNamespace(Thread=machine.thread, Lock=threading.Lock))
            process = Process(folder, dist.HashStore(), keep=draw.choice([1, 2]))
            try:
                if manifest := newest(folder / "checkpoints"):
                    process.resume(manifest)
                assert process.step >= reached, "what was whole stays"
                assert process.content() == wanted[process.step]
                while process.step < 12:
                    process.train()
                    process.save()
                    process.checkpoints.wait()
                    reached = process.step
                    machine.moment()
            finally:
                machine.close()
                disk.settle()


def test_a_failure_is_told_before_the_next_checkpoint_is_due(tmp_path):
    process = Process(tmp_path / "run", dist.HashStore())
    process.checkpoints.check()
    step_folder(process.checkpoints.folder, 1).parent.mkdir()
    step_folder(process.checkpoints.folder, 1).write_text("a file where a folder must be")
    process.train()
    process.save()
    process.checkpoints._thread.join()
    with pytest.raises(CheckpointError, match="checkpoint 1 could not be written"):
        process.checkpoints.check()
    process.checkpoints.check()


def test_a_failure_that_cannot_be_posted_is_told_all_the_same(tmp_path, capfd):
    """The host of torchrun's store was gone: the thread ended in a traceback, and the others in nothing."""

    class Gone(RuntimeError):
        """As torch's `DistNetworkError`."""

    def gone(*_):
        raise Gone("Connection reset by peer")

    process = Process(tmp_path / "run", SimpleNamespace(set=gone, check=gone))
    process.train()
    process.save()
    with pytest.raises(CheckpointError, match=r"checkpoint 1 could not be written.*Connection reset by peer"):
        process.checkpoints.wait()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("seed", range(30))
def test_damage_is_told_or_the_checkpoint_before_is_taken(tmp_path, seed):
    """A checkpoint that needed a damaged row of an older one was taken, and could not be restored."""
    wanted = undisturbed(tmp_path, 5)
    process = Process(tmp_path / "run", dist.HashStore(), keep=3)
    for _ in range(5):
        process.train()
        process.save()
    process.checkpoints.wait()
    draw, folder = random.Random(seed), process.checkpoints.folder
    victim = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    of_all = victim.stat().st_nlink == 3
    content = bytearray(victim.read_bytes())
    match draw.choice(["flip", "cut", "remove", "empty"]):
        case "flip" if content:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            victim.write_bytes(content)
        case "cut" if content:
            victim.write_bytes(content[: draw.randrange(len(content))])
        case "empty":
            victim.write_bytes(b"")
        case _:
            victim.unlink()
    again = Process(tmp_path / "run", dist.HashStore())
    manifest = newest(folder)
    if manifest is None:
        assert of_all, "three checkpoints were there, and one file was damaged"
        return
    again.resume(manifest)
    assert again.content() == wanted[again.step]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives a thread a priority of its own")
@pytest.mark.parametrize(("trains", "behind"), [(True, 10), (False, 0)])
def test_training_goes_before_the_thread_that_writes(tmp_path, trains, behind):
    """The last checkpoint of a run that is asked to stop took half a minute at a load of 30."""
    process, found = Process(tmp_path / "run", dist.HashStore()), []
    process.train()
    process.checkpoints.save(process.step, process.state, lambda: found.append(os.nice(0)), trains=trains)
    process.checkpoints.wait()
    assert found == [min(os.nice(0) + behind, 19)]


@pytest.mark.parametrize("posted", ["", [], 3, {}, "failed", {"files": []}])
def test_a_word_that_is_none_is_one_sentence(tmp_path, posted):
    words = dist.HashStore()
    process = Process(tmp_path / "run", words, stage=0, num_stages=2)
    words.set("checkpoint/1/1", posts.written(posted))
    process.train()
    process.save()
    with pytest.raises(CheckpointError, match="stage 1 must post what it has written, and posted something else"):
        process.checkpoints.wait()


def test_a_file_of_tensors_is_what_safetensors_reads(tmp_path):
    """All dtypes, strides, one memory under two names, no dimension, no element, and more than one piece."""
    large = torch.arange(200_000, dtype=torch.float64)
    tensors = {
        "large": large,
        "strided": large.view(400, 500).T[::3],
        "again": large,
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3, dtype=torch.bfloat16),
        **{
            str(dtype): torch.arange(5).to(dtype)
            for dtype in (torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
        },
    }
    path = tmp_path / TENSORS
    digest = write_tensors(path, tensors)
    assert digest == digest_of(path) == xxhash.xxh3_128(path.read_bytes()).hexdigest()
    read = load_file(path)
    assert set(read) == set(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
        assert read[name].to(torch.float64).equal(tensor.to(torch.float64)), name
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_disk_that_takes_a_part_of_a_piece_gets_the_rest(tmp_path, monkeypatch):
    class Slow(io.FileIO):
        def write(self, piece):
            return super().write(piece[:1000])

    monkeypatch.setattr(Path, "open", lambda path, *_, **__: Slow(path, "w"))
    digest = write_tensors(tmp_path / TENSORS, {"large": torch.arange(10_000)})
    monkeypatch.undo()
    assert load_file(tmp_path / TENSORS)["large"].tolist() == list(range(10_000))
    assert digest == digest_of(tmp_path / TENSORS)
