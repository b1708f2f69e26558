"""What tests of codecs share that have a file of their own: the contract in one call, and the decoders in docs."""

import torch

from support.codec_helpers import KEY, assert_identical
from support.pages import defined


def assert_contract(codec, x, offset=0, key=KEY):
    """Encode and decode ``x`` at some alignment, and return what it came back as, after these checks.

    The payload is exactly nbytes long and depends on nothing that was there before; ``x`` is left as it is; decoding
    depends on nothing but the payload; no element is further off than the bound.
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
    error, bound = (decoded[0].double() - x.double()).abs(), codec.error_bound(x).double()
    assert bound.shape == x.shape
    assert (error <= bound).all(), f"{codec}: {(error - bound).max().item()} beyond the bound"
    return decoded[0]


def documented(function):
    """Return a function that the documentation of codecs shows."""
    return defined(function)[function]
