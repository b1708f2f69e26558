"""The results of the bench of codecs as tables, for a terminal and for JSON."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from thinwire.launch.bench.codecs.trial import CodecResult, FeedbackResult, Speed
from thinwire.launch.shared import tables
from thinwire.launch.shared.tables import Value

OWN = "own: time of the feedback itself, over time of its codec, both ends together"


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
        tables.Table("feedback", ("data", "feedback", "bits", *speed_columns, "own"), rules, OWN),
    ]
    return [table for table in shown if table.rows]


def _cells(speed: Speed) -> list[Value]:
    rates = (speed.encode, speed.decode)
    return [str(speed.processor), *rates, speed.memcpy, *(rate / speed.memcpy for rate in rates)]
