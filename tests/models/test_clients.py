"""Clients in turn: whose samples are whose, and the steps of each turn."""

import pytest
import torch

from thinwire.models.data.clients import Turns, divide
from thinwire.models.data.load import load
from thinwire.models.data.options import DataOptions
from thinwire.models.errors import ModelError

DIGITS = DataOptions(name="digits", limit=51, held_out=0.0)
TEXT = DataOptions(name="pydoc", limit=2000, block_size=32)
CLIENTS = [torch.arange(6), torch.arange(6, 15)]


def turns(turn, shuffle="never"):
    """Two clients of 6 and 9 samples; steps of 3 samples, so an epoch of a client has 2 or 3 of them."""
    return Turns(CLIENTS, 3, seed=0, shuffle=shuffle, turn=turn)


@pytest.mark.parametrize("division", ["random", "label", "order"])
def test_each_sample_has_one_client(division):
    pieces = divide(load(DIGITS), 4, division, seed=0)
    assert sorted(map(len, pieces)) == [12, 13, 13, 13]
    assert torch.cat(pieces).sort().values.equal(torch.arange(51))
    assert all(piece.equal(piece.sort().values) for piece in pieces)


def test_by_label_a_client_has_few_classes_and_at_random_all():
    data = load(DataOptions(name="digits", held_out=0.0))
    classes = {
        division: [data.training.targets(ids).unique().numel() for ids in divide(data, 5, division, seed=0)]
        for division in ("label", "random")
    }
    assert max(classes["label"]) <= 3
    assert classes["random"] == [10] * 5


def test_the_seed_decides_a_random_division_and_no_other():
    data = load(DIGITS)
    for division, same in (("random", False), ("label", True), ("order", True)):
        first, second = (divide(data, 2, division, seed=seed)[0] for seed in (0, 1))
        assert first.equal(second) == same


def test_a_text_has_no_labels_to_sort_by():
    with pytest.raises(ModelError, match=r"clients\.division label needs the label of each sample in every process"):
        divide(load(TEXT), 2, "label", seed=0)


def test_a_turn_of_an_epoch_is_one_pass_through_the_samples_of_a_client():
    order = turns(lambda steps: steps)
    assert order.steps_per_epoch == 5
    assert [order.client(step) for step in range(10)] == [0, 0, 1, 1, 1] * 2
    assert [order.end(step) for step in range(10)] == [2, 2, 5, 5, 5, 7, 7, 10, 10, 10]
    assert [order.batch(step).epoch for step in range(10)] == [0] * 5 + [1] * 5
    ids = torch.cat([order.batch(step).ids for step in range(5)])
    assert ids.equal(torch.arange(15))


def test_a_client_goes_on_where_its_last_turn_ended():
    order = turns(lambda _: 1)
    assert [order.client(step) for step in range(5)] == [0, 1, 0, 1, 0]
    assert [order.batch(step).ids[0].item() for step in range(6)] == [0, 6, 3, 9, 0, 12]
    assert [order.batch(step).epoch for step in range(6)] == [0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("turn", [1, 2, 5])
def test_a_batch_holds_samples_of_its_client_and_depends_on_its_step_alone(turn):
    forward, backward = (turns(lambda _: turn, "epoch") for _ in range(2))
    batches = [forward.batch(step).ids for step in range(30)]
    for step in reversed(range(30)):
        assert set(batches[step].tolist()) <= set(CLIENTS[forward.client(step)].tolist())
        assert backward.batch(step).ids.equal(batches[step])


def test_clients_and_epochs_have_orders_of_their_own():
    order = Turns([torch.arange(8), torch.arange(8, 16)], 8, seed=0)
    found = {tuple((order.batch(step).ids % 8).tolist()) for step in range(6)}
    assert len(found) == 6


def test_a_client_without_the_samples_of_a_step_is_a_sentence():
    with pytest.raises(ModelError, match=r"which are 7, and one of 2 has 6; lower clients\.count"):
        Turns(CLIENTS, 7, seed=0)
