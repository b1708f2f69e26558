import math
from dataclasses import asdict, replace
from itertools import chain

import pytest
import torch

from support import processes
from support.codec_helpers import KEY
from support.toy import make_trainer
from thinwire.compress import parse
from thinwire.launch.run import tables
from thinwire.launch.timing import step_time
from thinwire.launch.timing.timetable import timetable
from thinwire.pipeline import auto as automatic
from thinwire.pipeline.auto import Automatic, Measured, choose, choose_for_all
from thinwire.pipeline.frames import CHANNELS
from thinwire.pipeline.measuring.probe import LinkSpeed
from thinwire.pipeline.options import CompressionOptions, PipelineOptions
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.schedules import SCHEDULES, Overlap, process_of_stages
from thinwire.pipeline.wire.channel import frame_bytes, frame_length

# --- the choice ---------------------------------------------------------------------------------------------------

SIZES = {"none": 1000, "q(8)": 250, "q(4)": 125}
BOTH = Overlap(1.0, phased=True)


def measured(forward, backward, links, latency=0.0):
    return Measured(
        compute={"activations": forward, "gradients": backward},
        links={pair: LinkSpeed(goodput=goodput, latency=latency) for pair, goodput in links.items()},
    )


def codecs(found):
    return {(choice.boundary, choice.channel): choice.codec for choice in found}


@pytest.mark.parametrize(
    ("overlap", "goodput", "latency", "activation", "gradient"),
    [
        (BOTH, 1000.0, 0.0, "none", "none"),  # a second each, behind 1 s and 2 s
        (BOTH, 999.0, 0.0, "q(8)", "none"),
        (BOTH, 250.0, 9.0, "q(8)", "q(8)"),  # latency is felt in the fill only
        (BOTH, 125.0, 0.0, "q(4)", "q(8)"),
        (BOTH, 1.0, 0.0, "q(4)", "q(4)"),  # nothing hides
        (Overlap(1.0), 1000.0, 0.1, "q(8)", "none"),
        (Overlap(1.0), 1000.0, 1.5, "q(4)", "q(8)"),
        (Overlap(0.05), 5000.0, 0.0, "q(8)", "q(8)"),
        (Overlap(0.05), 10000.0, 0.0, "q(8)", "none"),
    ],
)
def test_the_mildest_codec_under_which_the_wire_hides(overlap, goodput, latency, activation, gradient):
    links = {(0, 1): goodput, (1, 0): goodput}
    found = choose(
        {(0, channel): SIZES for channel in CHANNELS},
        measured([0.5, 1.0], [2.0, 0.1], links, latency),
        [0, 1],
        overlap,
    )
    assert codecs(found) == {(0, "activations"): activation, (0, "gradients"): gradient}
    for choice in found:
        assert choice.nbytes == SIZES[choice.codec]
        assert choice.wire == pytest.approx(choice.nbytes / goodput + (0 if overlap.phased else latency))
        assert choice.hides == (choice.wire <= choice.hidden)
        assert choice.milder_wire is None or choice.milder_wire > choice.hidden


def test_each_boundary_and_direction_has_its_own():
    links = {(0, 1): 1000.0, (1, 0): 125.0, (1, 2): 250.0, (2, 1): 1e9}
    frames = {(boundary, channel): SIZES for boundary in range(2) for channel in CHANNELS}
    found = codecs(choose(frames, measured([1.0] * 3, [1.0] * 3, links), [0, 1, 2], BOTH))
    assert found == {
        (0, "activations"): "none",
        (0, "gradients"): "q(4)",
        (1, "activations"): "q(8)",
        (1, "gradients"): "none",
    }


