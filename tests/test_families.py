import pytest
import torch

from family_cases import CASES, apart, gradients_of, inputs, run_pipeline, split, state_of, whole

IDENTICAL = {"rtol": 0, "atol": 0}
# another kernel of attention may round otherwise where padding is masked
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
NAMES = tuple(CASES)


def library_side(name, side):
    """What the unsplit model takes: some read no token types, and RoBERTa has but one."""
    return {key: value for key, value in side.items() if key == "attention_mask" or name in ("bert", "deberta-v2")}


@pytest.mark.parametrize("name", NAMES)
def test_stages_equal_the_unsplit_model(name):
    model, (ids, side) = apart(name), inputs(name)
    unsplit = whole(name)
    unsplit.load_state_dict(state_of(split(model, 1)))
    expected = unsplit(input_ids=ids, **library_side(name, side)).logits
    output_gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    expected.backward(output_gradient)
    expected_gradients = {key: p.grad for key, p in unsplit.named_parameters() if p.grad is not None}
    for num_stages in (1, 2, 4):
        stages = split(model, num_stages)
        got = run_pipeline(stages, ids, side, output_gradient)
        torch.testing.assert_close(got, expected.detach(), **CLOSE)
        torch.testing.assert_close(gradients_of(stages), expected_gradients, **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_first_values_do_not_depend_on_the_cut(name):
    model = apart(name)
    one = state_of(split(model, 1))
    for num_stages in (2, 4):
        torch.testing.assert_close(state_of(split(model, num_stages)), one, **IDENTICAL)
