"""The pipeline and the speeds that 2206.01299 (AQ-SGD) publishes in its Tables 2 and 3."""

from __future__ import annotations

from thinwire.launch.timing.exchange_time import NO_COMPRESSION
from thinwire.launch.timing.workload import uniform
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
