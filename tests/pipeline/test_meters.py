import pytest

from thinwire.pipeline.measuring import meters
from thinwire.pipeline.measuring.meters import SECTIONS, Meter, Traffic, count, spending

NOTHING = dict.fromkeys(SECTIONS, 0.0)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until told to move."""

    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(meters, "time", clock)
    return clock


def test_sections_are_exclusive(clock):
    meter = Meter()
    with meter.section("compute"):
        clock.now = 1.0
        with meter.section("wait"):
            clock.now = 4.0
            with meter.section("decode"):
                clock.now = 4.5
        clock.now = 6.0
    clock.now = 100.0
    with meter.section("encode"):
        clock.now = 101.0
    assert meter.seconds == {**NOTHING, "compute": 2.5, "wait": 3.0, "decode": 0.5, "encode": 1.0}
    assert set(meter.seconds) == set(SECTIONS)


def test_compute_is_counted_by_task_too(clock):
    meter = Meter()
    for _ in range(2):
        with meter.section("compute", "forward"):
            clock.now += 1.0
            with meter.section("wait", "stage 1 was waiting"):
                clock.now += 10.0
        with meter.section("compute", "backward"):
            clock.now += 3.0
    assert meter.computing == {"forward": 2.0, "backward": 6.0}


def test_an_exception_closes_its_section(clock):
    meter = Meter()
    with pytest.raises(KeyError), meter.section("wait", "news"):
        clock.now = 2.0
        raise KeyError
    clock.now = 9.0
    assert meter.seconds["wait"] == 2.0
    assert meter.doing == ""


def test_doing_is_the_innermost_section_in_words():
    meter = Meter()
    assert meter.doing == ""
    with meter.section("compute"):
        assert meter.doing == "compute"
        with meter.section("wait", "stage 1 was waiting"):
            assert meter.doing == "stage 1 was waiting"
        assert meter.doing == "compute"


def test_traffic_adds_up_by_boundary_channel_and_phase():
    meter, frame = Meter(), Traffic(frames=1, bytes=100, uncompressed=400, elements=100, rows=4, full_rows=1)
    train, evaluation = (0, "activations", "train"), (0, "activations", "eval-on")
    for route in (train, train, evaluation):
        count(meter.sent, route, frame)
    count(meter.received, (0, "gradients", "train"), frame)
    assert meter.received == {(0, "gradients", "train"): frame}
    assert meter.sent == {train: Traffic(2, 200, 800, 200, 8, 2), evaluation: frame}
    assert meter.sent[train].bits_per_element == 8.0
    assert Traffic().bits_per_element == 0.0


def test_spending_is_that_of_all_stages(clock):
    stages = [Meter(), Meter()]
    count(stages[0].sent, (0, "parts", "train"), Traffic(frames=1, bytes=50, uncompressed=60))
    for meter in stages:
        with meter.exchanging(), meter.section("encode"):
            clock.now += 2.0
        count(meter.sent, (0, "activations", "train"), Traffic(frames=1, bytes=100, uncompressed=400))
        count(meter.received, (0, "sums", "train"), Traffic(frames=1, bytes=30, uncompressed=40))
    assert spending(stages) == {**NOTHING, "encode": 4.0}
    assert [meter.exchanged for meter in stages] == [50 + 30, 30], "parts and sums go between replicas"
    assert [sum(meter.exchange.values()) for meter in stages] == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize(
    ("departed", "parts"),
    [
        (4.0, {"neighbour": 3.0, "wire": 6.0}),
        (0.5, {"wire": 9.0}),  # it was on its way before anybody waited
        (11.0, {"neighbour": 9.0}),  # clocks that differ by more than they were said to
        (None, {"wait": 9.0}),
    ],
)
def test_a_wait_is_for_the_neighbour_until_the_frame_departs(clock, departed, parts):
    meter = Meter()
    clock.now = 1.0
    with meter.waiting("stage 1 was waiting") as wait:
        clock.now = 10.0
        wait.departed = departed
    assert meter.seconds == {**NOTHING, **parts}


def test_what_is_apart_takes_no_seconds_and_keeps_its_traffic(clock):
    meter = Meter()
    with meter.section("compute", "forward"):
        clock.now = 1.0
    with meter.apart():
        with meter.section("compute", "forward"):
            clock.now = 50.0
        count(meter.sent, (0, "activations", "eval-on"), Traffic(frames=1, bytes=10))
    with meter.section("encode"):
        clock.now = 52.0
    assert meter.seconds == {**NOTHING, "compute": 1.0, "encode": 2.0}
    assert meter.computing == {"forward": 1.0}
    assert [traffic.bytes for traffic in meter.sent.values()] == [10]


def test_an_exchange_has_the_seconds_of_its_parts_by_section(clock):
    meter = Meter()
    with meter.section("encode"):
        clock.now = 1.0
    with meter.exchanging():
        clock.now = 2.0
        with meter.section("encode"):
            clock.now = 4.0
    clock.now = 10.0  # passes of another replica
    with meter.exchanging(), meter.waiting("") as wait:
        wait.departed = 13.0
        clock.now = 14.0
    told = {"encode": 2.0, "neighbour": 3.0, "wire": 1.0, "other": 1.0}
    assert meter.exchange == {**NOTHING, **told}
    again = Meter()
    again.load_state_dict(meter.state_dict())
    assert again.exchange == meter.exchange
