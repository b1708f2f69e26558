import pytest
import torch

from support.family_cases import (
    BATCH,
    CASES,
    LENGTH,
    TYPED,
    VOCABULARY,
    apart,
    gradients_of,
    inputs,
    library_side,
    run_pipeline,
    split,
    state_of,
    whole,
)
from thinwire.models.errors import ModelError
from thinwire.models.layers import build_stage, stage_output_examples
from thinwire.models.partition import explicit

IDENTICAL = {"rtol": 0, "atol": 0}
# another kernel of attention may round otherwise where padding is masked
CLOSE = {"rtol": 1e-5, "atol": 5e-6}
NAMES = tuple(CASES)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_first_values_do_not_depend_on_the_cut(name):
    model = apart(name)
    one = state_of(split(model, 1))
    for num_stages in (2, 4):
        torch.testing.assert_close(state_of(split(model, num_stages)), one, **IDENTICAL)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_only_the_hidden_state_crosses_a_boundary(name, precision):
    model, (ids, side) = apart(name), inputs(name)
    cuts = explicit([1, 2, 2], 5)
    examples = stage_output_examples(model, cuts, ids.to("meta"), precision, side)
    x = ids
    for cut, [example] in zip(cuts, examples, strict=True):
        x = build_stage(model, cut, seed=0, precision=precision)(x, **side)
        assert (x.shape, x.dtype, x.requires_grad) == (example.shape, example.dtype, example.requires_grad)
    assert [example.shape for [example] in examples[:2]] == [(BATCH, LENGTH, 16)] * 2
    typed = ("token_type_ids",) if name in TYPED else ()
    assert {"attention_mask", *typed} <= {*model.side}


@pytest.mark.parametrize("name", [name for name in NAMES if CASES[name].task == "causal-lm"])
def test_a_token_sees_no_later_one(name):
    [stage] = split(apart(name), 1)
    ids, _ = inputs(name)
    changed = ids.clone()
    changed[:, 6] = 3 + (ids[:, 6] - 2) % (VOCABULARY - 3)
    with torch.no_grad():
        one, other = stage(ids), stage(changed)
    torch.testing.assert_close(one[:, :6], other[:, :6], **CLOSE)
    assert (one[:, 6] != other[:, 6]).any(dim=-1).all()


@pytest.mark.parametrize("name", [name for name in NAMES if CASES[name].task == "classification"])
def test_padding_changes_nothing(name):
    [stage] = split(apart(name), 1)
    ids, side = inputs(name)
    shorter = {key: tensor[2:, :4] for key, tensor in side.items()}
    torch.testing.assert_close(stage(ids, **side)[2:], stage(ids[2:, :4], **shorter), rtol=1e-4, atol=1e-5)
    with pytest.raises(ModelError, match="needs the side inputs attention_mask, got token_type_ids"):
        stage(ids, token_type_ids=side["token_type_ids"])


def test_dropout_is_that_of_the_configuration():
    changes = {"embd_pdrop": 0.3, "attn_pdrop": 0.3, "resid_pdrop": 0.3}
    unsplit, stages = whole("gpt2", **changes), split(apart("gpt2", **changes), 4)
    unsplit.load_state_dict(state_of(stages))
    ids, _ = inputs("gpt2")
    torch.manual_seed(3)
    expected = unsplit(input_ids=ids).logits
    torch.manual_seed(3)
    torch.testing.assert_close(run_stages(stages, ids), expected, **CLOSE)


def run_stages(stages, x, **side):
    for stage in stages:
        x = stage(x, **side)
    return x


def test_first_values_of_gpt2_follow_the_paper():
    """Weights that end a residual path start smaller by the root of twice the number of blocks."""
    model = apart("gpt2", n_layer=2, n_embd=64, n_positions=64)
    for name, tensor in state_of(split(model, 1)).items():
        if name.endswith(".bias"):
            torch.testing.assert_close(tensor, torch.zeros_like(tensor), **IDENTICAL)
        elif ".ln_" in name:
            torch.testing.assert_close(tensor, torch.ones_like(tensor), **IDENTICAL)
        else:
            std = 0.01 if name.endswith(".c_proj.weight") else 0.02
            assert 0.95 < tensor.std() / std < 1.05, f"{name}: {tensor.std()} instead of {std}"


def test_the_head_is_untied_even_at_one_stage():
    state = state_of(split(apart("gpt2", tie_word_embeddings=True), 1))
    assert not torch.equal(state["lm_head.weight"], state["transformer.wte.weight"])


def test_building_twice_never_aliases():
    model = apart("llama")
    [one], [other] = split(model, 1), split(model, 1)
    pointers = [{tensor.data_ptr() for tensor in (*stage.parameters(), *stage.buffers())} for stage in (one, other)]
    assert len(pointers[0]) > 10
    assert not pointers[0] & pointers[1]


def test_the_shared_part_is_one_module_on_a_stage_and_alike_on_others():
    model = apart("deberta-v2")
    assert model.shared == ("deberta.encoder.rel_embeddings", "deberta.encoder.LayerNorm")
    first, second = (build_stage(model, cut, seed=1) for cut in (range(0, 3), range(3, 5)))
    whole, one, two = [layer.parts["deberta.encoder.rel_embeddings"] for layer in first.layers]
    assert whole is one is two is first.layers[2].around.deberta.encoder.rel_embeddings
    name = "deberta.encoder.rel_embeddings.weight"
    torch.testing.assert_close(first.full_state()[name], second.full_state()[name], **IDENTICAL)
    assert first.full_state()[name].data_ptr() != second.full_state()[name].data_ptr()


@pytest.mark.slow
def test_describing_a_boundary_takes_no_memory():
    # each block would weigh 3 GB
    huge = apart("gpt2", n_layer=2, n_embd=8192, n_head=64)
    [(tensor,), _] = stage_output_examples(huge, explicit([2, 2], 4), torch.zeros(4, 12, dtype=torch.int64), "fp32")
    assert tensor.shape == (4, 12, 8192)


def test_costs_count_multiplications():
    assert [spec.cost for spec in apart("gpt2").layers] == [16, *[12 * 256 + 2 * LENGTH * 16] * 3, 16 * VOCABULARY]
    assert [spec.name for spec in apart("gpt2").layers] == ["embedding", "block 0", "block 1", "block 2", "head"]
