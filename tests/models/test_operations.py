"""What layers of one's own cost, counted from what they do to a sample."""

import pytest
import torch

from thinwire.models.architectures.sequential import factory_blueprint
from thinwire.models.costs import operations
from thinwire.models.partition import partition

FACTORY = """
from torch import nn

class Last(nn.Module):
    def forward(self, x):
        return x[:, -1]

def make():
    convolutions = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(8)]
    return [*convolutions, nn.Flatten(), nn.Linear(8 * 16 * 16, 64)]

def tokens():
    return [nn.Embedding(5000, 32), *(nn.Linear(32, 32) for _ in range(6)), Last(), nn.Linear(32, 2)]
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_model_of_test_operations.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda name: factory_blueprint(f"own_model_of_test_operations:{name}", {})


def test_layers_of_ones_own_are_cut_by_what_they_do(own):
    """By parameters eight convolutions were one stage and the small head the other: 52.9 s against 4.6 s."""
    blueprint = own("make")
    assert [len(cut) for cut in partition([layer.cost for layer in blueprint.layers], 2)] == [9, 1]
    costs = operations(blueprint, torch.empty(4, 8, 16, 16, device="meta"))
    assert [len(cut) for cut in partition(costs, 2)] == [4, 6]
    convolution = 2 * 4 * 16 * 16 * 8 * 8 * 9 + 4 * 8 * 16 * 16 + (8 * 8 * 9 + 8)
    assert costs[0] == convolution
    assert costs == operations(blueprint, torch.empty(4, 8, 16, 16, device="meta"))  # in every process


def test_an_embedding_costs_its_rows_and_no_product(own):
    costs = operations(own("tokens"), torch.zeros(8, 16, dtype=torch.int64, device="meta"))
    assert costs[0] == 8 * 16 * 32 + 5000 * 32
    assert costs[1] == 2 * 8 * 16 * 32 * 32 + 8 * 16 * 32 + 32 * 32 + 32
