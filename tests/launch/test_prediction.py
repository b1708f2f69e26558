"""Questions about slow links, answered for workloads small enough to answer by hand."""

import math
from dataclasses import replace

import pytest

from support.workloads import uniform
from thinwire.launch.shared.links import Network
from thinwire.launch.timing.prediction import (
    HIDDEN,
    bandwidth_text,
    best,
    limit,
    mistakes_of,
    needed_bandwidth,
    predict_each,
    run,
    verdict,
)
from thinwire.launch.timing.timetable import timetable
from thinwire.launch.timing.workload import NO_COMPRESSION, CodecCost, codec_pair
from thinwire.pipeline.schedules import SCHEDULES

QUARTER = codec_pair("q(8)")


def predict(workload, schedule, codec, network):
    """The prediction for one codec."""
    [found] = predict_each(workload, schedule, [codec], network)
    return found


def workload(num_stages=4, num_microbatches=8):
    return uniform(
        "even",
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        forward=0.05,
        backward=0.1,
        shape=(2, 100, 100),
    )


@pytest.mark.parametrize(
    ("schedule", "held"), [("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1]), ("1f1b-wan", [7, 5, 3, 1])]
)
def test_the_micro_batches_that_a_stage_keeps_are_those_of_its_schedule(schedule, held):
    assert timetable(schedule, 4, 4, 8).held("stage") == held


@pytest.mark.parametrize("codec", [NO_COMPRESSION, QUARTER], ids=["none", "q(8)"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b-wan"])
def test_the_bandwidth_needed_is_where_the_wire_stops_being_hidden(schedule, codec):
    work = workload()
    needed = needed_bandwidth(work, schedule, codec, Network())
    full = run(work, schedule, codec, Network()).seconds
    above, below = (run(work, schedule, codec, Network(bandwidth=needed * by)).seconds for by in (1.01, 0.99))
    assert above <= full / HIDDEN < below


def test_four_times_fewer_bytes_need_almost_a_quarter_of_the_bandwidth():
    work = workload()
    ratio = needed_bandwidth(work, "gpipe", NO_COMPRESSION, Network()) / needed_bandwidth(
        work, "gpipe", QUARTER, Network()
    )
    assert 3.8 < ratio < 4.0  # frames have a header, and rows a scale


def test_nothing_crosses_with_one_stage():
    work = workload(num_stages=1)
    assert needed_bandwidth(work, "gpipe", NO_COMPRESSION, Network()) == 0.0
    assert predict(work, "gpipe", NO_COMPRESSION, Network(bandwidth=1e3)).of_unthrottled == 1.0


def test_compression_pays_on_slow_links_and_not_on_fast_ones():
    said = {}
    for bandwidth in (1e12, 1e5):
        network = Network(bandwidth=bandwidth)
        said[bandwidth] = verdict([predict(workload(), "gpipe", codec, network) for codec in (NO_COMPRESSION, QUARTER)])
    assert said[1e12].startswith("at 1000gbit with gpipe compression does not pay")
    assert said[1e5].startswith("at 100kbit with gpipe compression pays: q(8) is 3.")


def test_a_codec_that_costs_more_than_it_saves_does_not_pay():
    dear = {(channel, "q(8)"): CodecCost(1.0, 1.0) for channel in ("activations", "gradients")}
    work, network = replace(workload(), costs=dear), Network(bandwidth=1e9)
    found = predict(work, "gpipe", QUARTER, network)
    assert found.speedup < 1
    assert found.seconds > limit(work, "gpipe", QUARTER, network)
    assert "does not pay" in verdict([predict(work, "gpipe", NO_COMPRESSION, network), found])


def test_the_best_schedule_depends_on_the_memory_there_is():
    work = uniform(
        "as 2206.01299", num_stages=8, num_microbatches=32, forward=0.045, backward=0.135, shape=(1, 1024, 1600)
    )
    codec, network = codec_pair("q(4)/q(8)"), Network(bandwidth=100e6)
    found = [predict(work, name, codec, network) for name in ("gpipe", "1f1b", "1f1b-wan")]
    assert best(found).schedule == "1f1b-wan"
    assert best(found, 15).in_flight == 15
    assert best(found, 14).schedule == "1f1b"
    assert best(found, 7) is None


def test_what_gains_less_than_noise_is_not_advised():
    """It said that compression does not pay, and then that the best was a codec, for 0.2 % of speed."""
    network = Network(bandwidth=1e9)
    found = [
        one for name in ("gpipe", "1f1b") for one in predict_each(workload(), name, [NO_COMPRESSION, QUARTER], network)
    ]
    fastest = max(found, key=lambda one: one.samples_per_second)
    assert fastest.codec == "q(8)" and "does not pay: take none" in verdict(found[:2])
    assert best(found).codec == "none"
    assert best(found).samples_per_second == max(one.samples_per_second for one in found if one.codec == "none")
    assert best([one for one in found if one.codec != "none"]) == fastest


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if not mistakes_of(workload(), name)])
def test_every_schedule_does_the_same_work_on_the_same_processes(schedule):
    found = predict(workload(), schedule, NO_COMPRESSION, Network())
    assert len(found.busy) == 4
    assert found.busy == pytest.approx([8 * 0.15] * 4)
    assert found.of_unthrottled == 1.0
    assert found.in_flight <= 8


def test_codecs_that_are_predicted_together_are_compared_as_each_alone():
    """What they are compared with is simulated once a schedule and network: that was three quarters of a prediction."""
    workload = uniform("w", num_stages=3, num_microbatches=4, forward=0.01, backward=0.02, shape=(4, 64, 64))
    network, codecs = Network(bandwidth=5e6), [NO_COMPRESSION, codec_pair("q(4)/q(8)"), codec_pair("q(2)")]
    together = predict_each(workload, "1f1b", codecs, network)
    assert together == [predict(workload, "1f1b", codec, network) for codec in codecs]
    assert together[0].speedup == 1 < together[1].speedup < together[2].speedup


def test_all_of_the_speed_is_that_of_unlimited_bandwidth_at_the_same_latency():
    """Latency counted as bandwidth: over links without a limit, a step reached a third of its speed at no limit."""
    slow = Network(bandwidth=math.inf, latency=0.5)
    assert predict(workload(), "gpipe", NO_COMPRESSION, slow).of_unthrottled == 1.0
    assert predict(workload(), "gpipe", NO_COMPRESSION, replace(slow, bandwidth=1e6)).of_unthrottled < 1.0


def by_hand(order, stages, microbatches, forward, backward, wire, latency, codec):
    """Seconds of a pass over one link each way: relaxed until no action and no frame can begin any later."""
    sequence = {stage: order(stage, stages, microbatches) for stage in range(stages)}
    ends, arrives = {}, {}
    for _ in range(2 * stages * microbatches + 2):  # every round settles one action more, at the least
        for stage, todo in sequence.items():
            now, free = 0.0, {1: 0.0, -1: 0.0}
            for kind, index in todo:
                towards = 1 if kind == "F" else -1
                takes, gives = 0 <= stage - towards < stages, 0 <= stage + towards < stages
                now = max(now, arrives.get((kind, stage, index), 0.0) if takes else 0.0)
                now += (forward if kind == "F" else backward) + codec * takes + codec * gives
                ends[stage] = now
                if gives:
                    free[towards] = max(now, free[towards]) + wire
                    arrives[kind, stage + towards, index] = free[towards] + latency
    return max(ends.values())


def of_gpipe(stage, stages, microbatches):
    return [(kind, index) for kind in "FB" for index in range(microbatches)]


def of_1f1b(stage, stages, microbatches, ahead=None):
    ahead = min(microbatches, stages - stage if ahead is None else ahead(stage, stages))
    order = [("F", index) for index in range(ahead)]
    for index in range(microbatches):
        order += [("B", index), *([("F", index + ahead)] if index + ahead < microbatches else [])]
    return order


def of_1f1b_wan(stage, stages, microbatches):
    return of_1f1b(stage, stages, microbatches, lambda stage, stages: 2 * (stages - 1 - stage) + 1)


ORDERS = {"gpipe": of_gpipe, "1f1b": of_1f1b, "1f1b-wan": of_1f1b_wan}


@pytest.mark.parametrize("schedule", ORDERS)
@pytest.mark.parametrize(("stages", "microbatches", "passes"), [(2, 2, 1), (2, 7, 3), (3, 4, 2), (5, 11, 1)])
@pytest.mark.parametrize(("bandwidth", "latency", "cost"), [(math.inf, 0.0, 0.0), (8e6, 0.03, 0.004), (1e6, 0.2, 0.0)])
def test_a_prediction_is_what_the_orders_of_the_papers_give(
    schedule, stages, microbatches, passes, bandwidth, latency, cost
):
    def seconds(nbytes, codec, rate):
        wire = 8 * nbytes / rate
        return passes * by_hand(ORDERS[schedule], stages, microbatches, 0.05, 0.1, wire, latency, codec)

    costs = {(channel, "q(8)"): CodecCost(cost, cost) for channel in ("activations", "gradients")}
    work = replace(workload(stages, microbatches), costs=costs, accumulation=passes)
    found = predict(work, schedule, QUARTER, Network(bandwidth=bandwidth, latency=latency))
    raw, packed = 64 + 4 * 20_000, 64 + 2 * 200 + 20_000  # a header; of q(8), a bf16 scale a row
    taken = seconds(packed, cost, bandwidth)
    assert found.seconds == pytest.approx(taken, rel=1e-9)
    assert found.samples_per_second == pytest.approx(passes * 2 * microbatches / taken, rel=1e-9)
    assert found.speedup == pytest.approx(seconds(raw, 0.0, bandwidth) / taken, rel=1e-9)
    assert found.of_unthrottled == pytest.approx(seconds(raw, 0.0, math.inf) / taken, rel=1e-9)
    spent = [
        0.15 * microbatches + 2 * cost * microbatches * (1 if stage in (0, stages - 1) else 2)
        for stage in range(stages)
    ]
    assert found.busy == pytest.approx([passes * each for each in spent], rel=1e-9)
    for busy, wait, bubble in zip(found.busy, found.wait, found.bubble, strict=True):
        assert busy + wait + bubble == pytest.approx(found.seconds, rel=1e-9)


def test_schedules_that_cannot_run_are_left_out():
    few = workload(num_microbatches=2)
    assert all(mistakes_of(few, name) for name in ("1f1b", "dualpipev")) and not mistakes_of(few, "gpipe")


@pytest.mark.parametrize(
    ("bits", "text"), [(1e10, "10gbit"), (3.05e8, "305mbit"), (2e3, "2kbit"), (7, "7bit"), (math.inf, "unlimited")]
)
def test_bandwidths_are_said_as_people_write_them(bits, text):
    assert bandwidth_text(bits).startswith(text)
