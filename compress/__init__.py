"""Codecs, tensors to bytes and back, and feedback around them, by expressions such as `ef(topk(0.1))`."""

from thinwire.compress.buffers import SlotCounts
from thinwire.compress.codec import Codec, CodecError, Key
from thinwire.compress.coder import Coder, Decoder, Encoder
from thinwire.compress.expression import parse
from thinwire.compress.feedback import Feedback, Method
from thinwire.compress.microbatch import Microbatch, PassKind
from thinwire.compress.stores.store import StoreError

__all__ = [
    "Codec",
    "CodecError",
    "Coder",
    "Decoder",
    "Encoder",
    "Feedback",
    "Key",
    "Method",
    "Microbatch",
    "PassKind",
    "SlotCounts",
    "StoreError",
    "parse",
]
