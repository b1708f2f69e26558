import processes
from thinwire.pipeline import probe as probing
from thinwire.pipeline.probe import probe, probe_both


def measure(rank):
    probing.PROBE_SECONDS = probing.BOTH_SECONDS = 0.05
    return [probe(0, 1), probe(1, 0)], probe_both(0, 1)


def test_all_know_the_same_of_a_link():
    here, there, third = processes.run(measure, 3)
    assert here == there == third
    speeds, both = here
    assert both > 1e6
    for speed in speeds:
        assert speed.goodput > 1e6
        assert 0 < speed.latency < 1
