import warnings

import pytest
import torch
import torch.distributed as dist

from support.recipe_runs import SHORT, TINY
from support.toy import Task, make_trainer
from thinwire.compress import StoreError
from thinwire.compress.feedback import DifferenceFeedback
from thinwire.errors.files import MARK
from thinwire.launch import cli
from thinwire.pipeline import CompressionOptions, Wire
from thinwire.pipeline.errors import MismatchError, OptionsError
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.processes.placement import Placement


def told(compression, alone):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(0, num_stages=2, simulated=True, compression=compression)
    return [str(warning.message) for warning in caught if "will not converge" in str(warning.message)]


def test_differences_around_a_codec_that_is_not_contractive_are_warned_about_with_its_c(alone):
    (sentence,) = told({"activations": 'ef21(q(1, scale="minmax", per="tensor"))', "gradients": "q(8)"}, alone)
    assert 'ef21(q(1, scale="minmax", per="tensor")) for the activations of boundary 0' in sentence
    c = float(sentence.split("c = ")[1].split()[0])
    assert c > 1


@pytest.mark.parametrize(
    "method", ["ef21(q(2))", "aqsgd(topk(0.1))", "ef21(randk(0.1))", 'ef(q(1, scale="minmax", per="tensor"))']
)
def test_contractive_codecs_and_rules_without_differences_are_not(method, alone):
    assert told({"activations": method, "gradients": "q(8)"}, alone) == []


@pytest.mark.parametrize(
    ("gradients", "warned"),
    [
        ('q(8, per="channel", grid="midrise")', True),
        ('ef(q(8, per="channel", grid="midrise"))', False),
        ('q(8, per="channel")', False),
        ("q(8)", False),
        ("none", False),
        ("reuse", False),
    ],
)
def test_a_codec_that_drowns_most_gradients_is_warned_about(gradients, warned, alone, monkeypatch):
    """A classifier whose gradients had 8 bits and a scale a channel, without zero, never left its first loss."""
    monkeypatch.setattr(Task, "loss_sum", lambda self, output, target: (output * weight).square().sum())
    weight = torch.tensor([1.0] + [1e-5] * 23).view(8, 3, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compression = {"activations": "topk(0.1)" if gradients == "reuse" else "none", "gradients": gradients}
        options = {"num_stages": 2, "microbatch_size": 8, "steps": 2}
        make_trainer(0, simulated=True, compression=compression, **options).train(lambda record: None)
    said = [str(warning.message) for warning in caught if "stand still" in str(warning.message)]
    assert len(said) == warned
    assert all(
        'q(8, per="channel", grid="midrise") changes 9' in sentence and "gradients of boundary 0" in sentence
        for sentence in said
    )


@pytest.mark.slow
def test_stores_on_disk_lie_where_told_and_are_discarded_at_the_end(alone, tmp_path):
    trainer = make_trainer(
        0,
        num_stages=2,
        simulated=True,
        steps=4,
        compression={"activations": 'aqsgd(q(4), store="disk")', "gradients": "q(8)", "store_folder": str(tmp_path)},
    )
    in_memory = make_trainer(
        0, num_stages=2, simulated=True, steps=4, compression={"activations": "aqsgd(q(4))", "gradients": "q(8)"}
    )
    losses = ([], [])
    for made, found in zip((trainer, in_memory), losses, strict=True):
        made.train(lambda record, found=found: found.append(record.loss))
    assert losses[0] == losses[1]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [*(f"boundary-0-activations-0-{end}-train.slots" for end in ("receiver", "sender")), MARK]
    wire = trainer.stages[0].wire
    row = 3 * 12 * 4
    assert [layout.nbytes for layout, path in wire.maker.stores if path is not None] == [64 * row] * 4
    for stage in trainer.stages:
        stage.close()
    wire.maker.files.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_store_folder_that_cannot_be_made_is_named(alone, tmp_path):
    (tmp_path / "file").write_text("")
    compression = {"activations": 'aqsgd(q(4), store="disk")', "store_folder": str(tmp_path / "file" / "stores")}
    trainer = make_trainer(0, num_stages=2, simulated=True, steps=1, compression=compression)
    with pytest.raises(StoreError, match="file/stores: Not a directory; name another folder"):
        trainer.train(lambda record: None)


ON_DISK = {"activations": 'aqsgd(q(4), store="disk")', "gradients": "q(8)"}


def test_stores_on_disk_need_a_folder(alone):
    with pytest.raises(
        OptionsError, match=r"compression\.store_folder must name a folder for stores on disk, got none"
    ):
        Wire(CompressionOptions(**ON_DISK))
    assert Wire(CompressionOptions(**ON_DISK, store_folder="any")).compression.store_folder == "any"


def test_two_wires_in_one_folder_never_delete_each_others_stores(alone, tmp_path):
    """They did: both named the folder "stores", and the later one deleted the files of the earlier."""
    options = {"num_stages": 2, "simulated": True, "compression": {**ON_DISK, "store_folder": str(tmp_path)}}
    first, second = make_trainer(0, **options), make_trainer(0, **options)
    first.train_step(0)
    kept = sorted(tmp_path.iterdir())
    with pytest.raises(
        StoreError, match=r"\.slots is in use by another store; give each run its own folder as compression"
    ):
        second.train_step(0)
    second.stages[0].wire.maker.files.discard()
    assert sorted(tmp_path.iterdir()) == kept != []
    first.train_step(1)
    for stage in first.stages:
        stage.close()
    second = make_trainer(0, **options)
    second.train_step(0)  # what the first one left behind is nobody's
    first.stages[0].wire.maker.files.discard()
    for stage in second.stages:
        stage.close()
    first.stages[0].wire.maker.files.discard()
    second.stages[0].wire.maker.files.discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"activations": 'ef21(q(8), store="disk")'}, {"activations": 'ef21(q(4), store="disk")'}),
        ({"activations": "topk(0.2)", "gradients": "reuse"}, {"activations": "topk(0.5)", "gradients": "reuse"}),
    ],
)
def test_a_wire_that_switches_codecs_trains_as_one_that_begins_with_them(alone, tmp_path, before, after):
    """The file of a store was still open, and `reuse` looked for the indices of the activations until then."""
    kept = {"gradients": "none", "store_folder": str(tmp_path)}
    options = {"num_stages": 2, "simulated": True, "steps": 4, "optimizer": {"name": "sgd", "momentum": 0.0}}
    switched = make_trainer(0, **options, compression=kept | before)
    switched.train_step(0)
    switched.stages[0].wire.switch(CompressionOptions(**kept | after))
    for stage in switched.stages:
        stage.reconnect()
    fresh = make_trainer(0, **options, compression=kept | after | {"store_folder": str(tmp_path / "fresh")})
    for ours, other in zip(fresh.stages, switched.stages, strict=True):
        ours.submod.load_state_dict(other.submod.state_dict())
        ours.passes = dict(other.passes)
    steps = [[each.train_step(step).loss for step in (1, 2)] for each in (switched, fresh)]
    assert steps[0] == steps[1]


