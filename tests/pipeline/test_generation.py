"""What a token's codec is, and how the next token is chosen; tests/launch/test_generate.py runs whole models."""

import math
from collections import Counter

import pytest
import torch

from thinwire.pipeline.errors import NonFiniteError
from thinwire.pipeline.generation import Sampling, of_first_visits
from thinwire.pipeline.options import CompressionOptions
from thinwire.pipeline.options.compression import BoundaryOptions


@pytest.mark.parametrize(
    ("trained", "generates"),
    [
        ("q(4)", "q(4)"),
        ("aqsgd(q(2))", "none"),
        ("aqsgd(q(2), first=q(8))", "q(8)"),
        ("aqsgd(q(2), eval_history=False)", "q(2)"),
        ("ef21(topk(0.1))", "topk(0.1)"),
        ("efmixed(topk(0.1))", "topk(0.1)"),
        ("ef(randk(0.1))", "randk(0.1, scaled=False)"),
    ],
)
def test_a_token_goes_as_an_evaluation_sends_a_sample_that_it_has_not_seen(trained, generates):
    options = CompressionOptions(
        activations="none", gradients="none", boundaries={1: BoundaryOptions(activations=trained, gradients="q(4)")}
    )
    found = of_first_visits(options, 3)
    assert [str(method) for method in found.methods(2, "activations")] == ["none", generates]
    assert [str(method) for method in found.methods(2, "gradients")] == ["none", "none"]


def test_the_largest_logit_is_chosen_or_one_is_drawn_by_its_chance():
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    assert Sampling()(logits, 0) == 0
    drawn = Counter(Sampling(temperature=1.0, seed=1)(logits, step) for step in range(1000))
    assert all(abs(drawn[token] / 1000 - chance) < 0.05 for token, chance in enumerate((0.5, 0.3, 0.2)))
    likely = Counter(Sampling(temperature=1.0, top_p=0.6)(logits, step) for step in range(200))
    assert likely.keys() == {0, 1}, "one has less than 0.6, two have more"
    cold = Counter(Sampling(temperature=0.05)(logits, step) for step in range(50))
    assert cold.keys() == {0}


def test_seeds_that_follow_each_other_draw_independent_tokens():
    """Seed 1 drew what seed 0 drew one token later."""
    drawn = [[Sampling(temperature=1.0, seed=seed)(torch.zeros(50), step) for step in range(20)] for seed in (0, 1)]
    assert sum(one == other for one, other in zip(drawn[0][1:], drawn[1], strict=False)) < 5
    assert 0 <= Sampling(temperature=1.0, seed=2**70)(torch.zeros(50), 0) < 50


def test_the_least_temperature_takes_the_largest_logit_and_logits_that_are_no_numbers_are_told():
    """Both ended in an error of torch on a probability tensor."""
    logits = torch.tensor([0.5, 30.0, -math.inf])
    assert Sampling(temperature=1e-320)(logits, 0) == 1
    for bad in (math.nan, math.inf):
        with pytest.raises(NonFiniteError, match=rf"the largest logit of the next token must be finite, got {bad}; "):
            Sampling(temperature=1.0)(torch.tensor([0.5, bad]), 0)
