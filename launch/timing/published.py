"""The published numbers of AQ-SGD (2206.01299, Tables 2 and 3) beside those of the simulation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from thinwire.launch.timing.exchange import NO_COMPRESSION
from thinwire.launch.timing.network import Network
from thinwire.launch.timing.prediction import predict
from thinwire.launch.timing.workload import frame_bytes, uniform
from thinwire.pipeline.frames import CHANNELS
from thinwire.pipeline.options import CompressionOptions

WORKLOAD = uniform("GPT2-1.5B", num_stages=8, num_microbatches=32, forward=0.045, backward=0.135, shape=(1, 1024, 1600))
"""GPT2-1.5B on 8 machines, macro-batch 32, micro-batch 1, sequences of 1024; compute from Table 3."""

_PER_CHANNEL = 'q({}, per="channel")'
METHODS = {
    "fp32": NO_COMPRESSION,
    "fw3 bw6": CompressionOptions(activations=_PER_CHANNEL.format(3), gradients=_PER_CHANNEL.format(6)),
    "fw4 bw8": CompressionOptions(activations=_PER_CHANNEL.format(4), gradients=_PER_CHANNEL.format(8)),
}
"""The methods of the paper: one scale for each channel, as in its code. Later visits of AQ-SGD send as many bytes as
direct quantization."""

THROUGHPUT = {
    10e9: {"fp32": 3.8, "fw3 bw6": 4.0, "fw4 bw8": 4.0},
    1e9: {"fp32": 3.2, "fw3 bw6": 4.0, "fw4 bw8": 3.9},
    500e6: {"fp32": 2.7, "fw3 bw6": 3.9, "fw4 bw8": 3.9},
    300e6: {"fp32": 1.8, "fw3 bw6": 3.8, "fw4 bw8": 3.8},
    100e6: {"fp32": 0.5, "fw3 bw6": 3.4, "fw4 bw8": 3.0},
}
"""Table 2, AQ-SGD: sequences a second by bandwidth (bits a second) and method."""

RATIOS = {10e9: 0.116, 1e9: 1.16, 500e6: 2.3, 300e6: 3.9, 100e6: 11.6}
"""Wire time of an uncompressed activation over its forward compute, by bandwidth, in Table 2."""

WIRE_SECONDS = {500e6: (0.013, 0.025), 300e6: (0.021, 0.042), 200e6: (0.031, 0.063), 100e6: (0.063, 0.125)}
"""Table 3, fw4 bw8: seconds of one micro-batch on the wire, forward and back, by bandwidth."""


@dataclass(frozen=True)
class PublishedNumber:
    """A published number beside the predicted one."""

    quantity: str
    bandwidth: float
    """Bits a second."""
    method: str
    published: float
    predicted: float

    @property
    def deviation(self) -> float:
        """Prediction minus published number, as a share of the published number."""
        return self.predicted / self.published - 1


def throughput_numbers() -> list[PublishedNumber]:
    """The numbers of Table 2, in sequences a second."""
    return [
        PublishedNumber(
            "sequences/s",
            bandwidth,
            method,
            published,
            predict(WORKLOAD, "gpipe", METHODS[method], Network(bandwidth=bandwidth)).samples_per_second,
        )
        for bandwidth, row in THROUGHPUT.items()
        for method, published in row.items()
    ]


def share_numbers() -> list[PublishedNumber]:
    """The numbers of Table 2, each over that of the same method at 10 Gbps. So constant costs beside compute cancel."""
    numbers = throughput_numbers()
    fastest = {one.method: one for one in numbers if one.bandwidth == max(THROUGHPUT)}
    return [
        replace(
            one,
            quantity="share of 10 Gbps",
            published=one.published / fastest[one.method].published,
            predicted=one.predicted / fastest[one.method].predicted,
        )
        for one in numbers
        if one.bandwidth != max(THROUGHPUT)
    ]


def wire_numbers() -> list[PublishedNumber]:
    """The wire columns of Table 3, in milliseconds of one frame. Its compute columns are inputs of the simulation."""
    numbers = []
    for bandwidth, row in WIRE_SECONDS.items():
        for channel, published in zip(CHANNELS, row, strict=True):
            nbytes = frame_bytes(WORKLOAD.boundaries[0], METHODS["fw4 bw8"], 0, channel)
            numbers.append(PublishedNumber("ms", bandwidth, channel, 1e3 * published, 8e3 * nbytes / bandwidth))
    return numbers
