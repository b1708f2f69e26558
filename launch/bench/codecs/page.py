"""The tables of docs/measured/bench-codecs.md as Markdown, so that a run on another machine can replace them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from thinwire.launch.bench.codecs.trial import CodecResult, FeedbackResult, Processor, Speed


def page(found: Mapping[str, Any], results: Sequence[CodecResult], feedback: Sequence[FeedbackResult]) -> str:
    """The results as Markdown: the machine, the quality of each codec, and its speed on each processor."""
    parts = [_rows(_environment(found))]
    if results:
        parts.append(_rows(_qualities(results)))
    for processor in (speed.processor for speed in (results or feedback)[0].speeds):
        parts.append(f"With {processor}:")
        for measured in (results, feedback):
            if any(speed.processor == processor for result in measured for speed in result.speeds):
                parts.append(_rows(_speeds(measured, processor)))
    return "\n\n".join(parts)


def _environment(found: Mapping[str, Any]) -> Iterator[list[str]]:
    machine = found["machine"]
    yield ["", ""]
    yield ["command", f"`{found['command']}`"]
    yield ["machine", f"{machine['cpu']}, {machine['cores']} cores"]
    yield ["load before", f"{machine['load']:.1f}"]
    yield ["software", f"torch {found['torch']}, Python {found['python']}, {machine['system']}"]
    yield ["GPU", machine["gpu"] or "none"]


def _qualities(results: Sequence[CodecResult]) -> Iterator[list[str]]:
    by_codec = _grouped(results)
    data = list(dict.fromkeys(result.data for result in results))
    yield ["codec", "bits", "x bound", *(f"SNR, dB: {name}" for name in data)]
    for codec, found in by_codec.items():
        first = found[data[0]].quality
        bound = f"{first.of_entropy:.3f}"
        noise = [found[name].quality.snr_db for name in data]
        yield [
            f"`{codec}`",
            f"{first.bits_per_element:.2f}",
            bound,
            *("exact" if snr is None else f"{snr:.1f}" for snr in noise),
        ]


def _speeds(measured: Sequence[CodecResult] | Sequence[FeedbackResult], processor: Processor) -> Iterator[list[str]]:
    data = list(dict.fromkeys(result.data for result in measured))
    columns = ["encode", "decode", *(["own"] if isinstance(measured[0], FeedbackResult) else [])]
    yield ["GB/s", *(f"{name}: {column}" for name in data for column in columns)]
    for method, found in _grouped(measured).items():
        cells = (_cells(found[name], processor) if name in found else [""] * len(columns) for name in data)
        yield [f"`{method}`", *(cell for of_data in cells for cell in of_data)]
    firsts = (next(result for result in measured if result.data == name) for name in data)
    memcpy = ([f"{_at(first, processor).memcpy:.1f}", *[""] * (len(columns) - 1)] for first in firsts)
    yield ["memcpy", *(cell for of_data in memcpy for cell in of_data)]


def _cells(result: CodecResult | FeedbackResult, processor: Processor) -> list[str]:
    speed = _at(result, processor)
    rates = [f"{rate:.2f} ({rate / speed.memcpy:.0%})" for rate in (speed.encode, speed.decode)]
    if isinstance(result, FeedbackResult):
        rates += [f"{found.own:.2f}" for found in result.speeds if found.processor == processor]
    return rates


def _at(result: CodecResult | FeedbackResult, processor: Processor) -> Speed:
    return next(speed for speed in result.speeds if speed.processor == processor)


def _grouped(
    measured: Sequence[CodecResult] | Sequence[FeedbackResult],
) -> dict[str, dict[str, Any]]:
    """Results by method, then by data."""
    grouped: dict[str, dict[str, Any]] = {}
    for result in measured:
        method = result.method if isinstance(result, FeedbackResult) else result.codec
        grouped.setdefault(method, {})[result.data] = result
    return grouped


def _rows(rows: Iterable[Sequence[str]]) -> str:
    header, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([header, "|" + "---|" * (header.count(" | ") + 1), *others])
