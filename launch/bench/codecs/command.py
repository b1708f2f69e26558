"""`thinwire bench codecs`: the bits, the noise and the speed of each codec on this machine.

Each codec is measured on Gaussian data, for which theory gives bounds, and on tensors that cross the boundaries of a
recipe, for which it does not.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from thinwire.compress import Codec, Feedback, parse
from thinwire.compress.expression import CODECS
from thinwire.launch.bench.codecs.capture import capture
from thinwire.launch.bench.codecs.page import page
from thinwire.launch.bench.codecs.trial import CodecResult, FeedbackResult, Processor, Speed, measure, measure_feedback
from thinwire.launch.run import recipe
from thinwire.launch.shared import tables
from thinwire.launch.shared.arguments import Parser, at_least_one
from thinwire.launch.shared.environment import cores, environment
from thinwire.launch.shared.exit_codes import OK
from thinwire.launch.shared.tables import Value, document
from thinwire.pipeline.frames import CHANNELS

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
            'q(4, rotate="hadamard")',
            "q(4, outliers=0.01)",
            'q(4, clip="mse")',
            'q(2, clip="mse")',
            'q(4, grid="midtread")',
            'q(4, grid="auto", clip="mse")',
        ),
        "nf": ("nf(4)", "nf(3)", "nf(2)", "nf(1)"),
        "dither": ("dither(4)",),
        "topk": ("topk(0.3)", "topk(0.1)", 'topk(0.1, values="fp16")', 'topk(0.1, values="q(8)")', "topk(0.02)"),
        "randk": ("randk(0.1)",),
        "lowrank": ("lowrank(8)",),
    }
)
"""Expressions measured by default, by codec. `reuse` has none, because it needs an activation."""

FEEDBACK_EXAMPLES = ("aqsgd(q(4))", "ef21(q(4))", "ef(topk(0.1))")
"""Feedback measured by default."""

SAMPLES, ROW = 8, 1024
_OWN = "own: time of the feedback itself, over time of its codec, both ends together"


def default_codecs() -> list[str]:
    """The default expressions of all codecs."""
    return [expression for name in CODECS for expression in EXAMPLES.get(name, ())]


def parse_method(expression: str) -> Codec | Feedback:
    """The codec or feedback of an expression. CodecError if the expression is wrong, or if the codec needs another."""
    method = parse(expression)
    method.codec.nbytes((1, 1), torch.float32)
    return method


def gaussian(elements: int) -> Tensor:
    """Standard normal float32 [8, elements / 8192, 1024]."""
    return torch.randn(SAMPLES, elements // (SAMPLES * ROW), ROW, generator=torch.Generator().manual_seed(0))


def captured(names: Sequence[str], steps: int) -> dict[str, list[Tensor]]:
    """The messages of both channels in the last of `steps` steps, for recipes trained without compression.

    A key is the name of the channel. With several recipes, the name of the recipe stands before it.
    """
    found = {}
    for name in names:
        wanted = recipe.parse([name], prog=PROG)
        passages = capture(wanted, steps)
        for channel in CHANNELS:
            key = f"{wanted.name} {channel}" if len(names) > 1 else channel
            found[key] = [tensor for passage, tensor in passages.items() if passage.channel == channel]
    return found


def heading(name: str, messages: Sequence[Tensor], speeds: Sequence[Speed]) -> str:
    """The heading of the results on one kind of data: the shape of the messages, and the speed of memcpy."""
    shape = "x".join(map(str, messages[0].shape))
    memcpy = ", ".join(f"{speed.memcpy:.1f} GB/s with {speed.processor}" for speed in speeds)
    return f"{name}: {len(messages)} of {shape}; memcpy {memcpy}"


def table(results: Sequence[CodecResult]) -> Table:
    """The results on one kind of data, for a terminal."""
    processors = [speed.processor for speed in results[0].speeds]
    rows = Table(box=SIMPLE_HEAD, padding=0)
    rows.add_column("codec", overflow="fold")
    for header in (
        "bits",
        "x bound",
        "SNR dB",
        *(f"{act}\n{processor}" for processor in processors for act in ("enc", "dec")),
    ):
        rows.add_column(header, justify="right", no_wrap=True)
    for result in results:
        rows.add_row(
            escape(result.codec),
            f"{result.quality.bits_per_element:.2f}",
            f"{result.quality.of_entropy:.3f}",
            "exact" if result.quality.snr_db is None else f"{result.quality.snr_db:.1f}",
            *(
                f"{rate:.2f} {rate / speed.memcpy:3.0%}"
                for speed in result.speeds
                for rate in (speed.encode, speed.decode)
            ),
        )
    return rows


def feedback_table(results: Sequence[FeedbackResult]) -> Table:
    """The results of feedback on one kind of data, for a terminal."""
    rows = Table(box=SIMPLE_HEAD, padding=0)
    rows.add_column("feedback", overflow="fold")
    headers = (f"{act}\n{speed.processor}" for speed in results[0].speeds for act in ("enc", "dec", "own"))
    for header in ("bits", *headers):
        rows.add_column(header, justify="right", no_wrap=True)
    for result in results:
        cells = [
            (
                f"{speed.encode:.2f} {speed.encode / speed.memcpy:3.0%}",
                f"{speed.decode:.2f} {speed.decode / speed.memcpy:3.0%}",
                f"{speed.own:.2f}",
            )
            for speed in result.speeds
        ]
        rows.add_row(escape(result.method), f"{result.bits_per_element:.2f}", *(cell for of in cells for cell in of))
    return rows


def documented(results: Sequence[CodecResult], feedback: Sequence[FeedbackResult]) -> list[tables.Table]:
    """All results with all digits, for JSON: one row for each kind of data (and each processor)."""
    speed_columns = ("with", "encode, GB/s", "decode, GB/s", "memcpy, GB/s", "encode of memcpy", "decode of memcpy")
    qualities: list[list[Value]] = [
        [one.data, one.codec, one.quality.bits_per_element, one.quality.of_entropy, one.quality.snr_db]
        for one in results
    ]
    speeds: list[list[Value]] = [[one.data, one.codec, *_cells(speed)] for one in results for speed in one.speeds]
    rules: list[list[Value]] = [
        [one.data, one.method, one.bits_per_element, *_cells(speed), speed.own]
        for one in feedback
        for speed in one.speeds
    ]
    shown = [
        tables.Table("codecs: bits and noise", ("data", "codec", "bits", "x bound", "SNR, dB"), qualities),
        tables.Table("codecs: speed", ("data", "codec", *speed_columns), speeds, "GB/s of the tensor"),
        tables.Table("feedback", ("data", "feedback", "bits", *speed_columns, "own"), rules, _OWN),
    ]
    return [table for table in shown if table.rows]


def _cells(speed: Speed) -> list[Value]:
    rates = (speed.encode, speed.decode)
    return [str(speed.processor), *rates, speed.memcpy, *(rate / speed.memcpy for rate in rates)]


def main(argv: Sequence[str]) -> int:
    """Measure codecs, print tables or JSON, and return the exit status."""
    options = _options(argv)
    wanted = options.codec or [*default_codecs(), *FEEDBACK_EXAMPLES]
    methods = [parse_method(expression) for expression in wanted]
    codecs = [method.codec for method in methods if method.feedback is None]
    rules = [method.feedback for method in methods if method.feedback is not None]
    found = environment(shlex.join([*PROG.split(), *argv]))
    aside = Console(stderr=True)
    with aside.status(f"training {' and '.join(options.recipe)} for a moment, to capture tensors"):
        data = {"gaussian": [gaussian(options.elements)], **captured(options.recipe, options.steps)}
    aside.print(f"measuring {len(codecs)} codecs, and feedback around {len(rules)}")
    results = measure(codecs, data, _processors(options.threads), options.rounds)
    feedback = measure_feedback(rules, data, _processors(options.threads), options.rounds)
    if options.json:
        told = document("bench of codecs", documented(results, feedback), **found)
        print(json.dumps(told, indent=2, allow_nan=False))
        return OK
    if options.markdown:
        print(page(found, results, feedback))
        return OK
    console, machine = Console(), found["machine"]
    console.print(f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']:.1f}; torch {found['torch']}")
    for name, messages in data.items():
        of_data = [result for result in results if result.data == name]
        of_feedback = [result for result in feedback if result.data == name]
        if of_data or of_feedback:
            speeds = (of_data or of_feedback)[0].speeds
            console.print(heading(name, messages, speeds), highlight=False, soft_wrap=True)
        if of_data:
            console.print(table(of_data))
        if of_feedback:
            console.print(feedback_table(of_feedback))
    console.print("enc, dec: GB/s of the tensor, and share of memcpy; x bound: bytes over the entropy bound")
    if rules:
        console.print(_OWN)
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
    form.add_argument("--markdown", action="store_true", help="print the tables of docs/measured/bench-codecs.md")
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


def _processors(threads: Sequence[int]) -> list[Processor]:
    gpu = [Processor(device="cuda")] if torch.cuda.is_available() else []
    return [*(Processor(device="cpu", threads=count) for count in threads), *gpu]
