"""Replicas that may be lost, under faults drawn from a seed: all that end hold the same weights, and nobody waits."""

import os
from collections import Counter

import pytest

from support.faults.replicas import World

SEEDS, FIRST = int(os.environ.get("THINWIRE_SEEDS", "100")), int(os.environ.get("THINWIRE_FIRST_SEED", "0"))
"""How many seeds, and the first of them; `make fuzz` asks for more."""
BLOCKS = 4


def check(world):
    """Those who end well hold the same weights, in which the samples of no step count twice or not at all."""
    ended = [replica for replica in world.replicas if replica.life == "ended"]
    assert len({worker.state for replica in ended for worker in replica.workers}) <= 1, "other weights at the end"
    for replica in ended[:1]:
        assert replica.done == world.steps
        before = 0
        for step, contributions in replica.workers[0].weights:
            assert contributions and all(part[1:] == [before, step] for part in contributions)
            before = step
        assert before == world.steps
    return ended


@pytest.mark.parametrize("block", range(BLOCKS))
def test_each_seed_ends_with_the_same_weights_in_all_replicas(block):
    counts, failed = Counter(), []
    for seed in range(FIRST + block, FIRST + SEEDS, BLOCKS):
        world = World(seed)
        try:
            world.go()
            counts[len(check(world))] += 1
        except AssertionError as error:
            failed.append(f"seed {seed}: {error}")
    print(counts)
    assert not failed, "\n".join(failed)
    assert SEEDS < 50 or max(counts) > 1
