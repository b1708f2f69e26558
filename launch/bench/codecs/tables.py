"""The results of the bench of codecs as tables, for a terminal and for JSON."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from thinwire.launch.bench.codecs.trial import CodecResult, FeedbackResult, FeedbackSpeed, Speed
from thinwire.launch.shared.tables import Table, Value

OWN = "own: time of the feedback itself, over time of its codec, both ends together"


def shown(name: str, messages: Sequence[Tensor], results: Sequence[CodecResult | FeedbackResult]) -> Table:
    """The results of codecs, or of feedback, on one kind of data, for a terminal."""
    speeds, feedback = results[0].speeds, isinstance(results[0], FeedbackResult)
    acts = ("enc", "dec", "own") if feedback else ("enc", "dec")
    columns = ["feedback" if feedback else "codec", "bits", *([] if feedback else ["x bound", "SNR dB"])]
    columns += [f"{act} {speed.processor}" for speed in speeds for act in acts]
    rows = []
    for one in results:
        if isinstance(one, FeedbackResult):
            row = [one.method, f"{one.bits_per_element:.2f}"]
        else:
            found = one.quality
            noise = "exact" if found.snr_db is None else f"{found.snr_db:.1f}"
            row = [one.codec, f"{found.bits_per_element:.2f}", f"{found.of_entropy:.3f}", noise]
        for speed in one.speeds:
            row += [f"{rate:.2f} {rate / speed.memcpy:3.0%}" for rate in (speed.encode, speed.decode)]
            row += [f"{speed.own:.2f}"] if isinstance(speed, FeedbackSpeed) else []
        rows.append(row)
    shape = "x".join(map(str, messages[0].shape))
    memcpy = ", ".join(f"{speed.memcpy:.1f} GB/s with {speed.processor}" for speed in speeds)
    return Table(f"{name}: {len(messages)} of {shape}; memcpy {memcpy}", columns, rows)


def documented(results: Sequence[CodecResult], feedback: Sequence[FeedbackResult]) -> list[Table]:
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
    found = [
        Table("codecs: bits and noise", ("data", "codec", "bits", "x bound", "SNR, dB"), qualities),
        Table("codecs: speed", ("data", "codec", *speed_columns), speeds, "GB/s of the tensor"),
        Table("feedback", ("data", "feedback", "bits", *speed_columns, "own"), rules, OWN),
    ]
    return [table for table in found if table.rows]


def _cells(speed: Speed) -> list[Value]:
    rates = (speed.encode, speed.decode)
    return [str(speed.processor), *rates, speed.memcpy, *(rate / speed.memcpy for rate in rates)]
