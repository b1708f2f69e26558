"""The time of a step with replicas, and over hosts that share a wire: small enough to work out by hand."""

import math
from dataclasses import replace

import pytest

from support.recipe_runs import simulate
from support.run_files import summary
from support.toy import make_trainer
from thinwire.launch.run import recipe
from thinwire.launch.run.assembly import prepare
from thinwire.launch.timing.exchange import NO_COMPRESSION, ReplicaWork, loads
from thinwire.launch.timing.network import Link, Network
from thinwire.launch.timing.prediction import exchange_verdict, label_of, predict, predict_each, run, step
from thinwire.launch.timing.profile import replica_work
from thinwire.launch.timing.workload import codec_pair, uniform
from thinwire.pipeline.options.overrides import ReplicaCodecs
from thinwire.pipeline.replicas.layout import TILES

FRAME = 64 + 4 * 100 * 100
"""Bytes of an uncompressed frame of `pipeline`."""
PART = 64 + 2 * 2048
"""Bytes of two rows of gradients."""


def pipeline(num_stages=4, num_microbatches=6, forward=0.0, backward=0.0, replicas=None):
    sizes = {"num_stages": num_stages, "num_microbatches": num_microbatches, "shape": (1, 100, 100)}
    return replace(uniform("even", forward=forward, backward=backward, **sizes), replicas=replicas)


def pair(elements, **others):
    """Two replicas of two stages."""
    return ReplicaWork(count=2, gradients="none", elements=elements, **others)


def seconds(work, schedule, **network):
    return run(work, schedule, NO_COMPRESSION, Network(**network)).seconds


def test_a_home_receives_one_message_after_the_other():
    """Without compute, the closed form of Protocol NanoGPT: M messages each way, and S - 2 hops before the first."""
    message = 8 * FRAME / 1e6 + 0.05
    found = seconds(pipeline(8, 16), "gpipe", wires="home", bandwidth=1e6, latency=0.05)
    assert found == pytest.approx((16 + 6) * 2 * message)


def test_a_host_is_a_pair_where_both_directions_never_compete():
    """GPipe fills with activations, then drains with gradients; 1F1B mixes both on one downlink."""
    work = pipeline(forward=0.01, backward=0.02)
    of_pair, of_host = (seconds(work, "gpipe", wires=wires, bandwidth=4e6, latency=0.03) for wires in ("pair", "host"))
    assert of_host == pytest.approx(of_pair)
    of_pair, of_host = (seconds(work, "1f1b", wires=wires, bandwidth=4e6) for wires in ("pair", "host"))
    assert of_host > 1.05 * of_pair


