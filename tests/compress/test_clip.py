"""q's option clip: what it gains, how near it comes to the best of many scales, and that no decoder notices it."""

import pytest
import torch

from support.codec_helpers import KEY, assert_identical, encode, gaussian, roundtrip, said_by, snr_db
from thinwire.compress import parse
from thinwire.compress.codecs.clip import least_square_scales
from thinwire.compress.codecs.quantize import Quantize


def tensors(rows=256, n=1024):
    spikes = torch.rand(rows, n, generator=torch.Generator().manual_seed(1)) < 0.01
    uniform = torch.rand(rows, n, generator=torch.Generator().manual_seed(2)).clamp(1e-6)
    noise = gaussian(rows, n)
    return {
        "gaussian": noise,
        "relu": noise.relu(),
        "laplace": noise.sign() * -uniform.log(),
        "spikes": torch.where(spikes, 20 * noise, noise),
    }


def best_of(x, bits, count=48):
    """The signal to noise with the best of `count` scales a row, each 1.08 times the next."""
    largest, least = x.abs().amax(1, keepdim=True), torch.full((len(x), 1), torch.inf)
    for i in range(count):
        step = largest * 1.08**-i / 2 ** (bits - 1)
        decoded = (torch.floor(x / step).clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) + 0.5) * step
        least = torch.minimum(least, (decoded - x).square().sum(1, keepdim=True))
    return 10 * torch.log10(x.double().square().sum() / least.double().sum()).item()


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("tensor", "short"), [("gaussian", 0.1), ("relu", 0.2), ("laplace", 0.5), ("spikes", 0.25)])
def test_the_scale_is_nearly_the_best_of_many(tensor, short, bits):
    x = tensors()[tensor]
    reached, best = snr_db(x, roundtrip(Quantize(bits, clip="mse", grid="midrise"), x)), best_of(x, bits)
    assert best - short - (0.15 if bits == 5 else 0) < reached < best + 0.1, (reached, best)


@pytest.mark.parametrize(
    ("bits", "plain", "clipped"), [(1, -1.0, 4.4), (2, 6.0, 9.25), (3, 12.0, 14.3), (4, 18.0, 19.4)]
)
def test_what_gaussian_rows_gain(bits, plain, clipped):
    x = gaussian(512, 1024)
    assert snr_db(x, roundtrip(Quantize(bits, grid="midrise"), x)) == pytest.approx(plain, abs=0.1)
    assert snr_db(x, roundtrip(Quantize(bits, clip="mse", grid="midrise"), x)) == pytest.approx(clipped, abs=0.1)


def test_a_number_is_the_share_of_the_largest_magnitude():
    x = torch.tensor([[4.0, -1.0, 0.5, -0.25]])
    codec = parse('q(2, clip=0.5, grid="midrise")')
    assert_identical(roundtrip(codec, x), torch.tensor([[1.5, -0.5, 0.5, -0.5]]))
    assert_identical(codec.error_bound(x) >= torch.tensor([[2.5, 0.5, 0.5, 0.5]]), torch.ones(1, 4, dtype=torch.bool))


@pytest.mark.parametrize("clip", ["mse", 0.5])
@pytest.mark.parametrize("grid", ["midrise", "midtread"])
def test_the_decoder_is_the_one_without_clipping(grid, clip):
    codec, x = Quantize(3, grid=grid, clip=clip), gaussian(6, 40)
    payload, y = encode(codec, x), torch.empty(6, 40)
    Quantize(3, grid=grid).decode(payload, y, KEY)
    assert_identical(roundtrip(codec, x), y)
    assert not torch.equal(payload, encode(Quantize(3, grid=grid), x))


def test_at_one_bit_the_scale_is_exact():
    x = gaussian(5, 100)
    scales = encode('q(1, clip="mse")', x)[:10].view(torch.bfloat16).float()
    torch.testing.assert_close(scales, 2 * x.abs().mean(1), rtol=2**-7, atol=0)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1e20, 1e37])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_any_magnitude(magnitude, bits):
    x = gaussian(16, 512)
    assert (
        snr_db(x * magnitude, roundtrip(Quantize(bits, clip="mse", grid="midrise"), x * magnitude))
        > (4, 9, 0, 19)[bits - 1]
    )


@pytest.mark.parametrize("per", ["row", "channel", "tensor"])
def test_blocks_of_every_form(per):
    x = gaussian(64, 16, 300)
    gain = snr_db(x, roundtrip(Quantize(2, per=per, clip="mse", grid="midrise"), x)) - snr_db(
        x, roundtrip(Quantize(2, per=per, grid="midrise"), x)
    )
    assert gain > 0.3, gain


def test_a_scale_is_never_above_the_largest_magnitude_and_zero_only_for_zeros():
    x = torch.stack([torch.zeros(20), torch.full((20,), 3.0), gaussian(20), torch.eye(20)[0]]).unsqueeze(0)
    _, _, scale = least_square_scales(x, 4, {})
    assert (scale <= x.abs().amax(2).T).all()
    assert (scale > 0).flatten().tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ('q(4, clip=1.5, grid="midrise")', 'q\'s clip must be "mse" or a share above 0 and below 1, got 1.5'),
        ('q(4, clip=1, grid="midrise")', 'q\'s clip must be "mse" or a share above 0 and below 1, got 1'),
        ('q(4, clip="best", grid="midrise")', "q's clip must be \"mse\" or a share above 0 and below 1, got 'best'"),
        ('q(6, clip="mse", grid="midrise")', 'q\'s clip="mse" is for 1 to 5 bits, as more gain nothing by it, got 6'),
        (
            'q(4, scale="minmax", clip="mse")',
            'q\'s grid and clip are for scale="absmax" and round="nearest", got scale="minmax" and round="nearest"',
        ),
        (
            'q(4, round="stochastic", grid="midtread")',
            'q\'s grid and clip are for scale="absmax" and round="nearest", got scale="absmax" and round="stochastic"',
        ),
        ('q(4, grid="zero")', 'q\'s grid must be one of "midrise", "midtread", got "zero"'),
    ],
)
def test_every_mistake_has_its_sentence(expression, sentence):
    assert said_by(expression) == sentence
