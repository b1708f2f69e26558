"""The output of `thinwire predict`: answers as tables or JSON, and the published tables beside their prediction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from thinwire.launch.predict.answer import Answer
from thinwire.launch.shared import tables
from thinwire.launch.shared.strict_json import dumps
from thinwire.launch.shared.tables import document
from thinwire.launch.timing import published
from thinwire.launch.timing.exchange import ReplicaWork
from thinwire.launch.timing.network import Network
from thinwire.launch.timing.prediction import (
    HIDDEN,
    Prediction,
    bandwidth_text,
    hides_in_words,
)
from thinwire.launch.timing.workload import Workload
from thinwire.pipeline.schedules import SCHEDULES


def show(found: Answer, network: Network, max_in_flight: float) -> None:
    """Print an answer as tables.

    Args:
        found: the answer.
        network: one of those that it compares.
        max_in_flight: the number of micro-batches that fit in the memory of a process.
    """
    console, workload = Console(), found.workload
    times = ", ".join(
        f"{1e3 * forth:.3g}+{1e3 * back:.3g}" for forth, back in zip(workload.forward, workload.backward, strict=True)
    )
    console.print(
        f"{workload.name}: {workload.num_stages} stages, {workload.num_microbatches} micro-batches of "
        f"{workload.microbatch_size}; forward+backward ms a stage: {times}",
        highlight=False,
        soft_wrap=True,
    )
    if workload.replicas:
        console.print(_replicas_in_words(workload.replicas, found.predictions[0]), highlight=False, soft_wrap=True)
    console.print(_throughput_table(found.predictions))
    for codec, bandwidth in found.needed.items():
        console.print(f"{escape(codec)} {hides_in_words(bandwidth, network)}", highlight=False, soft_wrap=True)
    for sentence in found.verdicts:
        console.print(escape(sentence), highlight=False, soft_wrap=True)
    console.print(_stages_table(found.predictions))
    console.print(_schedules_table(found.schedules))
    limit = "" if math.isinf(max_in_flight) else f" with at most {max_in_flight:g} micro-batches in memory"
    if found.best is None:
        console.print(f"no schedule can run{limit}; raise --max-in-flight")
    else:
        at = bandwidth_text(found.best.bandwidth)
        console.print(
            f"best{limit} at {at}: {found.best.schedule} with {escape(found.best.codec)}, "
            f"{found.best.samples_per_second:.3g} samples/s, {found.best.in_flight:g} micro-batches in memory",
            highlight=False,
            soft_wrap=True,
        )
        if found.best.schedule != found.predictions[0].schedule:
            console.print(f"its options: {_options_of(found.best, workload)}", highlight=False, soft_wrap=True)


def _options_of(one: Prediction, workload: Workload) -> str:
    """The options of a recipe that choose a prediction's schedule, on as many processes."""
    each = SCHEDULES[one.schedule].stages_per_process
    cut = f" --pipeline.num_stages {workload.num_stages * each} --pipeline.stages_per_process {each}" * (each > 1)
    layers = " --pipeline.layers null" * (each > 1)  # a list of the recipe is for as many stages as it has now
    return f"--pipeline.schedule {one.schedule}{cut}{layers}"


def _replicas_in_words(replicas: ReplicaWork, prediction: Prediction) -> str:
    """What the replicas exchange, and what the columns of the exchange mean."""
    every = prediction.exchange.every if prediction.exchange else 1
    weights = ", ".join(f"{count / 1e6:.3g}" for count in replicas.elements)
    return (
        f"{replicas.count} replicas; millions of weights a process: {weights}. MB: what a process sends to its "
        f"replicas in an exchange. adds: what the drain of the pipeline does not hide. if rarely: samples/s if they "
        f"exchange every {every} steps"
    )


def _throughput_table(predictions: Sequence[Prediction]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=0, title="samples/s", title_justify="left")
    table.add_column("link", no_wrap=True)
    table.add_column("codec", overflow="fold")
    replicas = any(one.exchange for one in predictions)
    for header in ("samples/s", "x none", "of full", "step s", *_EXCHANGE_COLUMNS * replicas):
        table.add_column(header, justify="right", no_wrap=True)
    for one in predictions:
        table.add_row(
            bandwidth_text(one.bandwidth),
            escape(one.codec),
            f"{one.samples_per_second:.3g}",
            f"{one.speedup:.2f}",
            f"{one.of_unthrottled:.0%}",
            f"{one.seconds:.4g}",
            *(f"{number:.3g}" for number in _exchanged(one)),
        )
    return table


_EXCHANGE_COLUMNS = ("MB", "exchange s", "adds s", "if rarely")
"""What an exchange sends, how long it takes, what it adds to a step, and samples/s if it comes every few steps."""


def _exchanged(one: Prediction) -> tuple[float, ...]:
    """The cells of `_EXCHANGE_COLUMNS`; none without replicas."""
    exchange = one.exchange
    if exchange is None:
        return ()
    return exchange.nbytes / 1e6, exchange.seconds, exchange.adds, exchange.samples_per_second_every


def _stages_table(predictions: Sequence[Prediction]) -> Table:
    """Where the time of each stage goes in a step, at the lowest bandwidth."""
    slowest = min(one.bandwidth for one in predictions)
    adds = " / the exchange adds" if any(one.exchange for one in predictions) else ""
    title = f"% of the step that each stage is busy / waits for the wire / is idle{adds}, at {bandwidth_text(slowest)}"
    shown = [one for one in predictions if one.bandwidth == slowest]
    table = Table(box=SIMPLE_HEAD, padding=0, title=title, title_justify="left")
    table.add_column("stage", no_wrap=True)
    for one in shown:
        table.add_column(escape(one.codec), justify="right", overflow="fold")
    for stage in range(len(shown[0].busy)):
        table.add_row(str(stage), *(_shares(one, stage) for one in shown))
    return table


