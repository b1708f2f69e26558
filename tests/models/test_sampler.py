import pytest
import torch

from thinwire.models.data.sampler import Sampler, evaluation_batches
from thinwire.models.seed import derive_seed


def epoch_ids(sampler: Sampler, epoch: int) -> list[int]:
    steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
    return torch.cat([sampler.batch(step).ids for step in steps]).tolist()


def test_seeds_are_the_same_everywhere():
    assert derive_seed(7, "transformer.h.3.ln_1") == 7264574476712093336
    assert derive_seed(1, "2") != derive_seed(12, "")
    assert len({derive_seed(seed, name) for seed in range(10) for name in "abc"}) == 30


def test_the_order_is_the_same_everywhere():
    assert epoch_ids(Sampler(8, 2, seed=0), 0) == [2, 5, 0, 3, 6, 7, 1, 4]
    assert epoch_ids(Sampler(8, 2, seed=0), 1) == [7, 4, 2, 5, 3, 0, 6, 1]


def test_an_epoch_holds_every_sample_once():
    sampler = Sampler(12, 4, seed=1)
    assert sampler.steps_per_epoch == 3
    for epoch in range(3):
        assert sorted(epoch_ids(sampler, epoch)) == list(range(12))


def test_the_last_short_batch_is_dropped():
    sampler = Sampler(11, 4, seed=1)
    assert sampler.steps_per_epoch == 2
    for epoch in range(20):
        ids = epoch_ids(sampler, epoch)
        assert len(set(ids)) == len(ids) == 8
    assert {i for epoch in range(20) for i in epoch_ids(sampler, epoch)} == set(range(11))


def test_a_batch_depends_on_its_step_alone():
    forward, backward = Sampler(10, 3, seed=5), Sampler(10, 3, seed=5)
    expected = [forward.batch(step).ids.tolist() for step in range(12)]
    got = [backward.batch(step).ids.tolist() for step in reversed(range(12))]
    assert got == expected[::-1]


def test_changing_a_batch_changes_no_other():
    sampler = Sampler(10, 5, seed=5)
    expected = sampler.batch(0).ids.tolist()
    sampler.batch(0).ids.zero_()
    assert sampler.batch(0).ids.tolist() == expected


def test_epochs_and_seeds_differ():
    orders = {tuple(epoch_ids(Sampler(20, 4, seed=seed), epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_a_batch_knows_its_epoch_and_counts_whole():
    batch = Sampler(10, 4, seed=0).batch(5)
    assert batch.epoch == 2
    assert batch.ids.dtype == torch.int64
    assert batch.valid.tolist() == [True] * 4


def test_without_shuffling_the_order_is_plain():
    sampler = Sampler(5, 2, seed=3, shuffle="never")
    assert [sampler.batch(step).ids.tolist() for step in range(4)] == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_shuffling_once_keeps_the_first_order():
    once, every = Sampler(8, 2, seed=0, shuffle="once"), Sampler(8, 2, seed=0, shuffle="epoch")
    assert epoch_ids(once, 0) == epoch_ids(once, 5) == epoch_ids(every, 0) != list(range(8))
    assert once.batch(23).epoch == 5


def test_the_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    Sampler(10, 2, seed=0).batch(17)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shuffle", ["epoch", "once", "never"])
def test_a_replica_keeps_its_samples(shuffle):
    """12 samples in batches of two for each of three replicas, which have one each of any 3 in a row."""
    sampler = Sampler(12, 6, seed=3, shuffle=shuffle, pieces=3)
    assert sampler.steps_per_epoch == 2
    seen = [sampler.batch(step).ids.view(3, 2) for step in range(12)]
    kept = [{int(id) for ids in seen for id in ids[replica]} for replica in range(3)]
    assert sorted(id for ids in kept for id in ids) == list(range(12))
    assert [sorted(id // 3 for id in ids) for ids in kept] == [[0, 1, 2, 3]] * 3
    orders = {tuple(torch.cat(seen[step : step + 2]).flatten().tolist()) for step in range(0, 12, 2)}
    assert len(orders) == (6 if shuffle == "epoch" else 1)


@pytest.mark.parametrize("count", [2, 3])
def test_each_replica_has_samples_of_each_kind_where_kinds_come_by_turns(count):
    """As sources of a mixture do, and the labels of many data sets."""
    sampler = Sampler(600, 10 * count, seed=0, pieces=count)
    seen = torch.stack([sampler.batch(step).ids.view(count, -1) for step in range(sampler.steps_per_epoch)], 1)
    for ids in seen.view(count, -1):
        assert all(abs(float((ids % count == kind).float().mean()) - 1 / count) < 0.1 for kind in range(count))


def test_unshuffled_batches_hold_the_same_samples_however_many_replicas_there_are():
    alone, three = (Sampler(24, 6, seed=0, shuffle="never", pieces=count) for count in (1, 3))
    for step in range(4):
        assert sorted(three.batch(step).ids.tolist()) == alone.batch(step).ids.tolist()


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "ids", "num_valid"),
    [
        (4, 2, [[0, 1], [2, 3]], [2, 2]),
        (5, 2, [[0, 1], [2, 3], [4, 0]], [2, 2, 1]),
        (5, 4, [[0, 1, 2, 3], [4, 0, 1, 2]], [4, 1]),
        (2, 5, [[0, 1, 0, 1, 0]], [2]),
    ],
)
def test_evaluation_batches(num_samples, batch_size, ids, num_valid):
    batches = list(evaluation_batches(num_samples, batch_size))
    assert [batch.ids.tolist() for batch in batches] == ids
    assert [batch.valid.tolist() for batch in batches] == [[i < n for i in range(batch_size)] for n in num_valid]
