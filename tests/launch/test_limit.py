"""The simulation against closed forms, a slow re-statement of its rules, and the limits that are known."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.launch.timing.step_time import Frame, time_step
from thinwire.launch.timing.timetable import timetable
from thinwire.pipeline.schedules import SCHEDULES, actions, merge, process_of_stages

UNCOMPRESSED_BYTES = 1024 * 1600 * 4


def timed(table, forward, backward, forth, back, latency=(0.0, 0.0), lost=0.0):
    """A step of stages alike, whose frames take so many seconds each way."""
    frames = (
        [Frame(seconds, delay, lost, 0.0, 0.0)] * (table.num_stages - 1)
        for seconds, delay in zip((forth, back), latency, strict=True)
    )
    return time_step(table, [forward] * table.num_stages, [backward] * table.num_stages, *frames)


def step(schedule, forth, back, stages=8, microbatches=32, forward=0.045, backward=0.135):
    return timed(timetable(schedule, stages, stages, microbatches), forward, backward, forth, back)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 5), (3, 1), (4, 9)])
@pytest.mark.parametrize(("forth", "back"), [(0.0, 0.0), (1.0, 2.0), (5.0, 1.0), (7.0, 11.0)])
def test_gpipe_of_equal_stages_is_its_closed_form(stages, microbatches, forth, back):
    """The slower of compute and wire repeats; the rest is passed once, filling and draining."""
    forward, backward, last = 3.0, 4.0, microbatches - 1
    found = step("gpipe", forth, back, stages, microbatches, forward, backward)
    if stages == 1:
        expected = microbatches * (forward + backward)
    else:
        fill = stages * forward + (stages - 1) * forth + last * max(forward, forth)
        expected = fill + stages * backward + (stages - 1) * back + last * max(backward, back)
    assert found.seconds == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(found.busy, microbatches * (forward + backward))


def restated(schedule, stages, microbatches, forward, backward, forth, back):
    """The rules once more, an action after the other with dictionaries; seconds of the step, and of each wait."""
    processes = stages // SCHEDULES[schedule].stages_per_process
    where = process_of_stages(schedule, stages, processes)
    order = actions(schedule, stages, processes, microbatches)
    free, links, arrived, left, waits = {}, {}, {}, {}, dict.fromkeys(range(processes), 0.0)
    shares = {"F": 1.0, "B": 1.0, "I": 0.5, "W": 0.5}
    for action in merge(order):
        for part in action.sub_actions or (action,):
            kind, stage, index = part.computation_type.value, part.stage_index, part.microbatch_index
            process, towards = where[stage], 1 if kind == "F" else -1
            frames = forth if kind == "F" else back
            boundary = stage if kind == "F" else stage - 1
            key = (kind == "F", stage, index)
            needs = kind != "W" and key in arrived
            begun = max(free.get(process, 0.0), arrived[key] if needs else 0.0)
            if needs:
                waits[process] += max(0.0, begun - max(free.get(process, 0.0), left[key]))
            seconds = shares[kind] * (forward if kind == "F" else backward)[stage]
            ended = begun + seconds + (frames[boundary - towards].decode if needs else 0.0)
            gives = kind != "W" and 0 <= stage + towards < stages
            if gives:
                ended += frames[boundary].encode
                target, given = where[stage + towards], (kind == "F", stage + towards, index)
                left[given] = arrived[given] = ended
                if target != process:
                    departs = max(ended, links.get((process, target), 0.0))
                    links[process, target] = departs + frames[boundary].on_wire
                    arrived[given] = links[process, target] + frames[boundary].latency
            free[process] = ended
    return max(free.values()), [waits[process] for process in range(processes)]


numbers = st.floats(0.0, 5.0)


@settings(max_examples=25)
@given(schedule=st.sampled_from(sorted(SCHEDULES)), data=st.data())
def test_any_schedule_is_what_the_rules_say(schedule, data):
    per_process = SCHEDULES[schedule].stages_per_process
    stages = per_process * data.draw(st.integers(2, 3), label="processes")
    each = lambda count, of: data.draw(st.lists(of, min_size=count, max_size=count))  # noqa: E731
    forward, backward = (each(stages, st.floats(0.1, 5.0)) for _ in range(2))
    forth, back = (
        each(stages - 1, st.builds(Frame, numbers, numbers, st.just(0.0), numbers, numbers)) for _ in range(2)
    )
    found = time_step(timetable(schedule, stages, stages // per_process, 6), forward, backward, forth, back)
    seconds, waits = restated(schedule, stages, 6, forward, backward, forth, back)
    assert found.seconds == pytest.approx(seconds, rel=1e-9)
    np.testing.assert_allclose(found.wait, waits, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.busy + found.wait + found.bubble, seconds, rtol=1e-9)
    assert found.seconds >= found.busy.max() * (1 - 1e-12)


def watched(schedule, stages, microbatches, compute, wires, duplex):
    """The same from event to event, every link carrying what its other direction leaves it; seconds of the step."""
    todo = {process: list(order) for process, order in actions(schedule, stages, stages, microbatches).items()}
    there, computing, queues = {("F", 0, index) for index in range(microbatches)}, {}, {}
    now = 0.0
    while any(todo.values()) or computing or any(queues.values()):
        for process, order in todo.items():
            if process not in computing and order:
                kind = order[0].computation_type.value
                message = (kind, process, order[0].microbatch_index)
                if message in there or (kind, process) == ("B", stages - 1):
                    computing[process] = [compute[kind], message]
                    order.pop(0)
        fronts = {link: queue[0] for link, queue in queues.items() if queue}
        rates = {link: duplex if link[::-1] in fronts else 1.0 for link in fronts}
        left = [item[0] for item in computing.values()] + [fronts[link][0] / rates[link] for link in fronts]
        now += (passed := min(left))
        for link, front in fronts.items():
            front[0] -= passed * rates[link]
            if front[0] <= 1e-9:
                there.add(queues[link].pop(0)[1])
        for process, item in list(computing.items()):
            item[0] -= passed
            if item[0] <= 1e-9:
                kind, _, index = computing.pop(process)[1]
                target = process + (1 if kind == "F" else -1)
                if 0 <= target < stages:
                    queues.setdefault((process, target), []).append([wires[kind], (kind, target, index)])
    return now


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "1f1b-wan"])
@pytest.mark.parametrize("wires", [(0.3, 0.3), (1.5, 2.0), (8.0, 4.0)])
@pytest.mark.parametrize("stages", [2, 4])
def test_directions_of_a_link_leave_each_other_what_they_do(schedule, wires, stages):
    table = timetable(schedule, stages, stages, 8)
    found = timed(table, 1.0, 2.0, *wires, lost=0.2).seconds
    expected = watched(schedule, stages, 8, {"F": 1.0, "B": 2.0}, dict(zip("FB", wires, strict=True)), 0.8)
    assert found == pytest.approx(expected, rel=1e-3)
    alone = timed(table, 1.0, 2.0, *wires).seconds
    if schedule == "gpipe":  # whose activations have all arrived before the first gradient leaves
        assert found == alone
    elif schedule == "1f1b-wan" and wires[0] == 8.0:
        assert found > 1.02 * alone


@settings(max_examples=20)
@given(
    schedule=st.sampled_from(["gpipe", "1f1b", "1f1b-wan"]),
    slow=st.floats(0.001, 3.0),
    factor=st.floats(1.0, 50.0),
    latency=st.floats(0.0, 1.0),
)
def test_a_faster_wire_is_never_slower_and_no_wire_is_the_fastest(schedule, slow, factor, latency):
    table = timetable(schedule, 4, 4, 8)
    at = [
        timed(table, 0.1, 0.2, seconds, seconds, latency=(delay, delay)).seconds
        for seconds, delay in ((slow, latency), (slow / factor, latency), (slow / factor, 0.0), (0.0, 0.0))
    ]
    assert all(earlier >= later * (1 - 1e-12) for earlier, later in pairwise(at))


@pytest.mark.parametrize(
    ("bits", "speedup", "share"), [((4, 8), 4.57, 0.777), ((3, 6), 5.05, 0.858)], ids=["fw4 bw8", "fw3 bw6"]
)
def test_the_limit_of_aqsgd_at_100_mbps(bits, speedup, share):
    """8 stages, 32 micro-batches, Table 3's compute; payloads without scales."""
    forth, back = (UNCOMPRESSED_BYTES * width / 32 * 8 / 100e6 for width in bits)
    whole = UNCOMPRESSED_BYTES * 8 / 100e6
    limit = step("gpipe", forth, back).seconds
    assert step("gpipe", whole, whole).seconds / limit == pytest.approx(speedup, rel=0.005)
    assert step("gpipe", 0.0, 0.0).seconds / limit == pytest.approx(share, rel=0.005)


