"""What tests of the sparse codecs share: the codecs, and messages that are told something beside."""

import torch

from support.codec_helpers import KEY
from thinwire.compress.codecs.sparse import RandK, TopK

FORMATS = ("fp32", "fp16", "bf16", "q(8)", "q(4)")
CODECS = (
    *(TopK(0.1, values=values) for values in FORMATS),
    TopK(0.5),
    TopK(1.0, values="q(4)"),
    TopK(0.2, values="fp16", per="row"),
    RandK(0.1),
    RandK(0.3, values="q(8)"),
    RandK(0.75, values="fp16", scaled=False),
)


def key_of(microbatch):
    return KEY._replace(microbatch=microbatch)


def sent_through(codec, x, shared):
    """Return ``x`` as it comes back from a codec that is told something beside."""
    payload = torch.full((codec.nbytes(x.shape, x.dtype),), 0xA5, dtype=torch.uint8)
    codec.encode(x, payload, KEY, shared)
    out = torch.full(x.shape, 77, dtype=x.dtype)
    codec.decode(payload, out, KEY, shared)
    return out
