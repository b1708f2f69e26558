"""The answers of a prediction about one workload: speeds, needed bandwidths, and the best schedule."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from thinwire.launch.predict.cuts import Cuts
from thinwire.launch.shared.links import Network
from thinwire.launch.shared.tables import Table, Value, document, duration_text
from thinwire.launch.timing.prediction import (
    HIDDEN,
    Prediction,
    bandwidth_text,
    best,
    mistakes_of,
    needed_bandwidth,
    predict_each,
    verdict,
)
from thinwire.launch.timing.workload import Workload, frame_bytes, label
from thinwire.pipeline.frames import CHANNELS
from thinwire.pipeline.options import CompressionOptions
from thinwire.pipeline.schedules import SCHEDULES

_OF_WORKLOAD = (
    *("name", "num_stages", "num_microbatches", "microbatch_size", "accumulation", "steps", "forward", "backward"),
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """All answers about one workload."""

    workload: Workload
    schedule: str
    codecs: Sequence[CompressionOptions]
    """Those that are compared; the first is no compression."""
    networks: Sequence[Network]
    """They differ in bandwidth."""
    max_in_flight: float = math.inf
    """The number of micro-batches that fit in the memory of a process."""
    cuts: Cuts | None = None
    """The cut of the recipe beside the best one; None where times are given."""

    @cached_property
    def by_network(self) -> list[list[Prediction]]:
        """The chosen schedule at each bandwidth with every codec."""
        return [predict_each(self.workload, self.schedule, self.codecs, network) for network in self.networks]

    @property
    def predictions(self) -> list[Prediction]:
        """The chosen schedule at every bandwidth with every codec."""
        return [prediction for row in self.by_network for prediction in row]

    @cached_property
    def needed(self) -> dict[str, float]:
        """By codec: the bandwidth in bits a second below which the wire is the bottleneck."""
        asked = self.workload, self.schedule
        return {label(codec): needed_bandwidth(*asked, codec, self.networks[0]) for codec in self.codecs}

    @cached_property
    def schedules(self) -> list[Prediction]:
        """Every schedule that can run this workload, with every codec, at the lowest bandwidth."""
        slowest = min(self.networks, key=lambda network: network.bandwidth)
        known = (name for name in SCHEDULES if not mistakes_of(self.workload, name))
        return [one for name in known for one in predict_each(self.workload, name, self.codecs, slowest)]

    @property
    def best(self) -> Prediction | None:
        """The advice of `prediction.best` among `schedules`; None if none fits in memory."""
        return best(self.schedules, self.max_in_flight)

    @property
    def verdicts(self) -> list[str]:
        """One sentence for each bandwidth: whether compression pays."""
        return [*map(verdict, self.by_network)]

    @property
    def tables(self) -> list[Table]:
        """What is shown."""
        cuts = self.cuts.tables if self.cuts else []
        return [self._speeds(), self._needed(), self._frames(), self._stages(), self._schedules(), *cuts]

    @property
    def best_cut(self) -> list[str]:
        """Whether the cuts fit, and the option that chooses the best one; empty where times are given."""
        if self.cuts is None:
            return []
        return [*self.cuts.fits, f"to use the best cut: --pipeline.layers '{json.dumps(self.cuts.best)}'"]

    @property
    def heading(self) -> str:
        """What is predicted, in a sentence."""
        workload = self.workload
        spent = zip(workload.forward, workload.backward, strict=True)
        passes = f"{workload.accumulation} passes of " * (workload.accumulation > 1)
        return (
            f"{workload.name}: {workload.num_stages} stages, {passes}{workload.num_microbatches} micro-batches of "
            f"{workload.microbatch_size}; forward+backward ms a stage: "
            f"{', '.join(f'{1e3 * forth:.3g}+{1e3 * back:.3g}' for forth, back in spent)}"
        )

    @property
    def advice(self) -> str:
        """The best schedule and codec, how long the run takes with them, and the options that choose them."""
        most = self.max_in_flight
        limit = "" if math.isinf(most) else f" with at most {most:g} micro-batches in memory"
        if (best := self.best) is None:
            return f"no schedule can run{limit}; raise --max-in-flight"
        said = (
            f"best{limit} at {bandwidth_text(best.bandwidth)}: {best.schedule} with {best.codec}, "
            f"{best.samples_per_second:.3g} samples/s, {best.in_flight:g} micro-batches in memory"
        )
        if self.workload.steps:
            said += f"; {self.workload.steps:,} steps take {duration_text(self.workload.steps * best.seconds)}"
        if best.schedule != self.schedule:
            said += f"\nits options: {self._options_of(best)}"
        return said

    def _options_of(self, one: Prediction) -> str:
        """The options of a recipe that choose a prediction's schedule, on as many processes."""
        each = SCHEDULES[one.schedule].stages_per_process
        count = self.workload.num_stages * each
        # a list of layers in the recipe is for as many stages as it has now
        cut = f" --pipeline.num_stages {count} --pipeline.stages_per_process {each} --pipeline.layers null"
        return f"--pipeline.schedule {one.schedule}{cut * (each > 1)}"

    def _speeds(self) -> Table:
        steps = self.workload.steps
        columns = ["link", "codec", "samples/s", "x none", "of full", "s a step"]
        columns += [f"{steps:,} steps"] * bool(steps)
        rows: list[list[Value]] = []
        for one in self.predictions:
            row: list[Value] = [bandwidth_text(one.bandwidth), one.codec, one.samples_per_second]
            row += [round(one.speedup, 2), round(one.of_unthrottled, 2), one.seconds]
            row += [duration_text(steps * one.seconds)] if steps else []
            rows.append(row)
        note = (
            "x none: over no compression. of full: over no compression and unlimited bandwidth, with the same latency."
        )
        return Table(f"predicted speed with {self.schedule}", columns, rows, note)

    def _needed(self) -> Table:
        rows = [(codec, 1e-6 * bandwidth) for codec, bandwidth in self.needed.items()]
        return Table(f"the least bandwidth that hides the wire ({HIDDEN:.0%} of full speed)", ("codec", "Mbit/s"), rows)

    def _frames(self) -> Table:
        """What each codec makes of a frame over the first boundary, and the seconds that it takes here."""
        examples, rows = self.workload.boundaries[0], dict[tuple[str, str], list[Value]]()
        for codec in self.codecs:
            for channel in CHANNELS:
                elements = sum(one.numel() for one in examples if channel == "activations" or one.requires_grad)
                nbytes, method = frame_bytes(examples, codec, 0, channel), str(codec.method(0, channel))
                cost = self.workload.costs.get((channel, method))
                spent = [None, None] if cost is None else [1e3 * cost.encode, 1e3 * cost.decode]
                rows[channel, method] = [method, channel, 8 * nbytes / max(1, elements), nbytes / 1e3, *spent]
        note = (
            "Headers included, feedback after a first visit. Payloads whose length varies have that of Gaussian rows, "
            "of which no codebook knows any: what it saves in training is not in here, and neither is its search."
        )
        columns = ("codec", "of", "bits", "kB", "encode, ms", "decode, ms")
        return Table("a frame over the first boundary", columns, [*rows.values()], note)

    def _stages(self) -> Table:
        """Where the time of each process goes in a step, at the lowest bandwidth."""
        name = "stage" if SCHEDULES[self.schedule].stages_per_process == 1 else "process"
        slowest = min(one.bandwidth for one in self.predictions)
        shown = [one for one in self.predictions if one.bandwidth == slowest]
        title = f"% of the step that each {name} is busy / waits for the wire / is idle, at {bandwidth_text(slowest)}"
        rows = [[str(stage), *(_shares(one, stage) for one in shown)] for stage in range(len(shown[0].busy))]
        return Table(title, [name, *(one.codec for one in shown)], rows)

    def _schedules(self) -> Table:
        codecs = dict.fromkeys(one.codec for one in self.schedules)
        found = {(one.schedule, one.codec): one for one in self.schedules}
        held = {one.schedule: one.in_flight for one in self.schedules}
        rows: list[list[Value]] = [
            [name, count, *(found[name, codec].samples_per_second for codec in codecs)] for name, count in held.items()
        ]
        title = f"samples/s of every schedule at {bandwidth_text(self.schedules[0].bandwidth)}"
        return Table(title, ["schedule", "held", *codecs], rows, "held: micro-batches in the memory of a process.")

    def to_json(self) -> dict[str, Any]:
        """A document of tables, with all numbers beside them.

        In JSON null means unlimited (`bandwidth`), or no schedule (`best`).
        """
        workload = self.workload
        everything: dict[str, Any] = {
            "workload": {
                **{name: getattr(workload, name) for name in _OF_WORKLOAD},
                "codec_seconds": [
                    {"channel": channel, "codec": codec, **asdict(cost)}
                    for (channel, codec), cost in workload.costs.items()
                ],
            },
            "predictions": [asdict(one) for one in self.predictions],
            "needed_bandwidth": self.needed,
            "schedules": [asdict(one) for one in self.schedules],
            "best": None if self.best is None else asdict(self.best),
            "verdicts": self.verdicts,
        }
        if self.cuts:
            measured = self.cuts.measured and {"measured": asdict(self.cuts.measured)}
            everything |= {"layers": self.cuts.best, "fits": self.cuts.fits, **(measured or {})}
        return document(f"prediction of {workload.name}", self.tables, **everything)


def _shares(one: Prediction, stage: int) -> str:
    """Percentages of a step: busy, waiting and idle."""
    return "/".join(f"{100 * part[stage] / one.seconds:.0f}" for part in (one.busy, one.wait, one.bubble))
