"""`thinwire bench codecs`: the bits, the noise and the speed of each codec on this machine, on Gaussian data.

What a codec costs a model is the loss that a run prints with compression on and off, before training and in it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from thinwire.launch.shared.arguments import Parser, at_least_one
from thinwire.launch.shared.environment import environment
from thinwire.launch.shared.exit_codes import OK
from thinwire.launch.shared.progress import showing
from thinwire.launch.shared.strict_json import dumps
from thinwire.launch.shared.tables import document, show
from thinwire.pipeline.errors import OptionsError

if TYPE_CHECKING:
    from torch import Tensor

    from thinwire.compress import Method

PROG = "thinwire bench codecs"

EXAMPLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "none": ("none",),
        "fp16": ("fp16",),
        "bf16": ("bf16",),
        "fp8": ("fp8",),
        "q": (
            "q(8, step=0.2)",
            *(f"q({bits})" for bits in (8, 6, 4, 3, 2, 1)),
            'q(4, scale="minmax")',
            'q(4, per="channel")',
            "q(4, group=64)",
            'q(4, round="stochastic")',
            'q(4, grid="midtread")',
        ),
        "topk": ("topk(0.3)", "topk(0.1)", 'topk(0.1, values="fp16")', 'topk(0.1, values="q(8)")', "topk(0.02)"),
        "randk": ("randk(0.1)",),
    }
)
"""Expressions measured by default, by codec. `reuse` has none, because it needs an activation."""

FEEDBACK_EXAMPLES = ("aqsgd(q(4))", "ef21(q(4))", "ef(topk(0.1))")
"""Feedback measured by default."""

SAMPLES, ROW = 8, 1024


def main(argv: Sequence[str]) -> int:
    """Measure codecs, print a table or JSON, and return the exit status."""
    options = make_parser().parse_args(argv)
    OptionsError.require(
        (
            options.elements % (SAMPLES * ROW) == 0,
            f"--elements must be a multiple of {SAMPLES * ROW} ({SAMPLES} samples with rows of {ROW}), "
            f"got {options.elements}",
        )
    )
    methods = [parse_method(expression) for expression in options.codec or [*default_codecs(), *FEEDBACK_EXAMPLES]]
    found = environment(shlex.join([*PROG.split(), *argv]))
    from thinwire.launch.bench.codecs.trial import measure

    with showing(f"measuring {len(methods)} codecs"):
        table = measure(methods, [gaussian(options.elements)], options.threads, options.rounds)
    if options.json:
        print(dumps(document("bench of codecs", [table], **found), indent=2))
    else:
        show([table])
    return OK


def make_parser() -> Parser:
    """The options of the bench."""
    parser = Parser(prog=PROG, description="Measure codecs on Gaussian data.")
    add = parser.add_argument
    add(
        "--codec",
        nargs="+",
        action="extend",
        metavar="EXPR",
        help="codecs, or feedback around codecs (default: some of every kind)",
    )
    add("--threads", type=at_least_one, default=1, metavar="N", help="CPU threads (default: %(default)s)")
    add("--elements", type=at_least_one, default=2**20, help="elements of the Gaussian tensor (default: %(default)s)")
    add(
        "--rounds",
        type=at_least_one,
        default=9,
        help="rounds of measurement; a result is their median (default: %(default)s)",
    )
    add("--json", action="store_true", help="print JSON")
    return parser


def default_codecs() -> list[str]:
    """The default expressions of all codecs."""
    from thinwire.compress.expression import CODECS

    return [expression for name in CODECS for expression in EXAMPLES.get(name, ())]


def parse_method(expression: str) -> Method:
    """The codec or feedback of an expression. CodecError if it is wrong, or what it says cannot be measured here."""
    import torch

    from thinwire.compress import CodecError, parse

    method = parse(expression)
    if method.feedback is not None and method.feedback.store != "memory":
        raise CodecError(f"{PROG} measures buffers in the host's memory, got {method}; drop store")
    method.codec.nbytes((1, 1), torch.float32)
    return method


def gaussian(elements: int) -> Tensor:
    """Standard normal float32 [8, elements / 8192, 1024]."""
    import torch

    return torch.randn(SAMPLES, elements // (SAMPLES * ROW), ROW, generator=torch.Generator().manual_seed(0))
