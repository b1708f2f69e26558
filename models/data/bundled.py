"""Data that needs no download: Python's documentation, and scikit-learn's digits."""

from __future__ import annotations

import numpy as np
import torch

from thinwire.models.data.parts import Columns, Conversation, Labelled, Part, require_no_split
from thinwire.models.errors import ModelError

_PARAGRAPH = 40
"""A paragraph has at least this many characters."""


def read_topics(part: Part, columns: Columns) -> list[str]:
    """The topics of Python's documentation.

    Releases of Python differ in their documentation, so all machines of a run need the same release.
    """
    from pydoc_data.topics import topics

    require_no_split(part)
    return [topics[topic] for topic in sorted(topics)]


def read_halves(part: Part, columns: Columns) -> Labelled:
    """The paragraphs of Python's documentation, each as a pair of halves. Every other pair is swapped (label 0)."""
    halves = _halves(part)
    labels = torch.arange(len(halves)) % 2
    examples = [pair if label else pair[::-1] for pair, label in zip(halves, labels.tolist(), strict=True)]
    return Labelled(examples, labels, 2)


def read_paragraphs(part: Part, columns: Columns) -> list[Conversation]:
    """The paragraphs of Python's documentation: one half is asked for with the other."""
    asked = "Continue this paragraph of Python's documentation:\n\n"
    return [
        Conversation([{"role": "user", "content": asked + begin}, {"role": "assistant", "content": rest}])
        for begin, rest in _halves(part)
        if len(rest) >= _PARAGRAPH
    ]


def _halves(part: Part) -> list[tuple[str, str]]:
    """The two halves of each paragraph of Python's documentation."""
    from pydoc_data.topics import topics

    require_no_split(part)
    paragraphs = [" ".join(part.split()) for name in sorted(topics) for part in topics[name].split("\n\n")]
    long = (paragraph.split(" ") for paragraph in dict.fromkeys(paragraphs) if len(paragraph) >= _PARAGRAPH)
    return [(" ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])) for words in long]


def read_digits(part: Part, columns: Columns) -> Labelled:
    """1797 handwritten digits of 8 x 8 pixels."""
    require_no_split(part)
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ModelError("'digits' needs scikit-learn: pip install 'thinwire[digits]'") from error
    digits = load_digits()
    pixels = (digits.images * (255 / 16)).round().astype(np.uint8)  # stored as 0..16
    return Labelled(list(pixels), torch.from_numpy(digits.target).long(), 10)
