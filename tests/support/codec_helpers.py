"""What tests of codecs share."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.compress import Codec, CodecError, Key, parse

KEY = Key(seed=1, boundary=0, channel="activations", phase="train", step=2, microbatch=3)
FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = (
    (),
    (1,),
    (7,),
    (3, 5),
    (2, 3, 4),
    (2, 3, 4, 5),
    (2, 3, 1, 4, 2),
    (64 * 1024 + 1,),
    (0,),
    (3, 0),
    (2, 0, 4, 5),
)
few = settings(max_examples=100)
shapes = st.one_of(st.sampled_from(SHAPES), st.lists(st.integers(0, 9), max_size=5).map(tuple))


EXPRESSIONS = (
    "none",
    "fp16",
    "bf16",
    "q(1)",
    'q(2, grid="midrise")',
    'q(3, grid="midrise")',
    'q(4, grid="midrise")',
    'q(5, grid="midrise")',
    'q(6, grid="midrise")',
    'q(7, grid="midrise")',
    'q(8, grid="midrise")',
    'q(4, per="tensor", grid="midrise")',
    'q(4, per="sample", grid="midrise")',
    'q(3, per="channel", grid="midrise")',
    'q(4, group=64, grid="midrise")',
    'q(4, round="stochastic")',
    'q(1, group=3, round="stochastic")',
    'q(8, per="tensor", round="stochastic")',
    'q(1, scale="minmax")',
    'q(2, scale="minmax", per="tensor")',
    'q(5, scale="minmax", per="sample")',
    'q(8, scale="minmax", per="channel")',
    'q(3, scale="minmax", group=5)',
    'q(4, scale="minmax", round="stochastic")',
    'q(8, scale="minmax", per="tensor", round="stochastic")',
    'q(4, per="channel", grid="midrise")',
    'q(5, group=64, grid="midrise")',
    'q(1, grid="midtread")',
    "q(4)",
    'q(8, per="tensor")',
    "fp8",
    'fp8(per="channel")',
    "fp8(group=7)",
)
"""Codecs that send every element."""


def gaussian(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (noise * scale).to(dtype)


def encode(codec: Codec | str, x: Tensor, key: Key = KEY) -> Tensor:
    codec = parse(codec) if isinstance(codec, str) else codec
    payload = torch.full((codec.nbytes(x.shape, x.dtype),), 0xA5, dtype=torch.uint8)
    codec.encode(x, payload, key)
    return payload


def decode(codec: Codec | str, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, key: Key = KEY) -> Tensor:
    codec = parse(codec) if isinstance(codec, str) else codec
    out = torch.full(tuple(shape), 77, dtype=dtype)
    codec.decode(payload, out, key)
    return out


def roundtrip(codec: Codec | str, x: Tensor, key: Key = KEY) -> Tensor:
    return decode(codec, encode(codec, x, key), x.shape, x.dtype, key)


def said_by(expression: str) -> str:
    """The sentence with which an expression is refused; the test fails if it is not."""
    with pytest.raises(CodecError) as error:
        parse(expression)
    return str(error.value)


def snr_db(x: Tensor, y: Tensor) -> float:
    """The signal-to-noise ratio of `y` as a version of `x`, in decibels."""
    return 10 * torch.log10(x.double().square().sum() / (x.double() - y.double()).square().sum()).item()


def assert_identical(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def entropy(symbols):
    """The least bits for symbols with any code that looks at one at a time."""
    shares = symbols.unique(return_counts=True)[1].double() / len(symbols)
    return -len(symbols) * float((shares * shares.log2()).sum())
