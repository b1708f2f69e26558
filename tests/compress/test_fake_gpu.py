"""Codecs on a GPU that is not there: which tensors lie where, and where the host would look at a value and so wait."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from support.codec_helpers import EXPRESSIONS, KEY
from support.gpus import GPU, FakeGpu, Launches, fake_put, launches_of
from thinwire.compress import Decoder, Encoder, Microbatch, SlotCounts, coder, parse, plan, words
from thinwire.compress.codecs.coding import lengths, scales
from thinwire.compress.codecs.fused import steps
from thinwire.compress.stores import memory, store
from thinwire.compress.stores.memory import MemoryStore

SHAPE = (4, 6, 64)
pytestmark = pytest.mark.slow

FULL = ("warmup", "eval-off")
"""Kinds of passes in which rows go in full."""
IDS = torch.arange(4)
SPARSE = (
    "topk(0.1)",
    "topk(0.7)",
    "topk(0.02)",
    'topk(0.1, values="fp16")',
    'topk(0.3, values="q(4)")',
    "randk(0.1)",
    'randk(0.1, values="bf16")',
)
OTHERS = ("short_scales.ByteScales(4)",)
WAITING = (
    'topk(0.1, code="entropy")',
    'q(4, code="entropy", grid="midrise")',
)
"""Codecs that need the host: it codes their symbols, or decides the width of each group."""


@pytest.fixture(autouse=True)
def fake_puts(monkeypatch):
    for module in (coder, lengths, memory, plan, scales, store, words):
        monkeypatch.setattr(module, "put", fake_put)
    monkeypatch.setattr(words, "tables", words.tables.__wrapped__)  # fake tensors are of one test


def send(made, x, device):
    payload = torch.empty(made.nbytes(SHAPE, x.dtype), dtype=torch.uint8, device=device)
    made.encode(x, payload, KEY)
    decoded = torch.empty_like(x)
    made.decode(payload, decoded, KEY)
    return decoded


@pytest.mark.parametrize("expression", [*EXPRESSIONS, *SPARSE, *OTHERS])
def test_a_codec_works_on_the_gpu_alone_and_nobody_waits_for_it(expression):
    made = parse(expression)
    with FakeGpu():
        assert send(made, torch.empty(SHAPE, device=GPU), GPU).device == GPU


@pytest.mark.parametrize("expression", ['q(8, step=0.2, code="plain")', 'q(16, step=0.01, code="plain", per="tensor")'])
def test_integers_that_are_not_coded_leave_and_come_while_nobody_waits(expression):
    made = parse(expression)
    with FakeGpu():
        x = torch.empty((4, 33, 64), device=GPU)
        payload = torch.empty(made.nbytes(x.shape, x.dtype), dtype=torch.uint8, device=GPU)
        made.encode(x, payload, KEY)
        decoded = torch.empty_like(x)
        made.decode(payload, decoded, KEY)


CODED = ("q(8, step=0.2)", 'q(16, step=0.01, per="tensor")', "q(8, step=0.2, codebook=16)")


@pytest.mark.parametrize("expression", CODED)
def test_coded_integers_leave_and_come_while_nobody_waits(expression, monkeypatch):
    """The host looked at the GPU 22 times to encode a message and 9 times to decode it."""
    pytest.importorskip("triton")
    from thinwire.compress.codecs.fused import lane_kernels, row_kernels

    launched = []
    for module in (lane_kernels, row_kernels):
        for name in launches_of(module):
            monkeypatch.setattr(module, name, Launches(lambda given, name=name: launched.append(name)))
        monkeypatch.setattr(module, "on", lambda _: nullcontext())
    monkeypatch.setattr(lane_kernels, "put", fake_put)
    monkeypatch.setattr(lane_kernels, "_known", lane_kernels._known.__wrapped__)
    monkeypatch.setattr(steps, "cover_on_gpu", lambda _: True)
    made = parse(expression)
    with FakeGpu():
        x = torch.empty((4, 33, 64), device=GPU)
        payload = torch.empty(made.nbytes(x.shape, x.dtype), dtype=torch.uint8, device=GPU)
        made.encode(x, payload, KEY)
        made.decode(payload, torch.empty_like(x), KEY)
    assert {name: launched.count(name) for name in launched} == {
        "_scales": 1, "_add": 4, "_centre": 1, "_price": 1, "_take": 1, "_weigh": 1, "_settle": 1,
        "_pack": 3, "_encode": 1, "_place": 1, "_unpack": 3, "_decode": 2, "_fill": 1,
    }  # fmt: skip


@pytest.mark.parametrize("expression", WAITING)
def test_the_codecs_that_wait_for_the_gpu_are_known(expression):
    made = parse(expression)
    with FakeGpu(), pytest.raises((DataDependentOutputException, DynamicOutputShapeException, RuntimeError)):
        send(made, torch.empty(SHAPE, device=GPU), GPU)


@pytest.mark.parametrize(
    "expression",
    [
        'q(4, grid="midrise")',
        'q(8, step=0.2, codebook=16, code="plain")',
        "ef(topk(0.1))",
        "efmixed(topk(0.1))",
        'ef21(q(4, grid="midrise"))',
        'aqsgd(q(4, grid="midrise"))',
    ],
)
@pytest.mark.parametrize("kind", ["train", "eval-on", *FULL])
@pytest.mark.parametrize("seen", [0, 2, 4])
def test_both_ends_of_a_channel_on_a_gpu_wait_for_nothing(expression, kind, seen):
    method = parse(expression if expression.startswith("q(") else f'{expression[:-1]}, store="device")')
    counts = SlotCounts(positions=4, samples=8, evaluation_samples=8)
    ends = [
        make(
            method,
            torch.empty(SHAPE, device="meta"),
            counts=counts,
            make_store=lambda layout, purpose: MemoryStore(layout, GPU),
        )
        for make in (Encoder, Decoder)
    ]
    with FakeGpu():
        x = torch.empty(SHAPE, device=GPU)
        microbatch = Microbatch(kind, range(4), IDS)
        for end in ends:
            for made in end.buffers.stores.values():
                made._known[:seen] = True
        plans = [end.plan(microbatch) for end in ends]
        payload = torch.empty(plans[0].nbytes, dtype=torch.uint8, device=GPU)
        sender, receiver = ends
        sender.settle(sender.encode(x, payload, KEY, plans[0]))
        out = torch.empty_like(x)
        receiver.decode(payload, out, KEY, plans[1], finite=True)
