"""What the bench of codecs measures by default: expressions of every kind, Gaussian tensors, and those of recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from thinwire.launch.run import recipe
from thinwire.pipeline.frames import CHANNELS

if TYPE_CHECKING:
    from torch import Tensor

    from thinwire.compress import Codec, Feedback

EXAMPLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "none": ("none",),
        "fp16": ("fp16",),
        "bf16": ("bf16",),
        "fp8": ("fp8",),
        "q": (
            *(f"q({bits})" for bits in (8, 6, 4, 3, 2, 1)),
            'q(4, scale="minmax")',
            'q(4, per="channel")',
            "q(4, group=64)",
            'q(4, round="stochastic")',
            'q(4, rotate="hadamard")',
            "q(4, outliers=0.01)",
            'q(4, clip="mse")',
            'q(2, clip="mse")',
            'q(4, grid="midtread")',
            'q(4, grid="auto", clip="mse")',
        ),
        "nf": ("nf(4)", "nf(3)", "nf(2)", "nf(1)"),
        "topk": ("topk(0.3)", "topk(0.1)", 'topk(0.1, values="fp16")', 'topk(0.1, values="q(8)")', "topk(0.02)"),
        "randk": ("randk(0.1)",),
        "lowrank": ("lowrank(8)",),
    }
)
"""Expressions measured by default, by codec. `reuse` has none, because it needs an activation."""

FEEDBACK_EXAMPLES = ("aqsgd(q(4))", "ef21(q(4))", "ef(topk(0.1))")
"""Feedback measured by default."""

SAMPLES, ROW = 8, 1024
PROG = "thinwire bench codecs"


def default_codecs() -> list[str]:
    """The default expressions of all codecs."""
    from thinwire.compress.expression import CODECS

    return [expression for name in CODECS for expression in EXAMPLES.get(name, ())]


def parse_method(expression: str) -> Codec | Feedback:
    """The codec or feedback of an expression. CodecError if the expression is wrong, or if the codec needs another."""
    import torch

    from thinwire.compress import parse

    method = parse(expression)
    method.codec.nbytes((1, 1), torch.float32)
    return method


def gaussian(elements: int) -> Tensor:
    """Standard normal float32 [8, elements / 8192, 1024]."""
    import torch

    return torch.randn(SAMPLES, elements // (SAMPLES * ROW), ROW, generator=torch.Generator().manual_seed(0))


def captured(names: Sequence[str], steps: int) -> dict[str, list[Tensor]]:
    """The messages of both channels in the last of `steps` steps, for recipes trained without compression.

    A key is the name of the channel. With several recipes, the name of the recipe stands before it.
    """
    from thinwire.launch.shared.capture import capture

    found = {}
    for name in names:
        wanted = recipe.parse([name], prog=PROG)
        passages = capture(wanted, steps)
        for channel in CHANNELS:
            key = f"{wanted.name} {channel}" if len(names) > 1 else channel
            found[key] = [tensor for passage, tensor in passages.items() if passage.channel == channel]
    return found
