"""Figure 5(c) of 2206.01299 by the arithmetic of `thinwire predict`: 4 replicas of 8 stages, with its own numbers.

    python docs/measured/figure5c.py PICTURE.png

It prints the tables of figure5c.md and draws the picture, also as SVG.

The paper's numbers: 8 stages of GPT2-1.5B, 32 micro-batches of one sequence, 45 ms and 135 ms of compute (Table 3),
4 replicas, fw3 bw6, gradients of weights in 4 bits, and one bandwidth for all that a machine sends (Linux traffic
control). The weights are those of GPT2-XL: 6 blocks a stage, the embedding on the first, a head of its own on the last.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from thinwire.launch.shared.links import Network
from thinwire.launch.timing.exchange_time import ReplicaWork, time_exchange
from thinwire.launch.timing.prediction import Prediction, predict, run
from thinwire.launch.timing.workload import NO_COMPRESSION, uniform
from thinwire.pipeline.options import CompressionOptions

WIDTH, VOCABULARY, POSITIONS, BLOCKS = 1600, 50257, 1024, 6
_BLOCK = 12 * WIDTH**2 + 13 * WIDTH
"""Weights and biases of a block, its two norms included."""
ELEMENTS = (
    BLOCKS * _BLOCK + (VOCABULARY + POSITIONS) * WIDTH,
    *(6 * (BLOCKS * _BLOCK,)),
    BLOCKS * _BLOCK + 2 * WIDTH + VOCABULARY * WIDTH,
)
REPLICAS = 4
PIPELINE = uniform("GPT2-1.5B", num_stages=8, num_microbatches=32, forward=0.045, backward=0.135, shape=(1, 1024, 1600))

BANDWIDTHS = (10e9, 1e9, 500e6, 300e6, 200e6, 100e6)
"""Bits a second: those of Tables 2 and 3."""
COMPRESSED = CompressionOptions(activations='q(3, per="channel")', gradients='q(6, per="channel")')
"""One scale for each channel, as in the paper's code."""
GRADIENTS = "ef(q(4))"
ROWS = {
    "nothing": (NO_COMPRESSION, "none"),
    "activations": (COMPRESSED, "none"),
    "model gradients": (NO_COMPRESSION, GRADIENTS),
    "both": (COMPRESSED, GRADIENTS),
}
"""What is compressed: the codecs of the boundaries, and of the exchange between replicas."""
PUBLISHED = 8.5
"""The largest speed-up of both over nothing, in the text: "up to 8.5x". The text has no other number of the figure."""


def speeds() -> Mapping[tuple[float, str], Prediction]:
    """By bandwidth and what is compressed."""
    return {
        (bandwidth, name): predict(
            replace(PIPELINE, replicas=_exchanged(gradients)), "gpipe", codecs, _uplink(bandwidth)
        )
        for bandwidth in BANDWIDTHS
        for name, (codecs, gradients) in ROWS.items()
    }


def _exchanged(gradients: str) -> ReplicaWork:
    return ReplicaWork(count=REPLICAS, gradients=gradients, elements=ELEMENTS)


def _uplink(bandwidth: float) -> Network:
    return Network(bandwidth=bandwidth, wires="host")


def added(bandwidth: float, name: str) -> float:
    """Seconds that the exchange adds to a step."""
    codecs, gradients = ROWS[name]
    course = run(PIPELINE, "gpipe", codecs, _uplink(bandwidth))
    return time_exchange(_exchanged(gradients), course, _uplink(bandwidth)).adds


def table(found: Mapping[tuple[float, str], Prediction]) -> str:
    """Sequences a second and the exchange as Markdown."""
    names = list(ROWS)
    lines = [
        f"| bandwidth | {' | '.join(names)} | both over nothing | the exchange adds, s: nothing | both |",
        "|---" * (len(names) + 4) + "|",
    ]
    for bandwidth in BANDWIDTHS:
        row = [found[bandwidth, name] for name in names]
        adds = [added(bandwidth, name) for name in (names[0], names[-1])]
        lines.append(
            f"| {bandwidth / 1e6:g} Mbps | {' | '.join(f'{one.samples_per_second:.3g}' for one in row)} | "
            f"{gain(found, bandwidth):.2f}x | {' | '.join(f'{seconds:.3g}' for seconds in adds)} |"
        )
    return "\n".join(lines)


def gain(found: Mapping[tuple[float, str], Prediction], bandwidth: float) -> float:
    """The speed-up of both over nothing."""
    return found[bandwidth, "both"].samples_per_second / found[bandwidth, "nothing"].samples_per_second


def comparison(found: Mapping[tuple[float, str], Prediction]) -> str:
    """The one published number beside the predicted one."""
    most = max(gain(found, bandwidth) for bandwidth in BANDWIDTHS)
    return "\n".join(
        [
            "| | published | predicted | deviation |",
            "|---|---|---|---|",
            f"| largest speed-up of both over nothing | {PUBLISHED}x | {most:.2f}x | {most / PUBLISHED - 1:+.0%} |",
        ]
    )


def draw(found: Mapping[tuple[float, str], Prediction]) -> Figure:
    """Bars of sequences a second, by bandwidth."""
    figure = Figure(figsize=(8, 3.6), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for index, (name, colour) in enumerate(zip(ROWS, ("#7a7a7a", "#1f77b4", "#1b9e77", "#d95f02"), strict=True)):
        places = [place + 0.2 * (index - 1.5) for place in range(len(BANDWIDTHS))]
        heights = [found[bandwidth, name].samples_per_second for bandwidth in BANDWIDTHS]
        axes.bar(places, heights, 0.2, color=colour, label=f"compressed: {name}")
    axes.set_xticks(range(len(BANDWIDTHS)), [f"{bandwidth / 1e6:g} Mbps" for bandwidth in BANDWIDTHS])
    axes.set_ylabel("sequences/s, predicted")
    axes.grid(axis="y", color="#e0e0e0")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    computed = speeds()
    print(f"{table(computed)}\n\n{comparison(computed)}")
    figure = draw(computed)
    for kind in (".png", ".svg"):
        figure.savefig(Path(sys.argv[1]).with_suffix(kind), metadata={"Date": None} if kind == ".svg" else None)
