"""reuse: gradients at the activation's indices, once it is bound to the activations' codec."""

import pytest
import torch

from support.codec_helpers import FLOATING, KEY, assert_identical, encode, gaussian, roundtrip, snr_db
from support.coder_pair import ROWS, WIDTH, Pair, random
from support.sparse_cases import CODECS, key_of, sent_through
from thinwire.compress import CodecError, parse
from thinwire.compress.codecs.cast import Uncompressed
from thinwire.compress.codecs.indices import put_values
from thinwire.compress.codecs.quantize import Quantize
from thinwire.compress.codecs.reuse import Reuse
from thinwire.compress.codecs.sparse import RandK, TopK

NEEDS_INDICES = "reuse needs topk or randk on the activations of the same boundary"


@pytest.mark.parametrize(
    "use",
    [
        lambda codec, x, payload: codec.nbytes(x.shape, x.dtype),
        lambda codec, x, payload: codec.encode(x, payload, KEY),
        lambda codec, x, payload: codec.decode(payload, x, KEY),
        lambda codec, x, payload: codec.error_bound(x),
    ],
)
def test_reuse_alone_is_a_mistake(use):
    with pytest.raises(CodecError) as error:
        use(parse("reuse"), gaussian(4), torch.empty(4, dtype=torch.uint8))
    assert str(error.value) == NEEDS_INDICES


@pytest.mark.parametrize("activations", [Quantize(4), Uncompressed()])
def test_reuse_is_bound_to_topk_or_randk_only(activations):
    with pytest.raises(CodecError) as error:
        Reuse().bound_to(activations)
    assert str(error.value) == f"{NEEDS_INDICES}, got {activations}"


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", FLOATING)
def test_reuse_sends_the_gradient_where_the_activation_was_sent(codec, dtype):
    activation, gradient = gaussian(3, 4, 25, dtype=dtype), gaussian(3, 4, 25, dtype=dtype, seed=1, scale=1e-3)
    at_sender = codec.select(activation, KEY)
    at_receiver = codec.indices(encode(codec, activation), activation.shape, dtype, KEY)
    reuse = Reuse().bound_to(codec)
    payload = torch.empty(reuse.nbytes(gradient.shape, dtype), dtype=torch.uint8)
    reuse.encode(gradient, payload, key_of(8), at_receiver)
    y = torch.full((3, 4, 25), 77, dtype=dtype)
    reuse.decode(payload, y, key_of(8), at_sender)
    sent = put_values(torch.ones_like(at_sender, dtype=torch.bool), at_sender, torch.zeros(3, 4, 25, dtype=torch.bool))
    assert (y[~sent] == 0).all() and (y[sent] != 0).all()
    expected = gradient * (100 / codec.count(100) if codec == RandK(0.1) or codec == RandK(0.3, values="q(8)") else 1)
    assert snr_db(expected[sent], y[sent]) > 15


@pytest.mark.parametrize("codec", [TopK(0.3), RandK(0.3), RandK(0.3).unscaled()])
def test_reuse_is_the_derivative_of_the_activations_codec(codec):
    x, gradient = gaussian(4, 50), gaussian(4, 50, seed=1)
    kept = put_values(torch.ones(4, 15), codec.select(x, KEY), torch.zeros(4, 50))
    scale = roundtrip(codec, x)[kept > 0] / x[kept > 0]
    expected = gradient * kept * scale.median()
    assert_identical(sent_through(Reuse().bound_to(codec), gradient, codec.select(x, KEY)), expected)


def test_reuse_without_indices_is_our_own_error():
    reuse = Reuse().bound_to(TopK(0.5))
    for shared in (None, torch.zeros(1, 3, dtype=torch.int64)):
        with pytest.raises(AssertionError, match=r"reuse needs indices of shape \(1, 2\)"):
            reuse.encode(gaussian(4), torch.empty(8, dtype=torch.uint8), KEY, shared)


@pytest.mark.parametrize(
    "activations",
    ["topk(0.25)", "randk(0.25)"]
    + [f"{rule}({codec}(0.25))" for rule in ("ef", "ef21", "aqsgd") for codec in ("topk", "randk")],
)
def test_reuse_sends_the_gradients_values_at_the_activations_indices(activations):
    forward = Pair(activations)
    back = Pair("reuse", activations=(forward.receiver, forward.sender))
    ids = [0, 1, 2, 3]
    for step in range(3):
        forward.carry(random(step), ids, step=step)
        gradient = random(100 + step)
        out = back.carry(gradient, step=step)
        in_full = activations.startswith("aqsgd") and step == 0
        kept = out != 0
        assert (kept.sum(1) == (WIDTH if in_full else 6)).all()
        scale = 4.0 if activations.startswith("randk") else 1.0
        torch.testing.assert_close(out[kept], scale * gradient[kept], rtol=0, atol=0)
        assert back.nbytes == ROWS * (WIDTH if in_full else 6) * 4


def test_reuse_goes_in_full_where_the_activation_did():
    forward = Pair("aqsgd(topk(0.25))")
    back = Pair("reuse", activations=(forward.receiver, forward.sender))
    forward.carry(random(0), [0, 1, 2, 3])
    back.carry(random(1))
    forward.carry(random(0), [0, 7, 2, 8], step=1)
    out = back.carry(random(1), step=1)
    assert torch.equal(out[[1, 3]], random(1)[[1, 3]])
    assert ((out[[0, 2]] != 0).sum(1) == 6).all()
    forward.carry(random(0), [0, 1, 2, 3], kind="warmup", step=2)
    assert torch.equal(back.carry(random(1), kind="warmup", step=2), random(1))


def test_reuse_needs_a_sparse_activation():
    with pytest.raises(CodecError, match="reuse needs topk or randk on the activations of the same boundary"):
        Pair("reuse", activations=(Pair("q(4)").receiver, Pair("q(4)").sender))
    with pytest.raises(CodecError, match="reuse needs topk or randk"):
        Pair("reuse")
