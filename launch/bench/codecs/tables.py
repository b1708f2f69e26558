"""The results of the bench of codecs as tables: for a terminal, for Markdown and for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from thinwire.launch.bench.codecs.trial import CodecResult, FeedbackResult, FeedbackSpeed
from thinwire.launch.shared.tables import Table

CODECS = "enc, dec: GB/s of the tensor, and share of memcpy; x bound: bytes over the entropy bound"
OWN = "own: time of the feedback itself, over time of its codec, both ends together"


def tables(
    data: Mapping[str, Sequence[Tensor]], codecs: Sequence[CodecResult], feedback: Sequence[FeedbackResult]
) -> list[Table]:
    """For each kind of data a table of the codecs and one of the feedback that were measured on it."""
    return [
        _table(name, messages, of_data)
        for name, messages in data.items()
        for measured in (codecs, feedback)
        if (of_data := [result for result in measured if result.data == name])
    ]


def _table(name: str, messages: Sequence[Tensor], results: Sequence[CodecResult | FeedbackResult]) -> Table:
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
    return Table(f"{name}: {len(messages)} of {shape}; memcpy {memcpy}", columns, rows, OWN if feedback else CODECS)