def test_1f1b_is_held_back_there_and_1f1b_wan_is_not():
    forth, back = 0.524288 / 8, 0.524288 / 4
    unthrottled = step("gpipe", 0.0, 0.0).seconds
    plain, wide = step("1f1b", forth, back), step("1f1b-wan", forth, back)
    assert unthrottled / plain.seconds == pytest.approx(0.51, abs=0.005)
    assert unthrottled / wide.seconds == pytest.approx(0.81, abs=0.005)
    assert wide.seconds < step("gpipe", forth, back).seconds
    assert plain.table.held("process") == [8, 7, 6, 5, 4, 3, 2, 1]
    assert wide.table.held("process") == [15, 13, 11, 9, 7, 5, 3, 1]


def test_both_directions_of_a_link_are_used_at_once():
    """With one frame each way a step, the second stage's gradient travels while the next activation comes."""
    found = timed(timetable("1f1b", 2, 2, 2), 1.0, 1.0, 10.0, 10.0, latency=(0.0, 5.0))
    wires = {
        (action.process, action.microbatch): (float(first), float(last))
        for action, first, last in zip(found.table.actions, found.departure, found.sent, strict=True)
        if last > first
    }
    assert wires == {(0, 0): (1.0, 11.0), (0, 1): (11.0, 21.0), (1, 0): (13.0, 23.0), (1, 1): (23.0, 33.0)}
    assert found.seconds == 39.0


def test_a_hundred_stages():
    table = timetable("1f1b-wan", 100, 100, 100)
    found = timed(table, 1.0, 2.0, 0.0, 0.0)
    assert table.held("process")[0] == 100
    assert found.seconds == pytest.approx(3 * (100 + 100 - 1))
