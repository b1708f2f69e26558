"""Clients in turn: whose samples are whose, and the steps of each turn."""

import pytest
import torch

from support.data_files import random_pixels, write_images
from thinwire.models.data.clients import Turns, divide, join, some_ids
from thinwire.models.data.load import load
from thinwire.models.data.options import DataOptions
from thinwire.models.data.outline import outline_text, read_outline
from thinwire.models.errors import ModelError

DIGITS = DataOptions(name="digits", limit=51, held_out=0.0)
TEXT = DataOptions(name="pydoc", limit=2000, block_size=32)
CLIENTS = [torch.arange(6), torch.arange(6, 15)]


def turns(turn, shuffle="never"):
    """Two clients of 6 and 9 samples; steps of 3 samples, so an epoch of a client has 2 or 3 of them."""
    return Turns(CLIENTS, 3, seed=0, shuffle=shuffle, turn=turn)


@pytest.mark.slow
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
    with pytest.raises(ModelError, match=r"the 7 samples of a step, and one of 2 has 6; lower clients\.count"):
        Turns(CLIENTS, 7, seed=0)


@pytest.fixture
def of_two_clients(tmp_path):
    """The data of two clients, without samples held out, and their outlines with labels."""
    data = [load(DataOptions(name="digits", limit=limit, held_out=0.0)) for limit in (20, 30)]
    for client, path in zip(data, "ab", strict=True):
        (tmp_path / path).write_text(outline_text(client, labels=True))
    return data, [read_outline(str(tmp_path / path), labels=True) for path in "ab"]


def test_joined_samples_are_those_of_the_first_client_and_then_those_of_the_second(of_two_clients):
    data, outlines = of_two_clients
    server, second = join(outlines, None), join(outlines, data[1])
    assert server.training.digest == second.training.digest
    assert len(server.training) == 50
    assert [piece.tolist() for piece in divide(server, 2, "order", seed=0)] == [[*range(20)], [*range(20, 50)]]
    ids = torch.tensor([20, 22, 49])
    own = ids - 20
    assert second.training.inputs(ids).equal(data[1].training.inputs(own))
    for joined in (server, second):
        assert joined.training.targets(ids).equal(data[1].training.targets(own))
        assert joined.training.targets(torch.tensor([7])).equal(data[0].training.targets(torch.tensor([7])))


def test_a_client_out_of_turn_is_a_sentence(of_two_clients):
    data, outlines = of_two_clients
    with pytest.raises(ModelError, match=r"in the turn of client 1, and data\.name are the data of client 2"):
        join(outlines, data[1]).training.inputs(torch.tensor([3]))


def test_what_is_timed_or_compiled_takes_samples_of_the_client_that_is_here(of_two_clients):
    """The second client compiled its stage on samples of the first one, and was told that it is out of turn."""
    data, outlines = of_two_clients
    for joined, first in ((join(outlines, data[0]), 0), (join(outlines, data[1]), 20), (join(outlines, None), 0)):
        assert some_ids(joined.training, 3).tolist() == [first, first + 1, first + 2]
    second = join(outlines, data[1]).training
    assert second.inputs(some_ids(second, 3)).equal(data[1].training.inputs(torch.arange(3)))
    assert some_ids(data[1].training, 3).tolist() == [0, 1, 2]


def test_clients_must_fit_together(of_two_clients, tmp_path):
    _, outlines = of_two_clients
    other = load(DataOptions(name="digits", limit=40, held_out=0.0))
    with pytest.raises(ModelError, match=r"data\.name matches no client in clients\.outlines"):
        join(outlines, other)
    (tmp_path / "text").write_text(outline_text(load(TEXT), labels=False))
    with pytest.raises(ModelError) as caught:
        join([outlines[0], read_outline(str(tmp_path / "text"), labels=False)], None)
    shape, evaluation = caught.value.mistakes
    assert shape.startswith("clients.outlines must describe samples of one shape")
    assert evaluation.startswith("the data for evaluation must be the same for all clients")
    with pytest.raises(ModelError, match="two of them describe the same"):
        join([outlines[0], outlines[0]], None)


@pytest.mark.usefixtures("hub_cache")
def test_clients_that_name_their_classes_otherwise_are_refused(tmp_path):
    outlines = []
    for number, names in enumerate((["cat", "dog"], ["cat", "fox"])):
        table = write_images(tmp_path / f"{number}.parquet", random_pixels(4, seed=number), [0, 1, 0, 1], names=names)
        data = load(DataOptions(name=str(table), kind="images", held_out=0, mean=[0.5] * 3, std=[0.5] * 3))
        (tmp_path / f"{number}.json").write_text(outline_text(data, labels=True))
        outlines.append(read_outline(str(tmp_path / f"{number}.json"), labels=True))
    assert outlines[0].classes == ("cat", "dog")
    with pytest.raises(ModelError, match="must list the same classes, by name, in one order"):
        join(outlines, None)
