"""randk: unbiased alone, unscaled inside feedback, and drawn from the key and nothing else."""

import math

import pytest
import torch

from support.codec_contract import documented
from support.codec_helpers import KEY, assert_identical, encode, gaussian, roundtrip
from support.sparse_cases import FORMATS, key_of
from thinwire.compress.codecs.indices import put_values
from thinwire.compress.codecs.sparse import RandK


@pytest.mark.parametrize("fraction", [0.1, 0.6])
def test_randk_is_unbiased_alone_and_not_unscaled(fraction):
    repeats, values = 40_000, gaussian(20)
    x = values.expand(repeats, 20)
    codec = RandK(fraction)
    scale = 20 / codec.count(20)
    standard_error = values.abs() * math.sqrt((scale - 1) / repeats)
    deviation = (roundtrip(codec, x).double().mean(0) - values).abs() / standard_error
    assert deviation.max() < 4.5, f"{deviation.max():.1f} standard errors"
    unscaled = (roundtrip(codec.unscaled(), x).double().mean(0) - values).abs() / standard_error
    assert unscaled.min() > 50, f"{unscaled.min():.1f} standard errors"


def test_randk_multiplies_what_it_sends_by_n_over_k():
    x = gaussian(3, 50)
    plain, scaled = roundtrip(RandK(0.06).unscaled(), x), roundtrip(RandK(0.06), x)
    assert_identical(scaled, plain * (50 / 3))
    assert_identical(plain, torch.where(plain != 0, x, 0))
    assert (plain != 0).sum(1).tolist() == [3, 3, 3]
    assert RandK(0.06).unscaled().unscaled() == RandK(0.06, scaled=False)


def test_what_randk_multiplies_beyond_fp16_saturates():
    x = torch.tensor([40000.0, -40000.0, 3.0, torch.inf], dtype=torch.float16)
    sent = RandK(0.5).select(x, KEY)[0].tolist()
    y, largest = roundtrip(RandK(0.5), x), torch.finfo(torch.float16).max
    expected = torch.tensor([largest, -largest, 6.0, torch.nan], dtype=torch.float16)
    assert len(sent) == 2 and {0, 1, 3} & set(sent), "the key should send one that overflows"
    assert_identical(y[sent], expected[sent])


def test_randk_depends_on_the_key_alone():
    x = gaussian(4, 200)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    chosen = RandK(0.1).select(x, KEY)
    assert_identical(RandK(0.1, values="q(8)").select(x * 2, KEY), chosen)
    assert_identical(RandK(0.1).indices(encode(RandK(0.1), x), x.shape, x.dtype, KEY), chosen)
    assert not torch.equal(RandK(0.1).select(x, key_of(9)), chosen)
    assert_identical(torch.get_rng_state(), state)


@pytest.mark.parametrize("values", FORMATS)
def test_what_randk_does_not_send_spoils_nothing(values):
    codec = RandK(0.5, values=values)
    x = gaussian(3, 20)
    kept = put_values(torch.ones(3, 10, dtype=torch.bool), codec.select(x, KEY), torch.zeros(3, 20, dtype=torch.bool))
    assert_identical(roundtrip(codec, torch.where(kept, x, torch.nan)), roundtrip(codec, x))


def test_the_draw_in_the_documentation_is_the_one_that_is_made():
    draw = documented("drawn_indices")
    for samples, n, k in ((1, 1, 1), (3, 5, 2), (2, 101, 10), (1, 7, 7)):
        x = gaussian(samples, n)
        for key in (KEY, KEY._replace(seed=2**40, channel="gradients", phase="eval-on", step=12, tensor=1)):
            drawn = draw([*key], samples, n, k)
            assert drawn == RandK(k / n).select(x, key).view(-1).tolist()
