"""Checkpoints as files: whole or nothing, whatever stops or damages their writing."""

import random
import shutil
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from support.faults.disk import Disk
from support.faults.process import Crash
from support.faults.process import Process as Machine
from support.small_disk import mounted
from thinwire.compress.stores.disk import DiskStore
from thinwire.compress.stores.memory import MemoryStore
from thinwire.compress.stores.store import StoreError, StoreLayout
from thinwire.pipeline import checkpoint
from thinwire.pipeline.checkpoint import Checkpoints, StageState
from thinwire.pipeline.checkpoint_folder import SavedStage, is_whole, manifests, step_folder
from thinwire.pipeline.errors import CheckpointError

LAYOUT = StoreLayout(num_slots=12, row_shape=(5,))
NAME = "boundary-0-activations-0-sender-train"


class Process:
    """One stage that trains: each step changes its weight and some rows of its store."""

    def __init__(self, folder, words, stage=0, num_stages=1, keep=2, medium="memory", layout=LAYOUT):
        self.stage, self.step, self.layout = stage, 0, layout
        self.weight = torch.zeros(3)
        folder.mkdir(exist_ok=True)
        self.store = MemoryStore(layout) if medium == "memory" else DiskStore(layout, _unused(folder))
        self.checkpoints = Checkpoints(
            folder / "checkpoints",
            stages=[stage],
            num_stages=num_stages,
            keep=keep,
            header={"model": "toy", "cuts": num_stages},
            words=words,
            timeout=20,
        )

    def train(self):
        self.step += 1
        draw = random.Random(100 * self.step + self.stage)
        self.weight = self.weight + draw.random()
        slots = sorted(draw.sample(range(self.layout.num_slots), 4))
        self.store.write(torch.tensor(slots), torch.full((4, *self.layout.row_shape), draw.random()))

    def state(self):
        stores = {NAME: (self.store, self.store.snapshot())}
        return {self.stage: StageState({"weights/w": self.weight.clone()}, {"steps": self.step}, stores)}

    def save(self):
        self.checkpoints.save(self.step, self.state)

    def resume(self, manifest):
        saved = self.checkpoints.resume(manifest, self.stage, {NAME: self.store})
        self.weight, self.step = saved.tensors("weights/")["w"], saved.values["steps"]

    def resume_in_another_cut(self, manifest):
        saved = SavedStage(self.checkpoints.folder, manifest.step, self.stage)
        self.weight, self.step = saved.tensors("weights/")["w"], saved.values["steps"]
        self.checkpoints.go_on_from(manifest)

    def content(self):
        every = torch.arange(self.layout.num_slots)
        return self.step, self.weight.tolist(), self.store.known(every).tolist(), self.store.read(every).tolist()


def _unused(folder):
    return folder / f"{len(list(folder.glob('*.live')))}.live"


def undisturbed(tmp_path, steps):
    """What a process that never stops has after each step."""
    process = Process(tmp_path / "undisturbed", dist.HashStore())
    return [process.content(), *((process.train(), process.content())[1] for _ in range(steps))]


def newest(folder, stages=(0,)):
    found = [manifest for manifest in manifests(folder) if is_whole(folder, manifest, stages)]
    return found[-1] if found else None


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
    blocked.parent.mkdir(parents=True)
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
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000001"]
        full.unlink()
        for process in (one, other):
            process.train()
            process.save()
        for process in (one, other):
            process.checkpoints.wait()
        assert [manifest.step for manifest in manifests(folder / "checkpoints")] == [3]


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
            patch.setattr(checkpoint, "threading", SimpleNamespace(Thread=machine.thread))
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


@pytest.mark.parametrize("power_cut", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_the_checkpoint_of_another_cut_stays_until_a_new_one_is_complete(tmp_path, seed, power_cut):
    """Two stages become one, with other rows. A crash behind the first file operation left no checkpoint at all."""
    draw, folder, words, reached = random.Random(seed), tmp_path / "run", dist.HashStore(), 4
    both = [Process(folder, words, stage, num_stages=2, keep=2) for stage in (0, 1)]
    for _ in range(4):
        for process in both:
            process.train()
            process.save()
        for process in both:
            process.checkpoints.wait()
    (folder / "checkpoints/step-00000005/stage-1").mkdir(parents=True)  # unfinished
    wanted, files = {}, folder / "checkpoints"
    for crash_at in (*(draw.randrange(1, 25) for _ in range(4)), None):
        machine = Machine(draw, crash_at)
        disk = Disk(folder, machine, power_cut=draw if power_cut else None)
        with pytest.MonkeyPatch.context() as patch, suppress(Crash):
            disk.patch(patch)
            patch.setattr(checkpoint, "threading", SimpleNamespace(Thread=machine.thread))
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
    assert sorted(path.name for path in files.glob("**/stage-*")) == ["stage-0"] * 3, "two checkpoints and the base"


@pytest.mark.parametrize("seed", range(30))
def test_damage_is_told_or_the_checkpoint_before_is_taken(tmp_path, seed):
    wanted = undisturbed(tmp_path, 4)
    process = Process(tmp_path / "run", dist.HashStore(), keep=2)
    for _ in range(4):
        process.train()
        process.save()
    process.checkpoints.wait()
    draw, folder = random.Random(seed), process.checkpoints.folder
    victim = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
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
    assert manifest is not None, "two checkpoints were there, and one file was damaged"
    try:
        again.resume(manifest)
    except (CheckpointError, StoreError) as error:
        assert str(folder) in str(error)
        return
    assert again.content() == wanted[again.step]