def test_boundaries_between_the_same_processes_share_their_link_and_one_inside_a_process_has_none():
    """A process's stages compute one after the other, so all of them together hide frames."""
    links = {(0, 1): 1000.0, (1, 0): 1000.0}
    frames = {(boundary, "activations"): SIZES for boundary in range(3)}
    looped = choose(frames, measured([0.5] * 4, [0.5] * 4, links), [0, 1, 0, 1], BOTH)
    assert [(choice.sharing, choice.codec) for choice in looped] == [(2, "q(8)"), (1, "none"), (2, "q(8)")]
    mixed = choose(frames, measured([0.5] * 4, [0.5] * 4, links), [0, 1, 0, 1], Overlap(1.0))
    assert [choice.sharing for choice in mixed] == [3, 3, 3]  # gradients of the other boundaries too
    there_and_back = choose(frames, measured([0.5] * 4, [0.5] * 4, links), [0, 1, 1, 0], BOTH)
    assert [(choice.goodput, choice.codec) for choice in there_and_back] == [
        (1000.0, "none"),
        (None, "none"),
        (1000.0, "none"),
    ]


def test_replicas_choose_for_the_one_that_needs_the_strongest():
    """Replica 1 has a slow way forward, replica 2 a slow way back; replica 0 is twice as slow, so all have its time."""
    frames = {(0, channel): SIZES for channel in CHANNELS}
    links = [{(0, 1): 1e9, (1, 0): 1e9}, {(0, 1): 130.0, (1, 0): 1e9}, {(0, 1): 400.0, (1, 0): 70.0}]
    seconds = [[2.0, 1.0], [1.0, 0.5], [1.0, 0.5]]
    replicas = [(frames, measured(each, each, them)) for each, them in zip(seconds, links, strict=True)]
    forward, back = choose_for_all(replicas, [0, 1], BOTH)
    assert (forward.codec, forward.replica, forward.hidden) == ("q(8)", 1, 2.0), "behind 1 s it would take q(4)"
    assert (back.codec, back.replica) == ("q(4)", 2)
    assert str(back).startswith("auto: boundary 1 -> 0 gradients of replica 2: q(4), 125 bytes a frame")
    shown = tables.choices({"choices": [asdict(choice) | {"hides": choice.hides} for choice in (forward, back)]})
    assert [row[0] for row in shown.rows] == ["0 -> 1 of replica 1", "1 -> 0 of replica 2"]
    # with half as many micro-batches, each has twice the time
    short = [(each, replace(found, microbatches=2 if index else 4)) for index, (each, found) in enumerate(replicas)]
    assert [choice.hidden for choice in choose_for_all(short, [0, 1], BOTH)] == [4.0, 4.0]
    assert choose_for_all(replicas[:1], [0, 1], BOTH) == choose(*replicas[0], [0, 1], BOTH)


def test_the_reason_is_told():
    def told(goodput, overlap=BOTH, where=(0, 1)):
        frames = {(0, "gradients"): SIZES}
        (choice,) = choose(frames, measured([1.0] * 2, [0.002] * 2, {(1, 0): goodput}), where, overlap)
        return str(choice)

    assert told(1e6) == (
        "auto: boundary 1 -> 0 gradients: none, 1,000 bytes a frame: 1 ms at 8 Mbit/s, hidden by 2 ms of backward"
    )
    assert " at 12,268 Mbit/s" in told(12268e6 / 8), "it said 1.227e+04"
    assert told(250e3).endswith(
        "q(8), 250 bytes a frame: 1 ms at 2 Mbit/s, hidden by 2 ms of backward; none takes 4 ms"
    )
    assert told(1e4).endswith(
        "12.5 ms at 0.08 Mbit/s, longer than 2 ms of backward: even the strongest candidate slows the step"
    )
    assert "hidden by 5% of 2 ms of backward" in told(1e7, Overlap(0.05))
    assert told(1e7, where=(0, 0)).endswith("the mildest, because both ends are in one process")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_processes", [2, 4])
