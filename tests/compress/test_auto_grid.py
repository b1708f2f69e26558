"""The codec of examples that chooses a grid for each block: which one, its contract, and its decoder on the page."""

import pytest
import torch
from auto_grid import Auto

from support.codec_contract import assert_contract, documented
from support.codec_helpers import assert_identical, encode, gaussian, roundtrip, snr_db
from thinwire.compress.codecs.granularity import blocks_per
from thinwire.compress.codecs.quantize import Quantize


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("tensor", ["gaussian", "relu", "spikes", "uniform"])
def test_auto_is_as_good_as_the_better_grid(tensor, bits):
    x = gaussian(64, 1000)
    x = {
        "gaussian": x,
        "relu": x.relu(),
        "spikes": torch.where(gaussian(64, 1000, seed=1).abs() > 2.576, 20 * x, x),
        "uniform": torch.erf(x / 2**0.5),
    }[tensor]
    snr = [snr_db(x, roundtrip(Quantize(bits, grid=grid), x)) for grid in ("midrise", "midtread")]
    assert snr_db(x, roundtrip(Auto(bits), x)) > max(snr) - 0.1, snr


def test_auto_chooses_for_each_block():
    x = torch.stack([gaussian(256).relu(), torch.tensor([-0.25, 0.75, -0.75, 0.25]).repeat(64)])
    scales = encode(Auto(2), x)[:4].view(torch.int16)
    assert (scales & 1).tolist() == [0, 1]
    assert snr_db(x[1], roundtrip(Auto(2), x)[1]) > snr_db(x[1], roundtrip('q(2, grid="midtread")', x)[1]) + 3


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_decoder_in_the_documentation_gets_the_same_bits(bits):
    decode = documented("decode_with_zero")
    for shape in ((), (9,), (4, 5), (2, 3, 5), (2, 3, 2, 2)):
        x, blocks = gaussian(*shape), blocks_per("row", shape)
        x = torch.where(x.abs() < 0.6, 0.0, x)
        values = decode(bytes(encode(Auto(bits), x).tolist()), bits, True, x.numel(), blocks.count, blocks.inner)
        assert_identical(roundtrip(Auto(bits), x), torch.tensor(values).view(shape))


@pytest.mark.parametrize("codec", [Auto(1), Auto(3, group=7), Auto(4), Auto(8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contract(codec, dtype):
    for shape in ((), (7,), (3, 40), (2, 3, 5)):
        assert_contract(codec, gaussian(*shape, dtype=dtype))
