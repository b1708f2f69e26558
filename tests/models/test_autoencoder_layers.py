"""The layers of a learned codec: their first values, what they compute, and their place in a model."""

import pytest
import torch

from thinwire.models.autoencoder import halves, with_autoencoders
from thinwire.models.errors import ModelError
from thinwire.models.layers import build_stage, stage_output_examples
from thinwire.models.model import blueprint
from thinwire.models.options import ModelOptions

GPT2 = ModelOptions(
    name="gpt2",
    config={"vocab_size": 32, "n_layer": 3, "n_embd": 8, "n_head": 2, "n_positions": 8},
)
RESNET = ModelOptions(name="resnet18", config={"stem": "cifar", "width": 8})
TOKENS, IMAGES = torch.zeros(2, 8, dtype=torch.int64), torch.ones(2, 3, 8, 8)


def narrowed(options, example, ranks, precision="fp32"):
    """The model with autoencoders at its cuts, the cuts, and the outputs of its stages without them."""
    task, labels = ("causal-lm", None) if options.name == "gpt2" else ("classification", 4)
    model = blueprint(options, task=task, num_labels=labels, block_size=8)
    cuts = [range(0, 2), range(2, 3), range(3, len(model.layers))]
    plain = stage_output_examples(model, cuts, example, precision)
    return (*with_autoencoders(model, cuts, ranks, plain), plain)


@pytest.mark.parametrize(("options", "example"), [(GPT2, TOKENS), (RESNET, IMAGES)], ids=["gpt2", "resnet"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_crosses_has_the_shape_and_dtype_of_the_plain_models(options, example, precision):
    model, cuts, plain = narrowed(options, example, {0: 3, 1: 2}, precision)
    found = stage_output_examples(model, cuts, example, precision)
    assert [[(x.shape, x.dtype) for x in output] for output in found] == [
        [(x.shape, x.dtype) for x in output] for output in plain
    ]
    assert [len(cut) for cut in cuts] == [3, 3, len(model.layers) - 6]
    assert [layer.of_model for layer in model.layers[:7]] == [True, True, False, False, True, False, False]


@pytest.mark.parametrize(("options", "example"), [(GPT2, TOKENS), (RESNET, IMAGES)], ids=["gpt2", "resnet"])
def test_the_maps_start_as_a_projection_and_pass_everything_on_where_nothing_compresses(options, example):
    model, cuts, plain = narrowed(options, example, {0: 3})
    first, second = (build_stage(model, cut, seed=5) for cut in cuts[:2])
    [encoder], [decoder] = ([*halves(stage)] for stage in (first, second))
    x = torch.randn(plain[0][0].shape, generator=torch.Generator().manual_seed(1))
    encode, decode = first.full_state()["autoencoder.2.0.encoder"], second.full_state()["autoencoder.2.0.decoder"]
    assert torch.equal(encode, decode.T)
    torch.testing.assert_close(encode @ encode.T, torch.eye(3), rtol=0, atol=1e-6)
    assert (encode != 0).sum() == encode.shape[1], "every feature counts once"
    dim = 1 if x.dim() == 4 else 2
    sent = encoder(x)
    assert sent.shape == x.shape and sent.narrow(dim, 3, x.shape[dim] - 3).count_nonzero() == 0
    torch.testing.assert_close(sent.movedim(dim, -1)[..., :3], x.movedim(dim, -1) @ encode.T)
    once = decoder(sent)
    torch.testing.assert_close(decoder(encoder(once)), once)
    noise = sent + torch.cat([torch.zeros_like(x.narrow(dim, 0, 3)), x.narrow(dim, 3, x.shape[dim] - 3)], dim)
    assert torch.equal(decoder(noise), once), "only the first features are read"
    encoder.active = decoder.active = False
    assert encoder(x) is x and decoder(x) is x


def test_first_values_depend_on_the_seed_and_the_place_alone():
    model, cuts, _ = narrowed(GPT2, TOKENS, {0: 3, 1: 3})
    alone, other_cuts, _ = narrowed(GPT2, TOKENS, {1: 3})

    def encoder(model, cut, seed=0):
        found = build_stage(model, cut, seed=seed).full_state()
        return next(value for name, value in found.items() if name.endswith("encoder"))

    assert torch.equal(encoder(model, cuts[1]), encoder(alone, other_cuts[1]))
    assert not torch.equal(encoder(model, cuts[1]), encoder(model, cuts[0]))
    assert not torch.equal(encoder(model, cuts[1]), encoder(model, cuts[1], seed=1))


def test_a_rank_that_narrows_nothing_is_refused_for_every_boundary_at_once():
    with pytest.raises(ModelError) as caught:
        narrowed(GPT2, TOKENS, {0: 8, 1: 9})
    said = "the rank of an autoencoder must be less than the features that it narrows, and 8 cross boundary {}, got {}"
    assert [mistake.partition(";")[0] for mistake in caught.value.mistakes] == [said.format(0, 8), said.format(1, 9)]
