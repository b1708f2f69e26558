"""What exchanges remember fits the stages of another cut: the same errors, element for element."""

from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from support.exchanging import REPLICAS, SHAPES, exchanged, gradients, make
from thinwire.pipeline.replicas.layout import FLAT, TILES
from thinwire.pipeline.replicas.recut import read_for, recut

WIDE = {"wide": SHAPES["wide"], "matrix": (130, 70)}
REST = {"bias": SHAPES["bias"], "long": SHAPES["long"]}


def trained(expression, shapes, layout):
    """Replicas of one stage, three steps later."""
    replicas = make(expression, shapes=shapes, layout=layout)
    size = sum(parameter.numel() for parameter in replicas[0].parameters.values())
    for step in range(3):
        exchanged(replicas, gradients(step, REPLICAS, size), step)
    return replicas


def saved_of(replicas, group=""):
    return [(group + name, each) for replica in replicas for name, each in replica.exchange.state_dict().items()]


def errors_of(saved):
    """The errors of each parameter, whole, by whose they are and its name."""
    pieces = defaultdict(list)
    for name, values in saved:
        if name.startswith(("worker/", "owner/")) and "padding" not in name:
            key, _, first = name.rpartition("/")
            pieces[key].append((int(first), values))
    for found in pieces.values():
        found.sort(key=lambda piece: piece[0])
        assert all(first + len(values) == following for (first, values), (following, _) in pairwise(found))
    return {key: torch.cat([values for _, values in found]) for key, found in pieces.items()}


@pytest.mark.parametrize("layout", [FLAT, TILES])
@pytest.mark.parametrize("expression", ["ef(q(4))", "ef(q(2), store_bits=16)"])
def test_two_stages_have_the_errors_that_one_had(expression, layout):
    """The rows of two stages are others, and so are their owners."""
    before = trained(expression, WIDE | REST, layout)
    saved = saved_of(before)
    later = []
    for shapes in (WIDE, REST):
        replicas = make(expression, shapes=shapes, layout=layout)
        for replica in replicas:
            replica.exchange.load_state_dict(recut(replica.exchange.state_dict(), saved, {}))
        later += saved_of(replicas)
    wanted, got = errors_of(saved_of(before)), errors_of(later)
    assert got.keys() == wanted.keys() and any(key.startswith("worker/2/") for key in got)
    for key, error in wanted.items():
        assert error.any() and torch.equal(got[key], error)
    assert all(values.all() for name, values in later if name == "used")


@pytest.mark.parametrize(("holders", "wanted"), [({"w": 1}, [6.0, 8.0]), ({"w": 2}, [3.0, 4.0]), (None, [3.0, 4.0])])
def test_weights_of_several_stages_keep_the_sum_of_their_errors_or_the_mean(holders, wanted):
    saved = [("worker/0/w/0", torch.tensor([2.0, 4.0])), ("worker/0/w/0", torch.tensor([4.0, 4.0]))]
    found = recut({"worker/0/w/0": torch.zeros(2)}, saved, holders)
    assert found["worker/0/w/0"].tolist() == wanted


def test_a_parameter_that_some_stage_never_used_is_learnt_anew():
    like = {"used": torch.zeros(3, dtype=torch.bool)}
    parts = [("used", torch.tensor([True, True])), ("used", torch.tensor([True]))]
    assert recut(like, parts, {})["used"].tolist() == [True] * 3
    assert recut(like, [*parts, ("used", torch.tensor([False]))], {})["used"].tolist() == [False] * 3
    assert recut(like, [], {})["used"].tolist() == [False] * 3


def test_an_error_that_no_part_holds_is_zero():
    held = {"worker/0/w/0": torch.ones(2), "worker/0/other/0": torch.ones(2), "owner/w/0": torch.ones(2)}
    part = SimpleNamespace(
        names=lambda prefix: list(held),
        tensors=lambda prefix, wanted: {name: values for name, values in held.items() if name in wanted},
    )
    wanted = {"worker/0/w/0": torch.zeros(2), "owner/w/0": torch.zeros(2), "owner/padding/0": torch.zeros(3)}
    found = read_for(wanted, [part], {})
    assert {name: bool(values.any()) for name, values in found.items()} == {
        "worker/0/w/0": True,
        "owner/w/0": True,
        "owner/padding/0": False,
    }