def test_what_is_said_to_hide_does(schedule, num_processes):
    """Simulated with frames that take exactly as long as they may: more micro-batches cost what they cost for free."""
    spec = SCHEDULES[schedule]
    stages = num_processes * spec.stages_per_process
    process_of = [process_of_stages(schedule, stages, num_processes)[stage] for stage in range(stages)]
    forward, backward = [1.0] * stages, [2.0] * stages
    links = {(a, b): 1.0 for a in range(num_processes) for b in range(num_processes) if a != b}
    frames = {(boundary, channel): {"none": 1} for boundary in range(stages - 1) for channel in CHANNELS}
    found = choose(frames, measured(forward, backward, links), process_of, spec.overlap)

    def per_microbatch(times):
        wires = {
            channel: step_time.ChannelTiming(
                nbytes=[
                    times * choice.hidden / choice.sharing if choice.goodput else 0.0
                    for choice in found
                    if choice.channel == channel
                ],
                bandwidth=8.0,
            )
            for channel in CHANNELS
        }
        compute = step_time.Compute(forward=forward, backward=backward)
        few, many = (
            step_time.time_step(
                timetable(schedule, stages, num_processes, count), compute, wires["activations"], wires["gradients"]
            ).seconds
            for count in (32, 64)
        )
        return (many - few) / 32

    free = per_microbatch(0)
    assert per_microbatch(1) <= 1.05 * free
    if spec.overlap.share == 1:
        assert per_microbatch(2) >= 1.3 * free


# --- the switch ---------------------------------------------------------------------------------------------------

SLOW, FAST = LinkSpeed(goodput=1.0, latency=0.0), LinkSpeed(goodput=1e15, latency=0.0)
CANDIDATES = ["none", "q(8)", "ef21(q(4))"]
AUTO = {"activations": "auto", "gradients": "auto", "candidates": CANDIDATES}
AFTER, STEPS = 2, 6


def train(rank, options, speed, costly=None):
    """Train, choosing after two steps over links of a given speed; what each process saw."""
    automatic.probe = lambda source, target, group: speed if rank < 2 else SLOW
    trainer = make_trainer(rank, steps=STEPS, **options)
    pipeline = PipelineOptions(schedule=options["schedule"], num_stages=options["num_stages"])
    compression = CompressionOptions(**options["compression"])
    chooser = Automatic(trainer.stages, trainer.placement, compression, pipeline)
    losses, bytes_of_steps, choices, tried = [], [], [], []

    def score():
        tried.append(str(trainer.stages[0].wire.compression.method(0, "activations")))
        return tried[-1] in costly

    def after(record):
        losses.append(record.loss)
        bytes_of_steps.append(record.bytes)
        chooser.end_step()
        if record.step + 1 == AFTER:
            choices.extend(chooser.switch(None if costly is None else score))
        chooser.begin_step()

    trainer.train(after)
    digests = {stage.stage_index: stage.digests() for stage in trainer.stages}
    collectives.compare(trainer.placement, digests)
    assert costly is None or tried == CANDIDATES[: -len(costly) - 2 : -1]
    return losses, bytes_of_steps, codecs(choices), digests


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "num_stages", "local"), [("gpipe", 2, ()), ("zbv-zero-bubble", 4, (1,))], ids=["gpipe", "zbv"]
)
def test_both_ends_switch_after_the_same_step_and_training_goes_on(schedule, num_stages, local, alone):
    options = {"schedule": schedule, "num_stages": num_stages, "compression": AUTO}
    found = processes.run(train, 2, options, SLOW)
    (_, first, chosen, digests), (_, second, same, others) = found
    assert chosen == same
    assert chosen == {
        (boundary, channel): "none" if boundary in local else "ef21(q(4))"
        for boundary in range(num_stages - 1)
        for channel in CHANNELS
    }
    for counted in (first, second):
        assert len(set(counted[:AFTER])) == 1
        assert len(set(counted[AFTER:])) == 1
        assert counted[AFTER] < 0.7 * counted[0]
    kept = dict(chain.from_iterable(ends.items() for ends in [*digests.values(), *others.values()]))
    assert {name.split()[1] for name in kept} == {str(b) for b in range(num_stages - 1) if b not in local}
    losses = next(losses for losses, *_ in found if losses[0] is not None)
    assert all(map(math.isfinite, losses))

    by_hand = make_trainer(0, simulated=True, steps=STEPS, **options)
    expected = []

    def after(record):
        expected.append(record.loss)
        if record.step + 1 == AFTER:
            wire = by_hand.stages[0].wire
            wire.switch(CompressionOptions(**options["compression"]).chosen(chosen))
            for stage in by_hand.stages:
                stage.reconnect()

    by_hand.train(after)
    assert losses == expected