@pytest.mark.parametrize("wires", ["host", "home"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zbv-zero-bubble"])
def test_without_wires_all_models_are_one(wires, schedule):
    work = pipeline(2, 4, 0.01, 0.02)
    assert seconds(work, schedule, wires=wires) == pytest.approx(seconds(work, schedule))


def test_an_exchange_is_two_frames_and_two_latencies():
    """Four rows of weights: each of two replicas owns two."""
    work = pipeline(2, 4, 0.01, 0.02, pair((4 * 512, 4 * 512)))
    alone = step(work, "gpipe", NO_COMPRESSION, Network()).seconds
    slow = Link(bandwidth=8 * PART, latency=0.25)
    assert alone == run(work, "gpipe", NO_COMPRESSION, Network()).seconds
    for wires, wanted in (("pair", 2.5), ("host", 2.5), ("home", 2.5)):
        found = step(work, "gpipe", NO_COMPRESSION, Network(wires=wires, replicas=slow))
        assert found.exchange.longest == pytest.approx(wanted)
        assert found.seconds == pytest.approx(alone + wanted)
        assert found.every(5) == pytest.approx(alone + wanted / 5)


def test_three_replicas_share_the_uplink_of_a_host():
    """Of 7 rows one replica owns 3: it sends 3 rows twice as sums, and 4 rows as parts."""
    [load] = loads(7 * 512, 3, "none")
    assert (load.frames, load.longest, load.nbytes) == (2, 64 + 3 * 2048, 2 * (64 + 3 * 2048))
    work = pipeline(2, 4, replicas=ReplicaWork(count=3, gradients="none", elements=(7 * 512, 0)))
    link = Link(bandwidth=8 * load.longest, latency=0.5)
    took = {
        wires: step(work, "gpipe", NO_COMPRESSION, Network(wires=wires, replicas=link)).exchange.longest
        for wires in ("pair", "host", "home")
    }
    assert took == pytest.approx({"pair": 2 * 1.5, "host": 2 * 2.5, "home": 2 * (2 + 2 * 0.5)})
    # the same replica sends two parts of two rows, and three rows as a sum twice: its parts are not the longest
    found = step(work, "gpipe", NO_COMPRESSION, Network()).exchange
    assert found.nbytes == 2 * (64 + 2 * 2048) + 2 * (64 + 3 * 2048)


def test_the_drain_hides_the_exchange_of_a_later_stage():
    """The last stage is done 0.02 s before the first, and is needed again 0.01 s after it."""
    network = Network(replicas=Link(bandwidth=8 * PART / 0.01))  # 0.01 s a frame
    work = pipeline(2, 4, 0.01, 0.02, pair((0, 4 * 512)))
    hidden = step(work, "gpipe", NO_COMPRESSION, network)
    assert hidden.exchange.longest == pytest.approx(0.02)
    assert hidden.exchange.adds == 0.0
    slower = replace(network, replicas=Link(bandwidth=8 * PART / 0.02))  # 0.04 s, of which 0.02 + 0.01 are hidden
    assert step(work, "gpipe", NO_COMPRESSION, slower).exchange.adds == pytest.approx(0.01)
    clipped = replace(work, replicas=pair((0, 4 * 512), clips=True))
    assert step(clipped, "gpipe", NO_COMPRESSION, slower).exchange.adds == pytest.approx(0.02)


def test_buckets_overlap_on_the_wire():
    """24 MiB of weights in two buckets: the sums of the first leave right behind the parts of the second."""
    elements = 3 * 8192 * 512 // 2
    first, second = loads(elements, 2, "none")
    work = pipeline(2, 4, replicas=pair((elements, 0)))
    found = step(work, "gpipe", NO_COMPRESSION, Network(bandwidth=1e6, latency=0.1)).exchange.longest
    assert found == pytest.approx(2 * 8 * (first.nbytes + second.nbytes) / 1e6 + 0.1)


def test_who_adds_up_for_himself_sends_everything_to_all_and_no_sums():
    """A tile of 64 x 64, so one row: 16,384 bytes and a header."""
    [load] = loads(4096, 3, "none", TILES, to_all=True)
    assert (load.nbytes, load.frames, load.elements) == (2 * (64 + 4 * 4096), 2, 4096)
    work = ReplicaWork(count=3, gradients="none", elements=(4096, 0), layout=TILES, to_all=True)
    network = Network(wires="host", replicas=Link(bandwidth=8 * load.nbytes, latency=0.25))
    found = step(pipeline(2, 1, replicas=work), "gpipe", NO_COMPRESSION, network)
    assert found.exchange.longest == pytest.approx(1 + 0.25)
    assert found.exchange.nbytes == load.nbytes


def test_statistics_of_batch_norms_travel_ahead_of_the_gradients():
    """Those of three replicas take a row of 512 elements to each of the two others."""
    [load] = loads(7 * 512, 3, "none")
    work = ReplicaWork(count=3, gradients="none", elements=(7 * 512, 0), statistics=(10, 0))
    network = Network(wires="host", replicas=Link(bandwidth=8 * load.nbytes))
    found = step(pipeline(2, 1, replicas=work), "gpipe", NO_COMPRESSION, network).exchange
    assert found.longest == pytest.approx(2 + 2 * (64 + 2048) / load.nbytes)
    assert found.nbytes == load.both + 2 * (64 + 2048)


@pytest.mark.slow
def test_a_run_sends_the_bytes_that_were_predicted(tmp_path):
    """A ResNet has statistics besides. Each of two replicas owns half of each bucket."""
    options = ["--replicas.count", "2", "--replicas.gradients", "ef(q(4))", "--training.steps", "1"]
    rows = summary(simulate("resnet-tiny", tmp_path / "run", *options))["replicas"]
    work = replica_work(prepare(recipe.parse(["resnet-tiny", *options])))
    assert all(work.statistics)
    for stage in range(4):
        sent = sum(row["bytes"] for row in rows if row["stage"] == stage)
        assert sent == pytest.approx(2 * work.sent(stage), rel=1e-3), (
            "a bucket may have one row more for one of the two"
        )


def test_codecs_cost_what_they_were_measured_to():
    spent = {"encode": {"none": 1e-5}, "decode": {"none": 2e-5}}
    work = pipeline(2, 4, replicas=pair((1024, 0), **spent))
    # all are encoded and decoded, half of them twice; the own part comes twice
    wanted = 1024 * (1e-5 + 2e-5 + 1e-5 / 2 + 2e-5)
    assert step(work, "gpipe", NO_COMPRESSION, Network()).exchange.longest == pytest.approx(wanted)
    assert step(work.without_costs, "gpipe", NO_COMPRESSION, Network()).exchange.longest == 0.0


@pytest.mark.parametrize("replicas", [2, 3])
def test_bytes_are_those_of_real_frames(replicas, alone):
    """A stage of the toy has one row of weights, which replica 0 owns and sends to all others."""
    trainer = make_trainer(0, simulated=True, replicas=replicas, steps=1, exchange="ef(q(4))")
    trainer.train(lambda record: None)
    for stage in trainer.stages:
        [load] = loads(12 * 13, replicas, "ef(q(4))")
        sums = stage.meter.sent[stage.stage_index, "sums", "train"]
        assert (load.nbytes, load.frames) == (sums.bytes, sums.frames)


def test_a_rare_exchange_is_shared_out_among_its_steps():
    found = step(pipeline(2, 4, 0.01, 0.02, pair((4096 * 512,) * 2)), "gpipe", NO_COMPRESSION, Network(bandwidth=2e7))
    assert found.every(30) == pytest.approx(found.seconds - found.exchange.adds * 29 / 30)


def test_a_step_has_the_samples_of_all_passes_of_all_replicas():
    work = pipeline(2, 4, 0.01, 0.02, pair((0, 0), passes=(3, 3)))
    assert work.samples == 2 * 3 * 4
    assert step(work, "gpipe", NO_COMPRESSION, Network()).seconds == pytest.approx(
        3 * run(work, "gpipe", NO_COMPRESSION, Network()).seconds
    )


def test_all_wait_for_the_replica_that_takes_longest():
    """At half the speed, without a wire, a pass takes twice as long."""
    work = pipeline(2, 4, 0.01, 0.02, pair((0, 0), passes=(3, 1)))
    one_pass = run(work, "gpipe", NO_COMPRESSION, Network()).seconds
    assert work.samples == 4 * 4
    for speed, passes in ((1.0, 3), (0.5, 3), (0.25, 4)):
        found = predict(work.with_speeds({1: speed}), "gpipe", NO_COMPRESSION, Network())
        assert found.seconds == pytest.approx(passes * one_pass)
        assert found.samples_per_second == pytest.approx(16 / (passes * one_pass))
        assert found.passes == (1 if passes == 4 else 3)


def test_it_is_compared_with_nothing_compressed_and_said_whether_rarely_pays():
    work = pipeline(2, 4, 0.01, 0.02, pair((4096 * 512,) * 2)).exchanging("ef(q(4))")
    network = Network(bandwidth=2e7)
    none, both = predict_each(work.exchanging("none"), "gpipe", [NO_COMPRESSION, codec_pair("q(4)/q(8)")], network, 30)
    assert none.speedup == 1.0 < both.speedup
    found = predict(work, "gpipe", codec_pair("q(4)/q(8)"), network)
    assert found.speedup > both.speedup and found.codec == "q(4)/q(8), replicas ef(q(4))"
    assert found.exchange.nbytes == pytest.approx(both.exchange.nbytes * 4.03 / 32, rel=0.01)
    assert "every 30 steps pays" in exchange_verdict([none, both])
    [fast] = predict_each(work, "gpipe", [NO_COMPRESSION], Network(bandwidth=math.inf), 30)
    assert "every step is enough" in exchange_verdict([fast])


def test_replicas_have_codecs_and_links_of_their_own():
    """Replica 2 sends everything: it makes the step as slow as without compression, unless its links are fast."""
    own = {2: ReplicaCodecs(activations="none", gradients="none")}
    alike = ReplicaWork(count=3, gradients="none", elements=(512, 512))
    work = pipeline(2, 4, 0.01, 0.02, alike)
    some = replace(work, replicas=replace(alike, codecs=own))
    slow, codec = Network(bandwidth=1e6), codec_pair("q(4)")
    mended = replace(slow, inside={2: Link(bandwidth=1e9)})
    took = [
        step(each, "gpipe", codec, network).course.seconds
        for each, network in ((work, slow), (some, slow), (some, mended))
    ]
    assert took == [took[0], step(work, "gpipe", NO_COMPRESSION, slow).course.seconds, took[0]]
    assert took[1] > 5 * took[0]
    assert step(some, "gpipe", NO_COMPRESSION, slow).course.seconds == took[1]
    assert label_of(some, codec) == "q(4), none in replica 2, replicas none"


def test_a_recipe_may_compress_in_single_replicas_alone():
    """What the recipe has in common is `none` there, too, but not what nobody compresses is compared with."""
    own = {1: ReplicaCodecs(activations="q(4)", gradients="q(4)")}
    work = pipeline(2, 4, 0.01, 0.02, replace(pair((512, 512)), codecs=own))
    network = Network(bandwidth=1e6, inside={0: Link(bandwidth=1e9)}, replicas=Link(bandwidth=1e9))
    none, some = predict_each(work, "gpipe", [NO_COMPRESSION, codec_pair("none")], network)
    assert (none.codec, some.codec) == ("none, replicas none", "none, q(4) in replica 1, replicas none")
    assert none.speedup == pytest.approx(1.0) and some.speedup > 2


def test_one_of_all_replicas_that_are_alike_is_simulated():
    codecs = {replica: ReplicaCodecs(activations="none") for replica in (1, 3)}
    work = ReplicaWork(count=6, gradients="none", elements=(0,), passes=(1, 1, 2, 1, 1, 1), codecs=codecs)
    assert work.unlike({}) == [0, 1, 2]
    assert work.unlike({3: Link(bandwidth=1e9)}) == [0, 1, 2, 3]
    assert replace(work, speeds={5: 0.5}).unlike({}) == [0, 1, 2, 5]
