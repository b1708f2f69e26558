"""The values of sparse codecs in 2 bits: four bins and their means."""

import pytest
import torch

from support.codec_contract import assert_contract, documented
from support.codec_helpers import FLOATING, assert_identical, encode, gaussian, roundtrip
from thinwire.compress.codecs.means import Means
from thinwire.compress.codecs.sparse import RandK, TopK

TOPK = TopK(1 / 64, values="means(2)")


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("codec", [TOPK, TopK(0.3, values="means(2)", code="entropy"), RandK(0.2, values="means(2)")])
def test_it_keeps_the_contract_of_codecs(codec, dtype):
    for x in (gaussian(5, 200, dtype=dtype), torch.zeros(3, 7, dtype=dtype), torch.full((2, 9), 1.5, dtype=dtype)):
        assert_contract(codec, x)


def test_a_value_is_decoded_as_the_mean_of_its_bin():
    x = torch.tensor([-9.0, -1.0, -3.0, 1.0, 2.0, 9.0, 1.0])  # mean 0, deviation 5.48: a bin is 8.2 wide
    assert_identical(roundtrip(Means(), x), torch.tensor([-9.0, -2.0, -2.0, 4 / 3, 4 / 3, 9.0, 4 / 3]))


def test_the_reader_in_the_documentation_reads_what_is_written():
    x = gaussian(1, 333).exp()
    payload = encode(Means(), x)
    assert len(payload) == 16 + (333 * 2 + 7) // 8
    assert documented("read_means")(bytes(payload.tolist()), 333) == roundtrip(Means(), x).flatten().tolist()


def test_two_bits_lose_little_of_the_largest():
    x = gaussian(64, 4096)
    kept = roundtrip(TopK(1 / 64), x)
    error = (roundtrip(TOPK, x) - kept).norm() / kept.norm()
    assert 0.01 < error < 0.2


def test_the_bound_within_holds_for_any_values_of_such_magnitudes():
    magnitudes = gaussian(4, 256).abs()
    bound = TOPK.error_bound_within(magnitudes)
    for seed in range(5):
        x = magnitudes * torch.randn(4, 256, generator=torch.Generator().manual_seed(seed)).sign()
        assert ((roundtrip(TOPK, x) - x).abs() <= bound).all()


def test_nan_is_not_hidden():
    x = gaussian(2, 300)
    x[1, 5] = torch.nan
    assert not roundtrip(TOPK, x).isfinite().all()
