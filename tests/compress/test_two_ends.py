"""Buffers that both ends of a channel keep, by every rule around every codec, in two processes over gloo."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.processes import run
from thinwire.compress import Decoder, Encoder, Key, Microbatch, SlotCounts, parse
from thinwire.compress.expression import CODECS as NAMES
from thinwire.compress.stores.disk import DiskStore
from thinwire.compress.stores.memory import MemoryStore

ROWS, SAMPLES, STEPS = 4, 10, 15
CODECS = [
    "none",
    "fp16",
    "bf16",
    "fp8",
    "q(2)",
    'q(3, scale="minmax")',
    'q(3, per="channel", round="stochastic")',
    "topk(0.25)",
    'topk(0.25, values="q(4)")',
    "randk(0.5)",
]
RULES = ["ef21({})", 'ef21({}, slot="sample", store_bits=8)', "aqsgd({}, store_bits=16)", "aqsgd({}, store_bits=4)"]
METHODS = [RULES[(place + half) % 4].format(codec) for place, codec in enumerate(CODECS) for half in (0, 2)]
"""Each codec in one rule of EF21 and one of AQ-SGD, each rule around half of the codecs."""


def trained(rank, folder):
    """Send STEPS messages by each method from process 0 to 1, which keeps its buffers on disk; digests by method."""
    example = torch.empty(ROWS, 6, 12, device="meta")
    counts = SlotCounts(positions=ROWS, samples=SAMPLES)

    def coder(index):
        def make_store(layout, purpose):
            return MemoryStore(layout) if rank == 0 else DiskStore(layout, Path(folder, f"{index} {purpose}"))

        return (Decoder if rank else Encoder)(parse(METHODS[index]), example, counts=counts, make_store=make_store)

    coders = [coder(index) for index in range(len(METHODS))]
    for step in range(STEPS):
        x = torch.randn(example.shape, generator=torch.Generator().manual_seed(step % 7))
        microbatch = Microbatch("train", range(ROWS), (torch.arange(ROWS) * 3 + step) % SAMPLES)
        key = Key(0, 0, "activations", "train", step, 0)
        plans = [coder.plan(microbatch) for coder in coders]
        sizes = [plan.nbytes for plan in plans]
        frame = torch.empty(sum(sizes), dtype=torch.uint8)
        if rank == 1:
            dist.recv(frame, 0)
        for coder, plan, payload in zip(coders, plans, frame.split(sizes), strict=True):
            if rank == 0:
                coder.settle(coder.encode(x, payload, key, plan))
            else:
                coder.decode(payload, torch.empty_like(x), key, plan)
        if rank == 0:
            dist.send(frame, 1)
    found = {method: coder.buffers.digests() for method, coder in zip(METHODS, coders, strict=True)}
    for coder in coders:
        coder.buffers.close()
    return found


@pytest.mark.processes
def test_buffers_are_equal_at_both_ends_after_many_steps_by_rules_around_every_codec(tmp_path):
    sender, receiver = run(trained, 2, str(tmp_path))
    assert {parse(codec).name for codec in CODECS} == {*NAMES} - {"reuse"}, "which feedback does not go around"
    for method in METHODS:
        assert sender[method] == receiver[method], method
        assert len(sender[method]) == (ROWS if parse(method).slot == "position" else SAMPLES), method
