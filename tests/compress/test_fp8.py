"""fp8: exact payloads, torch's own e4m3, and the ends of its range."""

import pytest
import torch

from support.codec_contract import documented
from support.codec_helpers import KEY, assert_identical, encode, gaussian, roundtrip, said_by, snr_db
from thinwire.compress import CodecError, parse
from thinwire.compress.codecs.fp8 import Float8
from thinwire.compress.codecs.granularity import blocks_for


def hexed(payload):
    return bytes(payload.tolist()).hex()


def test_it_is_torchs_e4m3_of_the_scaled_value():
    x = gaussian(64, 700, scale=3)
    scale = encode("fp8", x)[: 2 * 64].view(torch.bfloat16).float().unsqueeze(1)
    largest = x.abs().amax(1, keepdim=True)
    assert (448 * scale >= largest).all() and (448 * scale <= largest * (1 + 2**-7)).all()
    assert_identical(roundtrip("fp8", x), (x / scale).to(torch.float8_e4m3fn).float() * scale)


@pytest.mark.parametrize("scale", [2.0**-117, 2.0**-20 * 1.9921875, 1.0, 0.7421875, 145 * 2.0**112])
def test_every_value_it_can_send_comes_back_exactly(scale):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    x = codes[codes.isfinite()] * scale
    assert len(x) == 254
    assert_identical(roundtrip("fp8", x), x)


def test_signal_to_noise_hardly_depends_on_the_distribution():
    gauss, wide = gaussian(256, 1024), gaussian(256, 1024) * torch.exp2(gaussian(256, 1024, seed=1))
    for x in (gauss, wide):
        assert 31 < snr_db(x, roundtrip("fp8", x)) < 32, snr_db(x, roundtrip("fp8", x))
    assert snr_db(gauss, roundtrip("q(8)", gauss)) > 40
    assert snr_db(wide, roundtrip("q(8)", wide)) < 38


def test_small_values_keep_their_digits_beside_large_ones():
    x = torch.exp2(torch.linspace(0, -14.8, 1001))
    error = (roundtrip("fp8", x) - x).abs() / x
    assert 0.9 / 17 < error.max() <= 1 / 17
    assert ((roundtrip("q(8)", x) - x).abs() / x).max() == 1, "zero"


@pytest.mark.parametrize("magnitude", [1e-32, 1e-10, 1e6, 1e30, 1e38])
def test_any_magnitude(magnitude):
    x = gaussian(16, 64, scale=magnitude / 4)
    assert 31 < snr_db(x, roundtrip("fp8", x)) < 32.5


def test_a_row_below_the_smallest_scale_is_sent_as_zeros():
    x = torch.tensor([[448 * 2.0**-119, -(2.0**-126)], [448 * 2.0**-117, -(2.0**-118)]])
    y = roundtrip("fp8", x)
    assert hexed(encode("fp8", x)[:4]) == "00000005"
    assert_identical(y, torch.stack([torch.zeros(2), x[1]]))
    assert ((y - x).abs() <= parse("fp8").error_bound(x)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_largest_values_stay_finite(dtype):
    largest = torch.finfo(dtype).max
    x = torch.tensor([[largest, -largest, largest / 3, 1.0]], dtype=dtype)
    y = roundtrip("fp8", x)
    assert y.isfinite().all()
    assert ((y.double() - x.double()).abs() <= parse("fp8").error_bound(x)).all()
    assert (y[0, 0] / x[0, 0]).item() > 0.98


@pytest.mark.parametrize(
    ("expression", "numbers"), [("fp8", 12), ('fp8(per="sample")', 4), ('fp8(per="channel")', 3), ("fp8(group=50)", 3)]
)
def test_a_payload_is_its_scales_and_a_byte_an_element(expression, numbers):
    for dtype in (torch.float32, torch.bfloat16):
        assert parse(expression).nbytes((4, 3, 5, 2), dtype) == 2 * numbers + 120


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("fp8(8)", "'fp8(8)': too many positional arguments; write fp8(per, group, code)"),
        ('fp8(per="batch")', 'fp8\'s per must be one of "tensor", "sample", "row", "channel", got "batch"'),
        ("fp8(group=0)", "fp8's group must be an integer of at least 1, got 0"),
        ('fp8(per="row", group=4)', "fp8 takes per or group, not both, got per='row' and group=4"),
    ],
)
def test_every_mistake_has_its_sentence(expression, sentence):
    assert said_by(expression) == sentence


@pytest.mark.parametrize("options", [{"per": per} for per in ("tensor", "sample", "row", "channel")] + [{"group": 7}])
def test_the_decoder_in_the_documentation_gets_the_same_bits(options):
    for shape in ((), (9,), (4, 5), (2, 3, 5), (2, 3, 2, 2)):
        x, codec = gaussian(*shape) * torch.exp2(5 * gaussian(*shape, seed=1)), Float8(**options)
        blocks = blocks_for(codec.per, codec.group, shape)
        values = documented("decode_fp8")(bytes(encode(codec, x).tolist()), x.numel(), blocks.count, blocks.inner)
        assert_identical(roundtrip(codec, x), torch.tensor(values).view(shape))


def test_integers_are_refused():
    with pytest.raises(CodecError, match=r"^fp8 compresses floating-point tensors .*, got torch.int64"):
        parse("fp8").encode(torch.arange(4), torch.empty(6, dtype=torch.uint8), KEY)
