"""q's option outliers: exact payloads, what becomes of the outliers and of the rest, and what they cost."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.codec_contract import assert_contract
from support.codec_helpers import FLOATING, assert_identical, encode, few, gaussian, roundtrip, shapes, snr_db
from thinwire.compress import CodecError, parse
from thinwire.compress.codecs.indices import indices_size
from thinwire.compress.codecs.quantize import Quantize

with_outliers = st.builds(
    Quantize,
    st.integers(1, 8),
    scale=st.sampled_from(["absmax", "minmax"]),
    per=st.sampled_from(["tensor", "sample", "row", "channel"]),
    round=st.sampled_from(["nearest", "stochastic"]),
    outliers=st.sampled_from([1e-9, 0.01, 0.1, 0.5]),
) | st.builds(Quantize, st.integers(1, 8), group=st.integers(1, 40), outliers=st.sampled_from([0.01, 0.5]))


def split(x, k):
    """Return which elements of each row are its k outliers."""
    magnitude, mask = x.abs(), torch.zeros_like(x, dtype=torch.bool)
    for row, chosen in zip(magnitude, mask, strict=True):
        order = sorted(range(len(row)), key=lambda i: (-row[i].item(), i))
        chosen[order[:k]] = True
    return mask


@settings(few, max_examples=60)
@given(codec=with_outliers, shape=shapes, dtype=st.sampled_from(FLOATING), offset=st.integers(0, 7))
def test_contract(codec, shape, dtype, offset):
    assert parse(str(codec)) == codec
    assert_contract(codec, gaussian(*shape, dtype=dtype), offset)


@pytest.mark.parametrize("scale", ["absmax", "minmax"])
@pytest.mark.parametrize(("n", "k"), [(100, 10), (768, 77), (15, 2), (3, 1)])
def test_outliers_are_sent_in_bf16_and_the_rest_as_if_they_were_not_there(scale, n, k):
    x = 2 + gaussian(7, n)
    y, mask = roundtrip(Quantize(4, scale=scale, outliers=0.1, grid="midrise"), x), split(x, k)
    assert_identical(y[mask], x[mask].bfloat16().float())
    for row, decoded, apart in zip(x, y, mask, strict=True):
        assert_identical(decoded[~apart], roundtrip(Quantize(4, scale=scale, grid="midrise"), row[~apart]))


@pytest.mark.parametrize("options", ['per="channel"', "group=4", 'per="tensor"', 'per="sample"'])
def test_an_outlier_widens_no_block_of_any_kind(options):
    """Row 0's outlier lies in a block whose rest spans 5 to 6; 0 in its place would make that 0 to 6."""
    x = 5 + torch.rand(8, 16, generator=torch.Generator().manual_seed(0))
    x[0, 3] = 1000.0
    codec = parse(f'q(8, scale="minmax", outliers=0.05, {options})')
    y = roundtrip(codec, x)
    kept = ~split(x, 1)
    assert (y - x)[kept].abs().max() < 1.001 / 255 / 2 + 1e-6


def test_a_block_of_nothing_but_outliers():
    x = torch.tensor([[100.0, 1.0, 2.0, 3.0], [-200.0, 1.0, 2.0, 3.0]])
    for scale in ("absmax", "minmax"):
        y = roundtrip(Quantize(8, scale=scale, per="channel", outliers=0.25, grid="midrise"), x)
        assert_identical(y[:, 0], x[:, 0])
        torch.testing.assert_close(y, x, rtol=0, atol=0.02)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rows_with_outliers_gain(bits):
    x = gaussian(256, 1024)
    x[torch.rand(256, 1024, generator=torch.Generator().manual_seed(1)) < 0.005] *= 20
    plain = snr_db(x, roundtrip(Quantize(bits, grid="midrise"), x))
    gain = snr_db(x, roundtrip(Quantize(bits, outliers=0.01, grid="midrise"), x)) - plain
    assert gain > 15, gain
    assert (Quantize(bits, outliers=0.01, grid="midrise").nbytes(x.shape, x.dtype)) * 8 / x.numel() < bits + 0.26


@pytest.mark.parametrize("shape", [(4, 3, 5, 20), (12, 100)])
def test_a_payload_is_outliers_their_indices_and_the_rest(shape):
    for fraction, k in ((0.01, 1), (0.024, 2), (0.025, 2), (0.5, 50)):
        apart = 2 * 12 * k + indices_size(12, 100, k)
        for plain in (
            Quantize(3, grid="midrise"),
            Quantize(3, scale="minmax", per="tensor"),
        ):
            codec = parse(f"{str(plain)[:-1]}, outliers={fraction})")
            assert codec.nbytes(shape, torch.bfloat16) == apart + plain.nbytes(shape, torch.bfloat16)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-10, 1e6, 1e30])
def test_any_magnitude(magnitude):
    """fp16 would send the first two as 0 and the others as 65504."""
    x = gaussian(16, 500, scale=magnitude)
    assert 20 < snr_db(x, roundtrip('q(4, outliers=0.01, grid="midrise")', x)) < 22


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_the_bound_is_reached(bits):
    x = gaussian(64, 512)
    codec = Quantize(bits, outliers=0.02, grid="midrise")
    error, bound, mask = (roundtrip(codec, x) - x).abs(), codec.error_bound(x), split(x, 10)
    for part, least in ((mask, 0.8), (~mask, 0.9)):
        assert least < (error / bound)[part].max() <= 1


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_as_many_as_are_outliers_may_be_infinite_or_nan_and_spoil_nothing(value):
    x = gaussian(4, 100)
    clean = roundtrip('q(4, outliers=0.02, grid="midrise")', x)
    x[1, 7] = x[1, 50] = value
    y = roundtrip('q(4, outliers=0.02, grid="midrise")', x)
    assert_identical(y.isfinite(), x.isfinite())
    assert_identical(y[1, 7], x[1, 7])
    others = torch.tensor([0, 2, 3])
    assert_identical(y[others], clean[others])
    finite = x[1].isfinite()
    assert_identical(y[1][finite], roundtrip('q(4, grid="midrise")', x[1][finite]))
    x[1, 51] = value
    assert_identical(
        roundtrip('q(4, outliers=0.02, grid="midrise")', x).isfinite().all(1), torch.tensor([True, False, True, True])
    )


def test_zeros_come_back_as_zeros():
    assert_identical(roundtrip('q(4, outliers=0.01, grid="midrise")', torch.zeros(3, 7)), torch.zeros(3, 7))


@pytest.mark.parametrize("value", ["0.0", "0", "0.51", "1", "-0.1", "True", "'1%'"])
def test_every_other_share_has_its_sentence(value):
    with pytest.raises(CodecError) as error:
        parse(f'q(4, outliers={value}, grid="midrise")')
    assert str(error.value) == f"q's outliers must be a share above 0 and at most 0.5, got {value}"


def test_strides_do_not_matter():
    x = gaussian(6, 4, 5, 3)
    for view in (x.transpose(0, 2), x[::2], x[..., 1], x.flip(0), x[:, :1].expand(6, 4, 5, 3)):
        codec = parse('q(4, outliers=0.1, grid="midrise")')
        assert_identical(encode(codec, view), encode(codec, view.contiguous()))
