"""Text as fixed blocks of bytes, numbered: a sample is a block, and its id means the same text in every epoch.

Feedback kept per sample (AQ-SGD) needs samples that come back. Random windows, the usual way to feed a language model,
never do.

Tensor names end in their shape: B samples, T tokens.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from thinwire.models.errors import ModelError, require

PYDOC = "pydoc"


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which text is trained on, and how it is cut into samples."""

    text: str = PYDOC
    """A file, read as bytes, or "pydoc" for the documentation that comes with Python, half a megabyte of English."""
    limit: int | None = None
    """How many bytes of the text are used, from its start; null uses all."""
    block_size: int = 128
    """The tokens of one sample."""
    held_out: float = 0.1
    """The fraction of the text, at its end, that is kept for evaluation; 0 keeps none."""

    def __post_init__(self) -> None:
        require(
            (bool(self.text), f"text must name a file, or be {PYDOC!r}, got ''"),
            (self.limit is None or self.limit >= 1, f"limit must be at least 1 byte, got {self.limit}"),
            (self.block_size >= 1, _rule_block_size(self.block_size)),
            (0 <= self.held_out < 1, _rule_held_out(self.held_out)),
        )


class TextBlocks:
    """A text in non-overlapping blocks of `block_size` bytes; id i is the block from byte i * block_size on.

    The target of a token is the one after it, so the last block must have a byte behind it. What is left is dropped.
    """

    def __init__(self, text: bytes | str, block_size: int) -> None:
        data = text.encode() if isinstance(text, str) else text
        require(
            (block_size >= 1, _rule_block_size(block_size)),
            (
                len(data) > block_size,
                f"a text must be at least one byte longer than a block of {block_size}, got {len(data)} bytes",
            ),
        )
        self.block_size = block_size
        self.tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.block_size

    @property
    def digest(self) -> str:
        """The SHA-256 of the text in hex, for stages that must make sure they read the same one."""
        return hashlib.sha256(self.tokens.numpy().data).hexdigest()

    def inputs(self, ids: Tensor) -> Tensor:
        """Return the tokens [B, T] of blocks `ids` [B], as int64."""
        return self._blocks(ids, shift=0)

    def targets(self, ids: Tensor) -> Tensor:
        """Return the token after each of `inputs(ids)`, [B, T], as int64."""
        return self._blocks(ids, shift=1)

    def _blocks(self, ids: Tensor, shift: int) -> Tensor:
        tokens = self.tokens[shift : shift + len(self) * self.block_size]
        return tokens.view(len(self), self.block_size)[ids].long()


def load_text(source: str) -> bytes:
    """Return the bytes of a file, or, for "pydoc", of Python's documentation topics in the order of their names.

    Two releases of Python have slightly different topics: compare `TextBlocks.digest` where several machines train.

    Raises:
        ModelError: if the file cannot be read.
    """
    if source == PYDOC:
        from pydoc_data.topics import topics

        return "".join(topics[topic] for topic in sorted(topics)).encode()
    try:
        return Path(source).read_bytes()
    except OSError as error:
        reason = error.strerror or error
        raise ModelError(f"text must name a readable file, or be {PYDOC!r}, got {source!r}: {reason}") from error


def split(text: bytes, held_out: float) -> tuple[bytes, bytes]:
    """Return the text to train on, and its last `held_out` fraction, for evaluation."""
    require((0 <= held_out < 1, _rule_held_out(held_out)))
    cut = len(text) - round(len(text) * held_out)
    return text[:cut], text[cut:]


def load_blocks(options: DataOptions) -> tuple[TextBlocks, TextBlocks | None]:
    """Read the text and return its blocks for training and for evaluation (None where nothing is held out).

    Raises:
        ModelError: if the text cannot be read, or is too short for a block in either part.
    """
    training, evaluation = split(load_text(options.text)[: options.limit], options.held_out)
    required = options.block_size + 1
    require(
        (len(training) >= required, f"the training text must have {required} bytes or more, got {len(training)}"),
        (
            options.held_out == 0 or len(evaluation) >= required,
            f"the held-out text must have {required} bytes or more, got {len(evaluation)}; raise held_out",
        ),
    )
    held_out = TextBlocks(evaluation, options.block_size) if options.held_out else None
    return TextBlocks(training, options.block_size), held_out


def check_vocabulary(blocks: TextBlocks, vocab_size: int) -> None:
    """Raise `ModelError` if the text has a token that a model of this vocabulary cannot read or predict."""
    largest = int(blocks.tokens.max())
    require((largest < vocab_size, f"vocab_size must be above the text's largest token {largest}, got {vocab_size}"))


def _rule_block_size(got: int) -> str:
    return f"block_size must be at least 1, got {got}"


def _rule_held_out(got: float) -> str:
    return f"held_out must lie in [0, 1), got {got}"
