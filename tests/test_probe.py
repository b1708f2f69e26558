import processes
from thinwire.pipeline import probe as probing
from thinwire.pipeline.probe import probe


def both_ways(rank):
    probing.PROBE_SECONDS = 0.05
    return [probe(source, 1 - source) for source in (0, 1)]


def test_all_know_the_same_of_a_link():
    here, there = processes.run(both_ways, 2)
    assert here == there
    for speed in here:
        assert speed.goodput > 1e6
        assert 0 < speed.latency < 1
