"""A run under a plan of faults, drawn from a seed: it ends in a named error, or with the weights of one undisturbed.

`thinwire simulate` trains with the boundaries of real processes, over memory. Here its links are a network that may
damage frames, its disk may be full, and the process may end at every frame and before every file operation.
"""

import io
import json
import os
import random
import shutil
import traceback
from collections import Counter
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.damage import damage
from support.faults.disk import Disk
from support.faults.links import Network
from support.faults.plan import Extent, Plan, drawn
from support.faults.process import Crash, Process
from support.tiny_run import alone, prepared, write_recipe
from thinwire.errors import ThinwireError
from thinwire.launch.plan.places import simulated_placement
from thinwire.launch.recipe.recipe import dump
from thinwire.launch.results import outputs
from thinwire.launch.run import run as run_module
from thinwire.launch.run.parts import notes, results, room
from thinwire.launch.run.run import Run
from thinwire.models.digest import tensor_lines, weights_digest
from thinwire.pipeline.errors import PeerError, WireError
from thinwire.pipeline.saving import checkpoint
from thinwire.pipeline.saving.state import module_of
from thinwire.pipeline.wire import maker

SEEDS, FIRST = int(os.environ.get("THINWIRE_SEEDS", "50")), int(os.environ.get("THINWIRE_FIRST_SEED", "0"))
"""How many seeds, and the first of them; `make fuzz` asks for more."""
ATTEMPTS, AT_REST = 3, 0.15
"""How often a run is disturbed at most, and how often its checkpoints are damaged between two attempts."""
OPTIONS = [
    *("--training.steps", "4", "--save_every", "3"),
    *("--data.held_out", "0.34", "--output", "run"),
    *("--model.name", "support.tiny_model:layers", "--model.config", "{}"),
]
CASES = {
    "aqsgd": [
        *("aqsgd(q(3))", "ef21(topk(0.2))", "--checkpoint.every", "2 steps", "--checkpoint.keep", "2"),
        *("--training.evaluate_every", "3 steps"),
    ],
    "ef": [
        *("ef(topk(0.3))", "q(8)", "--checkpoint.every", "1 steps", "--checkpoint.keep", "1"),
        *("--data.held_out", "0"),
    ],
    "disk": [
        *('aqsgd(q(2), store="disk", store_bits=8, first=q(8, step=0.2, codebook=8))', "efmixed(topk(0.2))"),
        *("--checkpoint.every", "1 steps", "--checkpoint.keep", "2", "--pipeline.schedule", "1f1b"),
    ],
}
"""Codecs of activations and gradients, and how often there are checkpoints."""
SAME = ("train_loss", "held_out", "channels", "weights_digest", "bytes_sent", "steps")


@dataclass
class Attempt:
    """What became of one attempt at a run."""

    error: BaseException | None
    began: int | None
    """The step it began with; None if it ended before."""
    extent: Extent