def _shares(one: Prediction, stage: int) -> str:
    """Percentages of a step: in all its passes busy, waiting and idle; with replicas, what the exchange adds."""
    spent = [one.passes * part[stage] for part in (one.busy, one.wait, one.bubble)]
    spent += [one.exchange.adds] if one.exchange else []
    return "/".join(f"{100 * seconds / one.seconds:.0f}" for seconds in spent)


def _schedules_table(predictions: Sequence[Prediction]) -> Table:
    """Every schedule with every codec, at one bandwidth."""
    codecs = list(dict.fromkeys(one.codec for one in predictions))
    title = f"samples/s of every schedule at {bandwidth_text(predictions[0].bandwidth)}"
    table = Table(box=SIMPLE_HEAD, padding=0, title=title, title_justify="left")
    table.add_column("schedule", no_wrap=True)
    table.add_column("held", justify="right")
    for codec in codecs:
        table.add_column(escape(codec), justify="right", overflow="fold")
    for name in dict.fromkeys(one.schedule for one in predictions):
        row = [one for one in predictions if one.schedule == name]
        table.add_row(name, f"{row[0].in_flight:g}", *(f"{one.samples_per_second:.3g}" for one in row))
    return table


def as_json(found: Answer) -> dict[str, Any]:
    """An answer as a document of tables, with all numbers beside them.

    null means unlimited (`bandwidth`), never enough (`needed_bandwidth`), or no schedule (`best`).
    """
    workload = found.workload
    everything = {
        "workload": {
            "name": workload.name,
            "num_stages": workload.num_stages,
            "num_microbatches": workload.num_microbatches,
            "microbatch_size": workload.microbatch_size,
            "replicas": None if workload.replicas is None else asdict(workload.replicas),
            "forward": workload.forward,
            "backward": workload.backward,
            "codec_seconds": [
                {"channel": channel, "codec": codec, **asdict(cost)}
                for (channel, codec), cost in workload.costs.items()
            ],
        },
        "predictions": [_finite(one) for one in found.predictions],
        "needed_bandwidth": {codec: _number(bandwidth) for codec, bandwidth in found.needed.items()},
        "schedules": [_finite(one) for one in found.schedules],
        "best": None if found.best is None else _finite(found.best),
        "verdicts": found.verdicts,
    }
    return document(f"prediction of {workload.name}", _documented(found), **everything)


def _documented(found: Answer) -> list[tables.Table]:
    between = (*_EXCHANGE_COLUMNS,) if found.workload.replicas else ()
    columns = ("link", "schedule", "codec", "samples/s", "x none", "of full", "s a step", "held", *between)
    speeds, schedules = (list(map(_cells, predictions)) for predictions in (found.predictions, found.schedules))
    needed = [(codec, _number(1e-6 * bandwidth)) for codec, bandwidth in found.needed.items()]
    return [
        tables.Table("predicted speed", columns, speeds, "; ".join(found.verdicts)),
        tables.Table(
            f"the least bandwidth that hides the wire ({HIDDEN:.0%} of full speed)", ("codec", "Mbit/s"), needed
        ),
        tables.Table("every schedule on the slowest link", columns, schedules),
    ]


def _cells(one: Prediction) -> list[tables.Value]:
    """A prediction as a row of a documented table."""
    return [
        *(bandwidth_text(one.bandwidth), one.schedule, one.codec, one.samples_per_second),
        *(one.speedup, one.of_unthrottled, one.seconds, one.in_flight),
        *_exchanged(one),
    ]


def _finite(one: Prediction) -> dict[str, Any]:
    return {**asdict(one), "bandwidth": _number(one.bandwidth)}


def _number(value: float) -> float | None:
    """The number, or None (null in JSON) for infinity."""
    return value if math.isfinite(value) else None


def show_published(as_data: bool) -> None:
    """Print Tables 2 and 3 of 2206.01299 beside the prediction, as tables or as JSON."""
    compared = {
        "Table 2, sequences/s": published.throughput_numbers(),
        "Table 2, share of the speed at 10 Gbps": published.share_numbers(),
        "Table 3, ms on the wire": published.wire_numbers(),
    }
    if as_data:
        shown = [
            tables.Table(
                f"2206.01299, {title}",
                ("Mbit/s", "method", "published", "predicted", "deviation"),
                [
                    (1e-6 * one.bandwidth, one.method, one.published, one.predicted, one.deviation)
                    for one in comparisons
                ],
            )
            for title, comparisons in compared.items()
        ]
        print(dumps(document("prediction of 2206.01299", shown), indent=2))
        return
    for title, comparisons in compared.items():
        table = Table(box=SIMPLE_HEAD, padding=0, title=f"2206.01299, {title}", title_justify="left")
        table.add_column("link")
        table.add_column("")
        for header in ("published", "predicted", "deviation"):
            table.add_column(header, justify="right")
        for one in comparisons:
            table.add_row(
                bandwidth_text(one.bandwidth),
                one.method,
                f"{one.published:.3g}",
                f"{one.predicted:.3g}",
                f"{one.deviation:+.0%}",
            )
        Console().print(table)
