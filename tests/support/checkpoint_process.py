"""A stage that trains and saves, without a model: for tests of checkpoints as files."""

import random

import torch
import torch.distributed as dist

from thinwire.compress.stores.disk import DiskStore
from thinwire.compress.stores.memory import MemoryStore
from thinwire.compress.stores.store import StoreLayout
from thinwire.pipeline.saving.checkpoint import Checkpoints, StageState
from thinwire.pipeline.saving.checkpoint_folder import SavedStage, manifests, trouble

LAYOUT = StoreLayout(num_slots=12, row_shape=(5,))
NAME = "boundary-0-activations-0-sender-train"


class Process:
    """One stage that trains: each step changes its weight and some rows of its store."""

    def __init__(self, folder, words, stage=0, num_stages=1, keep=2, medium="memory", layout=LAYOUT, cut=None):
        self.stage, self.step, self.layout = stage, 0, layout
        self.weight = torch.zeros(3)
        folder.mkdir(exist_ok=True)
        self.store = MemoryStore(layout) if medium == "memory" else DiskStore(layout, _unused(folder))
        self.checkpoints = Checkpoints(
            folder / "checkpoints",
            stages=[stage],
            num_stages=num_stages,
            keep=keep,
            header={"model": "toy", "cuts": cut or num_stages},
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


def train_and_save(processes):
    for process in processes:
        process.train()
        process.save()
    for process in processes:
        process.checkpoints.wait()


def saved_by_two(folder, words, steps, **options):
    """Two stages in one folder, with a checkpoint of each step."""
    both = [Process(folder, words, stage, num_stages=2, **options) for stage in (0, 1)]
    for _ in range(steps):
        train_and_save(both)
    return both


def newest(folder, stages=(0,)):
    found = [manifest for manifest in manifests(folder) if trouble(folder, manifest, stages) is None]
    return found[-1] if found else None