def test_buffers_that_differ_are_named(alone):
    trainer = make_trainer(0, num_stages=2, simulated=True, compression={"activations": "ef21(q(4))"})
    trainer.train(lambda record: None)
    where = Placement({0: 0, 1: 0})
    found = {stage.stage_index: stage.digests() for stage in trainer.stages}
    collectives.compare(where, found)
    store = trainer.stages[1].ends.upstream.incoming.coders[0].buffers.store("train")
    store.write(torch.tensor([2]), torch.ones(1, 3, 12))
    with pytest.raises(
        MismatchError, match="buffers of boundary 0 activations tensor 0 train slot 2 differ between stages 0 and 1"
    ):
        collectives.compare(where, {stage.stage_index: stage.digests() for stage in trainer.stages})


@pytest.mark.slow
@pytest.mark.parametrize(("checked", "code"), [("true", 1), ("false", 0)])
def test_a_run_that_checks_its_buffers_stops_where_they_drift_apart(checked, code, tmp_path, capsys, monkeypatch):
    receive = DifferenceFeedback.receive

    def drifting(self, decoded, buffer):
        receive(self, decoded, buffer)
        decoded.mul_(1 + 2**-20)

    monkeypatch.setattr(DifferenceFeedback, "receive", drifting)
    codecs = ["--compression.activations", "ef21(q(4))", "--compression.gradients", "q(8)"]
    command = ["simulate", "gpt2-tiny", *TINY["gpt2-tiny"], *SHORT, *codecs, "--output", str(tmp_path)]
    command += ["--debug.check_buffers", checked]
    assert cli.main(command) == code
    told = "buffers of boundary 0 activations tensor 0 train slot 0 differ between stages 0 and 1"
    assert (told in capsys.readouterr().err) == bool(code)


@pytest.mark.slow
def test_a_stage_comes_back_from_its_state(alone):
    options = {
        "num_stages": 2,
        "simulated": True,
        "steps": 6,
        "optimizer": {"name": "sgd", "lr": 0.0},
        "compression": {"activations": "aqsgd(q(2))", "gradients": "ef21(topk(0.25))"},
    }
    whole, losses = make_trainer(0, **options), []
    states = []

    def after(record):
        losses.append(record.loss)
        if record.step == 2:
            states.extend(stage.state_dict() for stage in whole.stages)

    whole.train(after)
    resumed, again = make_trainer(0, **options), []
    for stage, state in zip(resumed.stages, states, strict=True):
        stage.load_state_dict(state)
    for step in range(3, 6):
        again.append(resumed.train_step(step).loss)
    assert again == losses[3:]


def test_the_group_of_torchs_tests_in_which_nobody_answers_is_refused():
    """The sentence was about a damaged word in the rendezvous store."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(OptionsError, match=r"got fake, with one of 2; take gloo, with world_size 1"):
            Wire()
    finally:
        dist.destroy_process_group()
