"""Encode and decode of a bucket of gradients between replicas, in parts of the speed of memcpy.

    python docs/measured/replica_codecs.py [--elements 100000000] [--part 2097152] [--turns 5] CODEC ..

One thread. The bucket is Gaussian, in rows of 512 and messages of `--part` elements. Each turn measures memcpy, then
each codec as the exchange calls it: encode with the update of the error, and decode into a new tensor. The table has
the median of the turns: gigabytes of float32 a second, and the ratio to memcpy's of the same turn.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from thinwire.compress import Decoder, Encoder, Key, Microbatch, SlotCounts, parse
from thinwire.compress.stores.memory import MemoryStore
from thinwire.pipeline.replicas.division import BUCKET
from thinwire.pipeline.replicas.layout import FLAT

KEY = Key(0, 0, "parts", "train", 0, 0)


def seconds(work: Callable[[], object]) -> float:
    """The time that some work takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class Buckets:
    """The buckets of a stage, each with a coder of its own at both ends, as in an exchange."""

    def __init__(self, expression: str, rows: Tensor, elements: int) -> None:
        self.parts = rows.split(elements // FLAT.row)
        example = [torch.empty(1, *part.shape, device="meta", requires_grad=True) for part in self.parts]
        counts, method = SlotCounts(positions=1), parse(expression)
        self.encoders = [
            Encoder(method, each, counts=counts, make_store=lambda layout, _: MemoryStore(layout)) for each in example
        ]
        self.decoders = [
            Decoder(method, each, counts=counts, make_store=lambda layout, _: MemoryStore(layout)) for each in example
        ]
        self.payloads = [torch.zeros(coder.capacity, dtype=torch.uint8) for coder in self.encoders]
        self.message = Microbatch("train", range(1))

    def encode(self) -> None:
        """Encode every bucket, and update its error."""
        for coder, part, payload in zip(self.encoders, self.parts, self.payloads, strict=True):
            plan = coder.plan(self.message)
            coder.settle(coder.encode(part[None], payload[: plan.nbytes], KEY, plan))

    def decode(self) -> None:
        """Decode every bucket, as a receiver does, and check that it is finite."""
        for coder, part, payload in zip(self.decoders, self.parts, self.payloads, strict=True):
            out = torch.empty(1, *part.shape)
            plan = coder.plan(self.message)
            coder.decode(payload[: plan.nbytes], out, KEY, plan, finite=True)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("codecs", nargs="*", default=["none", "ef(q(8))", "ef(q(4))"])
    parser.add_argument("--elements", type=int, default=100_000_000)
    parser.add_argument("--part", type=int, default=BUCKET // 2, help="elements of a message; by default of 2 replicas")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = torch.randn(options.elements // FLAT.row, FLAT.row)
    copy, gigabytes = torch.empty_like(rows), rows.nbytes / 1e9
    copy.copy_(rows)
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for expression in options.codecs:
        buckets = Buckets(expression, rows, options.part)
        with torch.no_grad():
            for turn in range(options.turns + 1):
                base = seconds(lambda: copy.copy_(rows))
                for name, work in (("encode", buckets.encode), ("decode", buckets.decode)):
                    taken = seconds(work)
                    if turn:  # the first one makes the stores and the pages
                        found.setdefault((expression, name), []).append((gigabytes / taken, base / taken))
        del buckets
    print(f"torch {torch.__version__}, {rows.numel():,} elements, {options.turns} turns, one thread")
    print("| codec | | GB/s | of memcpy |\n|---|---|---|---|")
    for (expression, name), turns in found.items():
        speed, ratio = (median(column) for column in zip(*turns, strict=True))
        print(f"| `{expression}` | {name} | {speed:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
