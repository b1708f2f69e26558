"""The contract of codecs as checks that several tests call, and the decoders in docs."""

import torch

from support.codec_helpers import KEY, assert_identical
from support.pages import defined


def assert_exact_encoding(codec, x, offset=0, key=KEY):
    """Encode and decode `x` at some alignment, and return the decoded tensor, after these checks.

    The payload is exactly nbytes long and depends on nothing that was there before. `x` does not change. Decoding
    depends on the payload only.
    """
    before, nbytes = x.clone(), codec.nbytes(x.shape, x.dtype)
    payloads = []
    for fill in (0x00, 0xFF):
        buffer = torch.full((offset + nbytes + 9,), fill, dtype=torch.uint8)
        codec.encode(x, buffer[offset : offset + nbytes], key)
        assert (buffer[:offset] == fill).all() and (buffer[offset + nbytes :] == fill).all()
        payloads.append(buffer[offset : offset + nbytes])
    assert_identical(payloads[0], payloads[1])
    assert_identical(x, before)
    assert x.numel() or nbytes == 0
    decoded = [torch.full(x.shape, fill, dtype=x.dtype) for fill in (0, 77)]
    codec.decode(payloads[0], decoded[0], key)
    codec.decode(payloads[0].clone(), decoded[1], key)
    assert_identical(decoded[0], decoded[1])
    return decoded[0]


def assert_within_bound(codec, x, decoded):
    """Check that no element of `decoded` is further off than the codec's bound, which broadcasts to the shape."""
    assert decoded.shape == x.shape and decoded.dtype == x.dtype
    error = (decoded.double() - x.double()).abs()
    bound = codec.error_bound(x).double().broadcast_to(x.shape)
    assert (error <= bound).all(), f"{codec}: an error of {error.max().item()} with a bound of {bound.max().item()}"


def assert_contract(codec, x, offset=0, key=KEY):
    """Encode and decode `x` with all these checks, and return the decoded tensor; the bound has the shape of `x`."""
    decoded = assert_exact_encoding(codec, x, offset, key)
    assert codec.error_bound(x).shape == x.shape
    assert_within_bound(codec, x, decoded)
    return decoded


def documented(function, *others):
    """The function of this name in the documentation of codecs; it may call what the blocks of others define."""
    return defined(function, *others)[function]
