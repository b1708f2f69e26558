"""A trainer that stopped and came back from a checkpoint is the one that never stopped, bit for bit."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from support.processes import run
from support.toy import Samples, make_trainer, row_of
from thinwire.pipeline.errors import CheckpointError
from thinwire.pipeline.evaluation import evaluate
from thinwire.pipeline.saving import checkpoint
from thinwire.pipeline.saving.checkpoint import Checkpoints
from thinwire.pipeline.saving.checkpoint_folder import manifests, trouble
from thinwire.pipeline.training.training_state import collect, resume

pytestmark = pytest.mark.slow

STEPS, STOP = 5, 3
METHODS = {
    "none": ("none", "none"),
    "stochastic": ('q(3, round="stochastic")', 'q(4, round="stochastic")'),
    "ef": ("ef(topk(0.25))", "ef(q(2))"),
    "ef by sample": ('ef(topk(0.25), slot="sample")', "bf16"),
    "ef21": ("ef21(topk(0.25))", 'ef21(topk(0.25), slot="sample")'),
    "efmixed": ("efmixed(topk(0.25))", "efmixed(topk(0.25))"),
    "aqsgd": ("aqsgd(q(3))", "q(6)"),
    "aqsgd in 8 bits": ("aqsgd(topk(0.3), store_bits=8)", "reuse"),
    "randk": ("randk(0.3)", "reuse"),
    "codebook": ("q(8, step=0.2, codebook=4)", "q(4)"),
}


def evaluated(trainer):
    """Held-out scores, both ways: with AQ-SGD they depend on the evaluation before."""
    held_out, size = Samples(), 8
    batches = lambda: (Evaluation(torch.arange(start, start + size)) for start in range(0, 16, size))  # noqa: E731
    scores = evaluate(trainer, held_out, batches)
    return {kind: score.loss for kind, score in (scores or {}).items()}


class Evaluation:
    def __init__(self, ids):
        self.ids, self.epoch, self.valid = ids, 0, torch.ones(len(ids), dtype=torch.bool)


def trained(trainer, steps, first=0, after=lambda done: None):
    """The losses and scores of some steps, evaluated behind each second."""
    seen = []
    for step in range(first, steps):
        seen.append(trainer.train_step(step).loss)
        if step % 2:
            seen.append(evaluated(trainer))
        after(step + 1)
    return seen


def end_of(trainer):
    """All that a checkpoint must bring back."""
    return {
        stage.stage_index: (
            {name: tensor.tolist() for name, tensor in stage.submod.state_dict().items()},
            stage.digests(),
            stage.passes,
            stage.meter.sent,
            stage.meter.received,
        )
        for stage in trainer.stages
    }


def weights_of(trainer):
    return [tensor.tolist() for stage in trainer.stages for tensor in stage.submod.state_dict().values()]


def checkpoints_of(trainer, folder, words):
    stages = [stage.stage_index for stage in trainer.stages]
    num_stages = trainer.placement.num_stages
    return Checkpoints(folder, stages=stages, num_stages=num_stages, keep=2, header={}, words=words)


def goes_on(rank, options, folder, words):
    """Train without a stop; train again with a checkpoint and a stop; both ends and all that was seen between."""
    whole = make_trainer(rank, steps=STEPS, **options)
    wanted = trained(whole, STEPS), end_of(whole)
    stopped = make_trainer(rank, steps=STEPS, **options)
    checkpoints = checkpoints_of(stopped, folder, words)
    first = trained(
        stopped,
        STOP,
        after=lambda done: checkpoints.save(done, lambda: collect(stopped, checkpoints)) if done > 1 else None,
    )
    checkpoints.wait()
    for stage in stopped.stages:
        stage.close()
    again = make_trainer(rank, steps=STEPS, **options)
    manifest = manifests(folder)[-1]
    resume(again, checkpoints_of(again, folder, words), manifest)
    rest = trained(again, STEPS, manifest.step)
    return wanted, (first + rest, end_of(again))


@pytest.mark.parametrize(
    ("schedule", "name"),
    [*(("interleaved-zero-bubble", name) for name in METHODS), ("1f1b", "none"), ("1f1b", "aqsgd in 8 bits")],
)
def test_a_stop_changes_nothing(alone, tmp_path, name, schedule):
    activations, gradients = METHODS[name]
    options = {
        "schedule": schedule,
        "num_stages": 4,
        "accumulation": 2 if schedule == "1f1b" else 1,
        "dropout": 0.2,
        "simulated": True,
        "compression": {"activations": activations, "gradients": gradients, "warmup": "1 steps"},
    }
    wanted, got = goes_on(0, options, tmp_path / "checkpoints", dist.HashStore())
    assert got == wanted
    assert wanted[0][-1], "there is something to compare"


def test_a_stop_changes_nothing_on_disk_either(alone, tmp_path):
    options = {
        "num_stages": 3,
        "simulated": True,
        "compression": {
            "activations": 'aqsgd(q(3), store="disk", store_bits=4)',
            "gradients": 'ef21(q(4), store="disk")',
            "store_folder": str(tmp_path / "stores"),
        },
    }
    wholly = {**options, "compression": {**options["compression"], "store_folder": str(tmp_path / "whole")}}
    whole = make_trainer(0, steps=STEPS, **wholly)
    wanted = trained(whole, STEPS), end_of(whole)
    stopped = make_trainer(0, steps=STEPS, **options)
    checkpoints = checkpoints_of(stopped, tmp_path / "checkpoints", dist.HashStore())
    first = trained(stopped, STOP, after=lambda done: checkpoints.save(done, lambda: collect(stopped, checkpoints)))
    checkpoints.wait()
    for stage in stopped.stages:
        stage.close()
    again = make_trainer(0, steps=STEPS, **options)
    manifest = manifests(checkpoints.folder)[-1]
    resume(again, checkpoints_of(again, checkpoints.folder, dist.HashStore()), manifest)
    assert (first + trained(again, STEPS, manifest.step), end_of(again)) == wanted


def in_processes(rank, folder):
    options = {"compression": {"activations": "aqsgd(q(3))", "gradients": "ef(topk(0.25))"}, "dropout": 0.2}
    words = dist.distributed_c10d._get_default_store()
    wanted, got = goes_on(rank, options, folder, words)
    return wanted == got, trouble(folder, manifests(folder)[-1], [0, 1]) is None, wanted[0]


@pytest.mark.processes
def test_a_stop_of_real_processes_changes_nothing(tmp_path):
    for equal, whole, seen in run(in_processes, 2, tmp_path / "checkpoints"):
        assert equal and whole and seen


def test_a_checkpoint_of_another_model_is_a_sentence(alone, tmp_path):
    trainer = make_trainer(0, num_stages=2, simulated=True, steps=1)
    checkpoints = checkpoints_of(trainer, tmp_path, dist.HashStore())
    checkpoints.save(1, lambda: collect(trainer, checkpoints))
    checkpoints.wait()
    other = make_trainer(0, num_stages=2, simulated=True, steps=1)
    with torch.no_grad():
        row_of(other.stages[1])[0].weight = torch.nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(CheckpointError, match=r"0.weight is torch.float32 of shape \[12, 12\] in the checkpoint"):
        resume(other, checkpoints_of(other, tmp_path, dist.HashStore()), manifests(tmp_path)[-1])


class Prodigy(torch.optim.SGD):
    """It has no learning rate but an estimate, one for all parameters."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.defaults["d"] = self.param_groups[0]["d"] = 1e-6

    def step(self):
        super().step()
        self.param_groups[0]["d"] *= 2


