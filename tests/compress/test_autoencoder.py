"""The codec autoencoder: it sends the first features, and gradients beside it are of these features alone."""

import pytest
import torch

from support.codec_contract import assert_contract
from support.codec_helpers import KEY, assert_identical, encode, gaussian, roundtrip
from thinwire.compress import CodecError, check, parse
from thinwire.compress.autoencoder import FirstFeatures

SHAPES = {(6, 8): (6, 3), (2, 5, 8): (2, 5, 3), (2, 8, 4, 4): (2, 3, 4, 4), (7,): (3,), (2, 2): (2, 2)}
"""A shape, and that of its first three features."""


def first(x):
    return x[:, :3] if x.dim() == 4 else x[..., :3]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("values", ["bf16", "q(4)", "none"])
def test_the_first_features_go_through_the_values_codec_and_the_rest_is_zero(shape, values):
    codec, x = parse(f'autoencoder(3, values="{values}")'), gaussian(*shape)
    decoded = assert_contract(codec, x)
    part = first(x).contiguous()
    assert part.shape == SHAPES[shape]
    assert codec.nbytes(x.shape, x.dtype) == parse(values).nbytes(part.shape, part.dtype)
    assert_identical(encode(codec, x), encode(parse(values), part))
    assert_identical(first(decoded).contiguous(), roundtrip(parse(values), part))
    assert decoded.count_nonzero() <= part.numel()


@pytest.mark.parametrize("expression", ["autoencoder(5)", 'autoencoder(5, values="nf(4)")'])
def test_it_keeps_every_rule_of_codecs(expression):
    check(parse(expression))
    assert str(parse(expression)) == expression


@pytest.mark.parametrize("gradients", ["q(8)", "topk(0.25)", "ef21(q(4))", "lowrank(1)"])
def test_gradients_beside_it_are_of_the_first_features(gradients):
    wanted, x = parse(gradients), gaussian(4, 8)
    bound = wanted.bound_to(parse("autoencoder(3)"))
    assert str(bound) == gradients and type(bound.feedback) is type(wanted.feedback)
    part = first(x).contiguous()
    assert bound.codec.nbytes(x.shape, x.dtype) == wanted.codec.nbytes(part.shape, part.dtype)
    decoded = assert_contract(bound.codec, x)
    assert_identical(first(decoded).contiguous(), roundtrip(wanted.codec, part))
    assert decoded[:, 3:].count_nonzero() == 0


def test_gradients_change_with_training_and_start_warm():
    ramp = parse('q(8 -> 4, over="4 steps")').bound_to(parse("autoencoder(3)"))
    assert [str(codec) for codec in ramp.variants][::4] == ["q(8)", "q(4)"]
    lowrank, x = FirstFeatures(3, parse("lowrank(1)")), gaussian(4, 8)
    payload = torch.empty(lowrank.nbytes(x.shape, x.dtype), dtype=torch.uint8)
    lowrank.encode(x, payload, KEY)
    assert lowrank.warm_starts and lowrank.next_shared(payload, x.shape, x.dtype).shape == (3, 1)


def test_other_codecs_leave_gradients_as_they_are():
    for activations in ("none", "q(4)", "topk(0.1)", "lowrank(4)"):
        gradients = parse("ef(topk(0.1))")
        assert gradients.bound_to(parse(activations)) is gradients


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("autoencoder(0)", "autoencoder's rank must be an integer of at least 1, got 0"),
        ('autoencoder(4, values="topk(0.1)")', 'autoencoder\'s values must be "none", "bf16", "fp16", or a quantizer'),
        ("ef(autoencoder(4))", "ef cannot go around autoencoder(4); drop ef"),
        ("aqsgd(autoencoder(4))", "aqsgd cannot go around autoencoder(4); drop aqsgd"),
        ("autoencoder(4) + q(1)", "autoencoder(4) cannot be part of a sum, got autoencoder(4) + q(1)"),
        ('autoencoder(8 -> 4, over="2 epochs")', "autoencoder has weights, so its number cannot change in training"),
        ('lowrank(4, values="autoencoder(2)")', "lowrank's values must be"),
    ],
)
def test_what_cannot_be_trained_is_refused(expression, said):
    with pytest.raises(CodecError) as caught:
        parse(expression)
    assert str(caught.value).startswith(said)


def test_it_is_for_activations_only():
    with pytest.raises(CodecError, match=r"activations only, got autoencoder\(4\) for gradients; gradients beside it"):
        parse("autoencoder(4)").check_channel("gradients")


@pytest.mark.parametrize(
    ("gradients", "said"),
    [
        ("reuse", "reuse needs topk or randk on the activations of the same boundary, got autoencoder(4)"),
        ("efmixed(topk(0.1))", "efmixed cannot be used for gradients beside autoencoder(4); use ef(topk(0.1))"),
    ],
)
def test_gradients_that_need_indices_are_refused_beside_it(gradients, said):
    with pytest.raises(CodecError) as caught:
        parse(gradients).bound_to(parse("autoencoder(4)"))
    assert str(caught.value).startswith(said)