class Fuzzed:
    """A run of one case in the folder `run`, attempted again and again.

    Attributes:
        digests: the weights' digest after each step; the first attempt, undisturbed, sets it, others compare.
        durable: the last step whose checkpoint was said to be complete.
    """

    def __init__(self, folder, case):
        activations, gradients, *options = CASES[case]
        write_recipe(folder)
        (folder / "text").write_bytes(bytes(range(32, 132)) * 2 + bytes(range(64, 80)))
        codecs = ["--compression.activations", activations, "--compression.gradients", gradients]
        self.ready = prepared(*OPTIONS, *codecs, *options)
        self.folder, self.text = folder / "run", dump(self.ready.recipe)
        self.digests, self.durable = {}, 0
        self.begin()
        whole = self.attempt(Plan(), random.Random(0))
        assert whole.error is None, whole
        self.extent, self.wanted = whole.extent, self.outcome()

    def begin(self):
        """Forget what is on the disk."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.durable = 0

    def outcome(self):
        """What a finished run says."""
        summary = json.loads((self.folder / "summary.json").read_text())
        metrics = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        evaluations = (self.folder / "evaluations.jsonl").read_text().splitlines()
        return [{name: summary[name] for name in SAME}, [line["loss"] for line in metrics], evaluations]

    def attempt(self, plan, draw):
        """Run until the end, or until a fault ends it; then the folder holds what that leaves."""
        stages, found = [], Attempt(None, None, Extent(0, 0, 0))
        process = Process(draw, plan.crash_at)
        disk = Disk(self.folder, process, full=plan.full, power_cut=draw if plan.power_cut else None)
        network = Network(process, draw, plan.frames)
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()), alone():
            self._patch(patch, process, disk, network, stages)
            try:
                run = Run(self.ready, simulated_placement(self.ready.recipe))
                found.began = run.resumption.first
                run.go()
            except (Crash, ThinwireError) as error:
                found.error = error
            finally:
                process.close()
                for coder in [one for stage in stages for one in stage.ends.coders().values()]:
                    with suppress(ThinwireError):
                        coder.buffers.close()
                disk.settle()
        if process.dead:
            found.error = Crash()
        found.extent = Extent(process.moments, network.frames, disk.needs)
        return found

    def _patch(self, patch, process, disk, network, stages):
        disk.patch(patch)
        patch.setattr(maker, "MemoryEnd", network.link)
        patch.setattr(checkpoint, "threading", SimpleNamespace(Thread=process.thread, Lock=process.lock))
        for shown in ("save_picture", "say", "show_summary"):
            patch.setattr(results, shown, lambda *_: None)
        patch.setattr(notes, "say", lambda *_: None)
        patch.setattr(room, "show_stores", lambda *_: None)
        patch.setattr(outputs, "dump", lambda _: self.text)

        real_write = checkpoint.write_tensors

        def write_tensors(path, tensors):
            process.moment()
            disk.need_room()
            return real_write(path, tensors)

        patch.setattr(checkpoint, "write_tensors", write_tensors)

        real_assemble, real_wait, real_step = run_module.assemble, checkpoint.Checkpoints.wait, Run._after_step

        def assemble(*args, **kwargs):
            assembly = real_assemble(*args, **kwargs)
            stages.extend(assembly.trainer.stages)
            return assembly

        def wait(checkpoints):
            thread = checkpoints._thread
            real_wait(checkpoints)
            if thread is not None:
                self.durable = int(thread.name.split()[-1])

        def after_step(run, record):
            lines = (line for stage in run.trainer.stages for line in tensor_lines(module_of(stage).full_state()))
            digest = weights_digest(lines)
            assert self.digests.setdefault(record.step, digest) == digest, f"other weights after step {record.step + 1}"
            real_step(run, record)

        patch.setattr(run_module, "assemble", assemble)
        patch.setattr(checkpoint.Checkpoints, "wait", wait)
        patch.setattr(Run, "_after_step", after_step)


def fuzz(run, seed, counts):
    """One seed: attempts under faults, then one without. AssertionError if one ends in any other way than it may."""
    draw, told, spoilt = random.Random(seed), [], False
    run.begin()
    plans = [drawn(draw, run.extent) for _ in range(draw.randint(1, ATTEMPTS))]
    for plan in [*plans, Plan()]:
        told.append(str(plan))
        durable = 0 if spoilt else run.durable
        try:
            found = run.attempt(plan, draw)
            check(run, plan, found, durable, spoilt)
        except Exception as error:
            calls = [f"{Path(call.filename).name}:{call.lineno}" for call in traceback.extract_tb(error.__traceback__)]
            raise AssertionError(f"seed {seed}: {'; '.join(told)}: {error!r} at {' '.join(calls[-6:])}") from error
        counts[kind_of(found)] += 1
        if found.error is None or (spoilt and found.began is None):
            break
        files = run.folder / "checkpoints"
        if files.exists() and any(path.is_file() for path in files.rglob("*")) and draw.random() < AT_REST:
            damage(files, draw)
            told.append("damage at rest")
            spoilt = True


def check(run, plan, found, durable, spoilt):
    """Whether an attempt may end as it did; `durable` is a step that it may not fall behind."""
    error = found.error
    if error is None:
        assert run.outcome() == run.wanted, "other numbers at the end"
    elif isinstance(error, ThinwireError):
        assert str(error) and "Traceback" not in str(error)
        may = (WireError, PeerError) if plan.frames else ()
        assert plan.full or spoilt or isinstance(error, may), f"there was no fault for {error!r}"
    assert found.began is None or found.began >= durable, f"began at step {found.began}, and {durable} was complete"


def kind_of(found):
    """How an attempt ended, for the summary."""
    where = "before the first step" if found.began is None else "new" if found.began == 0 else "resumed"
    return where, type(found.error).__name__ if found.error else "finished"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_each_seed_ends_in_a_named_error_or_in_the_undisturbed_weights(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    run, counts, failed = Fuzzed(tmp_path, case), Counter(), []
    place = list(CASES).index(case)
    for seed in range(FIRST, FIRST + SEEDS):
        if seed % len(CASES) == place:
            try:
                fuzz(run, seed, counts)
            except AssertionError as error:
                failed.append(str(error))
    print(case, run.extent, dict(counts))
    assert not failed, "\n".join(failed)
    assert SEEDS < 50 or {"finished", "Crash"} <= {ended for _, ended in counts}