def test_what_an_optimizer_counts_for_all_parameters_is_in_no_checkpoint(alone, tmp_path):
    optimizer = {"name": f"{__name__}:Prodigy", "lr": 0.1}
    trainer = make_trainer(0, num_stages=2, simulated=True, steps=2, optimizer=optimizer)
    trainer.train_step(0)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint can hold what Prodigy keeps, d; set checkpoint.every to 0"
    ):
        collect(trainer, checkpoints_of(trainer, tmp_path, dist.HashStore()))


def test_weights_and_moments_of_a_checkpoint_are_no_copies_until_the_next_step(alone, tmp_path, monkeypatch):
    """A checkpoint held each weight and moment twice while it was written."""
    trainer = make_trainer(0, num_stages=2, simulated=True, steps=3, optimizer={"name": "adamw"})
    trainer.train_step(0)
    checkpoints, may_write = checkpoints_of(trainer, tmp_path, dist.HashStore()), threading.Event()
    claim = checkpoint.claim
    monkeypatch.setattr(checkpoint, "claim", lambda *given: (may_write.wait(30), claim(*given)))
    kept = []

    def taken():
        kept.append(collect(trainer, checkpoints))
        return kept[0]

    checkpoints.save(1, taken)
    [tensors, _] = [state.tensors for state in kept[0].values()]
    stage, optimizer = trainer.stages[0], trainer.sync.optimizers[0]
    held = {
        each.data_ptr()
        for parameter in stage.submod.parameters()
        for each in (parameter, *optimizer.state[parameter].values())
    }
    assert {tensor.data_ptr() for tensor in tensors.values()} == held
    before = {name: tensor.tolist() for name, tensor in tensors.items()}
    trainer.train_step(1)
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == before, "copied, because nothing was written"
    assert held.isdisjoint(tensor.data_ptr() for tensor in tensors.values())
    may_write.set()
    checkpoints.wait()


def test_a_step_waits_for_the_tensors_that_are_being_written(alone, tmp_path, monkeypatch):
    trainer = make_trainer(0, num_stages=2, simulated=True, steps=3)
    trainer.train_step(0)
    wanted = weights_of(trainer)
    checkpoints, begun = checkpoints_of(trainer, tmp_path, dist.HashStore()), threading.Event()
    real_write = checkpoint.write_tensors

    def slowly(path, tensors):
        begun.set()
        time.sleep(0.1)
        return real_write(path, tensors)

    monkeypatch.setattr(checkpoint, "write_tensors", slowly)
    checkpoints.save(1, lambda: collect(trainer, checkpoints))
    assert begun.wait(30)
    trainer.train_step(1)
    checkpoints.wait()
    again = make_trainer(0, num_stages=2, simulated=True, steps=3)
    resume(again, checkpoints_of(again, tmp_path, dist.HashStore()), manifests(tmp_path)[-1])
    assert weights_of(again) == wanted