@pytest.mark.slow
def test_a_replica_with_slow_links_decides_for_all():
    options = {"schedule": "gpipe", "num_stages": 2, "compression": AUTO, "replicas": 2, "exchange": "bf16"}
    found = processes.run(train, 4, options, FAST)
    wanted = {(0, channel): "ef21(q(4))" for channel in CHANNELS}
    assert [chosen for _, _, chosen, _ in found] == [wanted] * 4
    assert all(math.isfinite(loss) for losses, *_ in found for loss in losses if loss is not None)
    assert found[0][3].keys() == found[2][3].keys() == {0}, "stage 0 keeps buffers in both"


@pytest.mark.slow
@pytest.mark.parametrize(("costly", "activation"), [((), "ef21(q(4))"), (("ef21(q(4))",), "q(8)")])
def test_a_candidate_that_costs_too_much_on_held_out_samples_is_left_out_for_activations(costly, activation):
    options = {"schedule": "gpipe", "num_stages": 2, "compression": AUTO}
    for _, _, chosen, digests in processes.run(train, 2, options, SLOW, costly):
        assert chosen == {(0, "activations"): activation, (0, "gradients"): "ef21(q(4))"}
        assert any("activations" in name for ends in digests.values() for name in ends) != bool(costly)


@pytest.mark.slow
def test_fast_links_change_nothing():
    options = {"schedule": "gpipe", "num_stages": 2, "compression": AUTO}
    for _, counted, chosen, digests in processes.run(train, 2, options, FAST):
        assert set(chosen.values()) == {"none"}
        assert len(set(counted)) == 1
        assert digests == {stage: {} for stage in digests}


def test_a_channel_with_a_codec_of_its_own_keeps_what_it_remembers(alone):
    compression = {"activations": "ef21(q(4))", "gradients": "auto", "candidates": ["q(8)"]}
    trainer = make_trainer(0, simulated=True, steps=STEPS, compression=compression)
    options = CompressionOptions(**compression), PipelineOptions(num_stages=2)
    chooser = Automatic(trainer.stages, trainer.placement, *options)
    trainer.train_step(0)
    chooser.end_step()
    ends = [trainer.stages[0].ends.downstream, trainer.stages[1].ends.upstream]
    before = trainer.stages[0].digests()
    assert not any(stage.keeps_codecs for stage in trainer.stages)
    (choice,) = chooser.switch()
    assert all(stage.keeps_codecs for stage in trainer.stages), "room for the next step may be made ahead"
    assert (choice.channel, choice.codec, choice.goodput) == ("gradients", "q(8)", None)
    now = [trainer.stages[0].ends.downstream, trainer.stages[1].ends.upstream]
    assert trainer.stages[0].digests() == before != {}
    assert now[0].outgoing is ends[0].outgoing
    assert now[1].incoming is ends[1].incoming
    assert str(now[1].outgoing.channel.method) == "q(8)"
    record = trainer.train_step(1)
    assert math.isfinite(record.loss)
    assert trainer.stages[0].digests() != before


def test_a_candidate_that_varies_counts_the_bytes_of_the_run(alone):
    candidate = 'q(4, code="entropy")'
    compression = {"activations": "auto", "gradients": "none", "candidates": [candidate]}
    trainer = make_trainer(0, simulated=True, microbatch_size=64, compression=compression)
    sender, sent = trainer.stages[0].ends.downstream.outgoing, []
    chooser = Automatic(
        trainer.stages, trainer.placement, CompressionOptions(**compression), PipelineOptions(num_stages=2)
    )
    sender.observers.append(lambda channel, microbatch, tensors: sent.append((microbatch.index, tensors[0].clone())))
    trainer.train_step(0)
    chooser.end_step()
    (choice,) = chooser.switch()
    tensor = next(tensor for index, tensor in sent if index == 0)
    codec = parse(candidate)
    payload = torch.empty(codec.nbytes(tensor.shape, tensor.dtype), dtype=torch.uint8)
    codec.encode(tensor, payload, KEY)
    assert choice.nbytes == frame_bytes([codec.used(payload)])
    examples = sender.channel.examples
    assert choice.nbytes != frame_length(examples, codec, codec), "of Gaussian data"
    assert len(sender.observers) == 1, "the choice is made: nothing is kept any more"
