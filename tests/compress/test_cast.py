"""none, fp16 and bf16: the exact bytes, and what happens at the ends of the formats."""

import pytest
import torch

from support.codec_helpers import FLOATING, assert_identical, decode, encode, gaussian, roundtrip, snr_db
from thinwire.compress import CodecError, parse


@pytest.mark.parametrize("dtype", [*FLOATING, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64])
def test_none_returns_every_bit(dtype):
    x = torch.randint(0, 2, (3, 5), generator=torch.Generator().manual_seed(0)).to(dtype)
    assert_identical(roundtrip("none", x), x)


def test_none_keeps_the_bits_of_nan_and_of_minus_zero():
    x = torch.tensor([0x7FC00001, -0x7FFFFF, -(2**31), 0x7F800000], dtype=torch.int32).view(torch.float32)
    assert_identical(roundtrip("none", x).view(torch.int32), x.view(torch.int32))


@pytest.mark.parametrize("expression", ["fp16", "bf16"])
@pytest.mark.parametrize("dtype", FLOATING)
def test_a_cast_is_torch_s_own(expression, dtype):
    x = gaussian(64, 33, dtype=dtype)
    wire = {"fp16": torch.float16, "bf16": torch.bfloat16}[expression]
    assert_identical(roundtrip(expression, x), x.to(wire).to(dtype))


def test_fp16_and_bf16_differ():
    x = gaussian(1000)
    fp16, bf16 = snr_db(x, roundtrip("fp16", x)), snr_db(x, roundtrip("bf16", x))
    assert 70 < fp16 < 80, fp16
    assert 50 < bf16 < 60, bf16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fp16_saturates(dtype):
    x = torch.tensor([65504, 65536, 1e6, -1e30, 3e38], dtype=dtype)
    expected = torch.tensor([65504, 65504, 65504, -65504, 65504], dtype=torch.float16).to(dtype)
    assert_identical(roundtrip("fp16", x), expected)


def test_bf16_saturates_when_the_receiver_is_fp16():
    x = torch.tensor([65504, -65504], dtype=torch.float16)  # 65536 as bf16, which is beyond fp16
    assert_identical(roundtrip("bf16", x), x)


@pytest.mark.parametrize("expression", ["fp16", "bf16"])
def test_what_is_not_finite_stays_so(expression):
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0])
    assert_identical(roundtrip(expression, x).isfinite(), torch.tensor([False, False, False, True]))


def test_bf16_keeps_the_range_of_float32():
    x = torch.tensor([1e6, 1e30, -3e38])
    torch.testing.assert_close(roundtrip("bf16", x), x, rtol=2**-8, atol=0)


def test_the_bound_of_bf16_says_where_it_may_become_infinite():
    x = torch.tensor([3.4e38, 3.3e38, -3.4e38])
    assert roundtrip("bf16", x).isinf().tolist() == [True, False, True]
    assert parse("bf16").error_bound(x).isinf().tolist() == [True, False, True]


@pytest.mark.parametrize("expression", ["fp16", "bf16", "q(8)"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn])
def test_integers_and_8_bit_floats_are_refused(expression, dtype):
    with pytest.raises(CodecError) as error:
        parse(expression).nbytes((3,), dtype)
    wanted = "floating-point tensors of at least 16 bits"
    assert str(error.value) == f"{expression} compresses {wanted}, got {dtype}; send this tensor with none"


def test_a_payload_is_decoded_to_the_dtype_of_out():
    x = gaussian(5, dtype=torch.bfloat16)
    assert decode("fp16", encode("fp16", x), x.shape, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("expression", ["none", "fp16", "bf16"])
def test_one_element_of_any_stride_is_sent(expression):
    """A view of one element, such as x[:, 0] of [1, 2], counts as contiguous: its bytes could not be taken."""
    x = torch.tensor([[3.0, 4.0]])[:, 0]
    assert_identical(roundtrip(expression, x), torch.tensor([3.0]))
