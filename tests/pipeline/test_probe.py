import pytest

from support import processes
from thinwire.pipeline.measuring import probe as probing
from thinwire.pipeline.measuring.probe import probe, probe_both


def measure(rank):
    probing.PROBE_SECONDS = probing.BOTH_SECONDS = 0.05
    return [probe(0, 1), probe(1, 0)], probe_both(0, 1)


@pytest.mark.slow
def test_all_know_the_same_of_a_link():
    here, there, third = processes.run(measure, 3)
    assert here == there == third
    speeds, both = here
    assert both > 1e6
    for speed in speeds:
        assert speed.goodput > 1e6
        assert 0 < speed.latency < 1


def test_a_stall_is_not_taken_for_the_link(monkeypatch):
    """A link of 1 MB/s that is held up twice, each time for longer than a probe lasts."""
    now, sent = [0.0], []
    monkeypatch.setattr(probing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(probing, "_of_rank", lambda rank, value, group: value)

    def send(message, count):
        sent.append(len(message) * count)
        now[0] += sent[-1] / 1e6 + (2.0 if len(sent) in (4, 7) else 0.0)

    assert probing._goodput(send, [0], 0.5, min, None) == pytest.approx(1e6)
    assert sent == [1 << shift for shift in (14, 15, 16, 17, 17, 18, 19, 19)]
