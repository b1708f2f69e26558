"""`thinwire bench codecs`: the bits, the noise and the speed of each codec on this machine.

Each codec is measured on Gaussian data, for which theory gives bounds, and on tensors that cross the boundaries of a
recipe, for which it does not.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import TYPE_CHECKING

from thinwire.launch.run import recipe
from thinwire.launch.shared.arguments import Parser, at_least_one
from thinwire.launch.shared.control_groups import cores
from thinwire.launch.shared.environment import environment
from thinwire.launch.shared.exit_codes import OK
from thinwire.launch.shared.strict_json import dumps
from thinwire.launch.shared.tables import document, show
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.frames import CHANNELS

if TYPE_CHECKING:
    from torch import Tensor

    from thinwire.compress import Codec, Feedback

PROG = "thinwire bench codecs"

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
            "q(4, outliers=0.01)",
            'q(4, clip="mse")',
            'q(2, clip="mse")',
            'q(4, grid="midtread")',
        ),
        "topk": ("topk(0.3)", "topk(0.1)", 'topk(0.1, values="fp16")', 'topk(0.1, values="q(8)")', "topk(0.02)"),
        "randk": ("randk(0.1)",),
        "lowrank": ("lowrank(8)",),
    }
)
"""Expressions measured by default, by codec. `reuse` has none, because it needs an activation."""

FEEDBACK_EXAMPLES = ("aqsgd(q(4))", "ef21(q(4))", "ef(topk(0.1))")
"""Feedback measured by default."""

SAMPLES, ROW = 8, 1024


def main(argv: Sequence[str]) -> int:
    """Measure codecs, print tables or JSON, and return the exit status."""
    options = _options(argv)
    for name in options.recipe:
        replicas = recipe.parse([name], prog=PROG).replicas.count  # finds mistakes before the long imports
        known = f"{PROG} knows one pipeline only, and replicas.count is {replicas}; add --replicas.count 1"
        OptionsError.require((replicas == 1, known))
    from rich.console import Console

    from thinwire.launch.bench.codecs.trial import measure, processors, tables

    wanted = options.codec or [*default_codecs(), *FEEDBACK_EXAMPLES]
    methods = [parse_method(expression) for expression in wanted]
    codecs = [method.codec for method in methods if method.feedback is None]
    rules = [method.feedback for method in methods if method.feedback is not None]
    found = environment(shlex.join([*PROG.split(), *argv]))
    aside = Console(stderr=True)
    with aside.status(f"training {' and '.join(options.recipe)} for a moment, to capture tensors"):
        data = {"gaussian": [gaussian(options.elements)], **captured(options.recipe, options.steps)}
    aside.print(f"measuring {len(codecs)} codecs, and feedback around {len(rules)}")
    results, feedback = measure(codecs, rules, data, processors(options.threads), options.rounds)
    shown, machine = tables(data, results, feedback), found["machine"]
    where = f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']:.1f}; torch {found['torch']}"
    if options.json:
        measured = {"codecs": [*map(asdict, results)], "feedback": [*map(asdict, feedback)]}
        print(dumps(document("bench of codecs", shown, **found, **measured), indent=2))
    elif options.markdown:
        print("\n\n".join([f"`{found['command']}`: {where}", *(table.markdown for table in shown)]))
    else:
        Console().print(where)
        show(shown, notes=False)
        Console().print(*dict.fromkeys(table.note for table in shown), sep="\n")
    return OK


def make_parser() -> Parser:
    """The options of the bench."""
    parser = Parser(prog=PROG, description="Measure codecs on Gaussian data and on the tensors that a recipe sends.")
    add = parser.add_argument
    add(
        "--codec",
        nargs="+",
        action="extend",
        metavar="EXPR",
        help="codecs, or feedback around codecs (default: some of every kind)",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    add(
        "--threads",
        type=_thread_counts,
        default="1,all",
        help="numbers of CPU threads to measure with (default: %(default)s)",
    )
    add("--elements", type=at_least_one, default=2**20, help="elements of the Gaussian tensor (default: %(default)s)")
    add(
        "--recipe",
        nargs="+",
        default=["quickstart"],
        help="recipes that give tensors to measure on (default: quickstart)",
    )
    add(
        "--steps",
        type=at_least_one,
        default=40,
        help="training steps of the recipe before its tensors are captured (default: %(default)s)",
    )
    add(
        "--rounds",
        type=at_least_one,
        default=9,
        help="rounds of measurement; a result is their median (default: %(default)s)",
    )
    return parser


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.elements % (SAMPLES * ROW):
        parser.error(
            f"--elements must be a multiple of {SAMPLES * ROW} ({SAMPLES} samples with rows of {ROW}), "
            f"got {options.elements}"
        )
    return options


def _thread_counts(text: str) -> list[int]:
    counts = [cores() if part == "all" else at_least_one(part) for part in text.split(",")]
    return list(dict.fromkeys(counts))


def default_codecs() -> list[str]:
    """The default expressions of all codecs."""
    from thinwire.compress.expression import CODECS

    return [expression for name in CODECS for expression in EXAMPLES.get(name, ())]


def parse_method(expression: str) -> Codec | Feedback:
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


def captured(names: Sequence[str], steps: int) -> dict[str, list[Tensor]]:
    """The messages of both channels in the last of `steps` steps, for recipes trained without compression.

    A key is the name of the channel. With several recipes, the name of the recipe stands before it.
    """
    from thinwire.launch.bench.codecs.capture import snapshots

    found = {}
    for name in names:
        wanted = recipe.parse([name], prog=PROG)
        passages = snapshots(wanted, [steps])[steps]
        for channel in CHANNELS:
            key = f"{wanted.name} {channel}" if len(names) > 1 else channel
            found[key] = [tensor for passage, tensor in passages.items() if passage.channel == channel]
    return found
