"""Codecs, tensors to bytes and back, and feedback around them, by expressions such as `ef(topk(0.1))`."""

from typing import TYPE_CHECKING

from thinwire.errors.imports import on_demand

if TYPE_CHECKING:
    from thinwire.compress.buffers import SlotCounts
    from thinwire.compress.codec import Codec, CodecError, ContractError, Key
    from thinwire.compress.coder import Coder, Decoder, Encoder
    from thinwire.compress.expression import parse
    from thinwire.compress.feedback import Feedback, Method
    from thinwire.compress.microbatch import Microbatch, PassKind, Progress
    from thinwire.compress.rules import check
    from thinwire.compress.stores.store import StoreError
else:
    __getattr__ = on_demand(
        __name__,
        {
            "thinwire.compress.buffers": ["SlotCounts"],
            "thinwire.compress.codec": ["Codec", "CodecError", "ContractError", "Key"],
            "thinwire.compress.coder": ["Coder", "Decoder", "Encoder"],
            "thinwire.compress.expression": ["parse"],
            "thinwire.compress.feedback": ["Feedback", "Method"],
            "thinwire.compress.microbatch": ["Microbatch", "PassKind", "Progress"],
            "thinwire.compress.rules": ["check"],
            "thinwire.compress.stores.store": ["StoreError"],
        },
    )

__all__ = [
    "Codec",
    "CodecError",
    "Coder",
    "ContractError",
    "Decoder",
    "Encoder",
    "Feedback",
    "Key",
    "Method",
    "Microbatch",
    "PassKind",
    "Progress",
    "SlotCounts",
    "StoreError",
    "check",
    "parse",
]
