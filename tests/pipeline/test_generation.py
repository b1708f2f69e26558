"""What a token's codec is, and how the next token is chosen; tests/launch/test_generate.py runs whole models."""

from collections import Counter

import pytest
import torch

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
