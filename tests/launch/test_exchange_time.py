"""The time of a step with replicas: small enough to work out by hand."""

from dataclasses import replace

import pytest

from support.toy import make_trainer
from thinwire.launch.shared.links import Network
from thinwire.launch.timing.exchange_time import ReplicaWork, loads, seconds_alone, time_exchange
from thinwire.launch.timing.prediction import predict, predict_each, run, step
from thinwire.launch.timing.workload import NO_COMPRESSION, codec_pair, uniform
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


def longest(work, **network):
    """Seconds of the longest exchange of a process."""
    return max(seconds_alone(work.replicas, process, Network(**network)) for process in range(work.num_stages))


def test_an_exchange_is_two_frames_and_two_latencies():
    """Four rows of weights: each of two replicas owns two."""
    work = pipeline(2, 4, 0.01, 0.02, pair((4 * 512, 4 * 512)))
    for wires in ("pair", "host"):
        network = Network(wires=wires, bandwidth=8 * PART, latency=0.25)
        course, _, seconds = step(work, "gpipe", NO_COMPRESSION, network)
        assert seconds == pytest.approx(course.seconds + 2.5)


def test_three_replicas_share_the_uplink_of_a_host():
    """Of 7 rows one replica owns 3: it sends 3 rows twice as sums, and 4 rows as parts."""
    [load] = loads(7 * 512, 3, "none")
    assert (load.longest, load.nbytes) == (64 + 3 * 2048, 2 * (64 + 3 * 2048))
    work = pipeline(2, 4, replicas=ReplicaWork(count=3, gradients="none", elements=(7 * 512, 0)))
    link = {"bandwidth": 8 * load.longest, "latency": 0.5}
    took = {wires: longest(work, wires=wires, **link) for wires in ("pair", "host")}
    assert took == pytest.approx({"pair": 2 * 1.5, "host": 2 * 2.5})


def test_the_drain_hides_the_exchange_of_a_later_stage():
    """The last stage is done 0.02 s before the first, and is needed again 0.01 s after it."""
    fast = 8 * PART / 0.01  # 0.01 s a frame
    work = pipeline(2, 4, 0.01, 0.02, pair((0, 4 * 512)))

    def adds(work, bandwidth):
        course = run(work, "gpipe", NO_COMPRESSION, Network())
        return time_exchange(work.replicas, course, Network(bandwidth=bandwidth)).adds

    assert longest(work, bandwidth=fast) == pytest.approx(0.02) and adds(work, fast) == 0.0
    assert adds(work, fast / 2) == pytest.approx(0.01)  # 0.04 s, of which 0.02 + 0.01 are hidden
    clipped = replace(work, replicas=pair((0, 4 * 512), clips=True))
    assert adds(clipped, fast / 2) == pytest.approx(0.02)


def test_buckets_overlap_on_the_wire():
    """24 MiB of weights in two buckets: the sums of the first leave right behind the parts of the second."""
    elements = 3 * 8192 * 512 // 2
    first, second = loads(elements, 2, "none")
    work = pipeline(2, 4, replicas=pair((elements, 0)))
    found = longest(work, bandwidth=1e6, latency=0.1)
    assert found == pytest.approx(2 * 8 * (first.nbytes + second.nbytes) / 1e6 + 0.1)


def test_who_adds_up_for_himself_sends_everything_to_all_and_no_sums():
    """A tile of 64 x 64, so one row: 16,384 bytes and a header."""
    [load] = loads(4096, 3, "none", TILES, to_all=True)
    assert (load.nbytes, load.elements) == (2 * (64 + 4 * 4096), 4096)
    work = ReplicaWork(count=3, gradients="none", elements=(4096, 0), layout=TILES, to_all=True)
    found = longest(pipeline(2, 1, replicas=work), wires="host", bandwidth=8 * load.nbytes, latency=0.25)
    assert found == pytest.approx(1 + 0.25)


def test_codecs_cost_what_they_were_measured_to():
    work = pipeline(2, 4, replicas=pair((1024, 0), encode=1e-5, decode=2e-5))
    # all are encoded and decoded, half of them twice; the own part comes twice
    assert longest(work) == pytest.approx(1024 * (1e-5 + 2e-5 + 1e-5 / 2 + 2e-5))


@pytest.mark.parametrize("replicas", [2, 3])
def test_bytes_are_those_of_real_frames(replicas, alone):
    """A stage of the toy has one row of weights, which replica 0 owns and sends to all others."""
    trainer = make_trainer(0, simulated=True, replicas=replicas, steps=1, exchange="ef(q(4))")
    trainer.train(lambda record: None)
    for stage in trainer.stages:
        [load] = loads(12 * 13, replicas, "ef(q(4))")
        sums = stage.meter.sent[stage.stage_index, "sums", "train"]
        assert load.nbytes == sums.bytes


def test_it_is_compared_with_nothing_compressed():
    work = pipeline(2, 4, 0.01, 0.02, pair((4096 * 512,) * 2))
    network, codecs = Network(bandwidth=2e7), codec_pair("q(4)/q(8)")
    none, boundaries = predict_each(work, "gpipe", [NO_COMPRESSION, codecs], network)
    assert work.samples == 2 * 4 and none.speedup == 1.0 < boundaries.speedup
    compressed = work.exchanging("ef(q(4))")
    assert predict(compressed, "gpipe", codecs, network).speedup > boundaries.speedup
    sent, of = (sum(load.nbytes for load in each.replicas.buckets(0)) for each in (compressed, work))
    assert sent == pytest.approx(of * 4.03 / 32, rel=0.01)
