"""Payloads that no encoder writes, in frames with a valid checksum: decoded to finite numbers, or refused."""

import random
from contextlib import nullcontext, suppress

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.codec_helpers import EXPRESSIONS
from thinwire.compress import Decoder, Encoder, Microbatch, SlotCounts, parse
from thinwire.compress.codecs.fused import cpu
from thinwire.compress.stores.memory import MemoryStore
from thinwire.pipeline.errors import WireError
from thinwire.pipeline.frames import HEADER_BYTES, Header, seal
from thinwire.pipeline.measuring.meters import Meter
from thinwire.pipeline.options import WireOptions
from thinwire.pipeline.processes.transport import MemoryEnd
from thinwire.pipeline.wire.boundary import Receiver, Sender, capacity_of
from thinwire.pipeline.wire.channel import Channel

pytestmark = pytest.mark.slow

SHAPE = (4, 3, 40)
SPARSE = [
    *("topk(0.02)", "topk(0.3)", "topk(0.9)", 'topk(0.1, values="q(4)")', 'topk(0.1, values="fp16")'),
    'topk(0.1, values="means(2)")',
    *(
        "randk(0.1)",
        'randk(0.3, values="q(8)")',
    ),
]
AROUND = []
KEPT_BY_BOTH = [
    *("ef21(topk(0.1))", "ef21(q(4))", 'ef21(q(2, scale="minmax"))', "ef21(fp8)"),
    *("aqsgd(q(4))", "aqsgd(topk(0.3))", "aqsgd(q(2), first=q(8))", "aqsgd(q(1), first=bf16)"),
    "aqsgd(q(2), first=q(8, step=0.2))",
]
FEEDBACK = [*KEPT_BY_BOTH, "ef(topk(0.1))", "ef(q(1))", "efmixed(topk(0.1))"]
CODED = [
    "q(8, step=0.2)",
    "q(8, step=0.2, codebook=8)",
    "aqsgd(q(2), first=q(8, step=0.2, codebook=8))",
    'q(2, code="entropy")',
    'aqsgd(fp8(code="entropy"))',
]
WORDS = {
    "bf16 NaN": b"\xc0\x7f",
    "bf16 infinity": b"\x80\x7f",
    "bf16 1e38": b"\x96\x7e",
    "bf16 largest": b"\x7f\x7f",
    "bf16 smallest": b"\x01\x00",
    "fp16 NaN": b"\x00\x7e",
    "NaN": b"\x00\x00\xc0\x7f",
    "minus infinity": b"\x00\x00\x80\xff",
    "1e38": b"\x99\x76\x96\x7e",
    "-1e38": b"\x99\x76\x96\xfe",
    "largest": b"\xff\xff\x7f\x7f",
    "ones": b"\xff",
    "zeros": b"\x00",
}
"""What a hostile peer may write in place of a scale, a value or an index."""


class Ends:
    """Both ends of a channel in this process; `around` are the coders of the activations at each end, for `reuse`."""

    def __init__(self, codec, name="activations", around=(None, None), **options):
        example = torch.empty(SHAPE, device="meta").requires_grad_()
        described = Channel(boundary=0, name=name, examples=(example,), method=parse(codec), seed=0)
        meter, options = Meter(), WireOptions(**options)
        self.stores = []
        leaving, arriving = (
            [
                kind(
                    described.methods[0],
                    example,
                    counts=SlotCounts(positions=8, samples=8),
                    make_store=self.store,
                    activation=activation,
                )
            ]
            for kind, activation in zip((Encoder, Decoder), around, strict=True)
        )
        self.link = MemoryEnd(capacity_of(leaving))
        self.sender = Sender(described, leaving, self.link, options, meter)
        self.receiver = Receiver(described, arriving, self.link, options, meter)

    def store(self, layout, purpose):
        self.stores.append(MemoryStore(layout))
        return self.stores[-1]

    def step(self, index, forge=None, x=None):
        """Carry one micro-batch, its payload replaced by what `forge` makes of it."""
        microbatch = Microbatch("train", range(4), torch.arange(4), index, 0)
        self.sender.send(microbatch, (torch.randn(SHAPE) if x is None else x,))
        self.last = microbatch, self.link._frames.popleft()
        return self.again(forge or (lambda payload: payload))

    def again(self, forge):
        """Carry the frame of the last step once more, with another payload."""
        microbatch, frame = self.last
        forged, header = frame.clone(), Header.read(frame.numpy().data)
        payload = forged[HEADER_BYTES : HEADER_BYTES + header.length]
        payload.copy_(forge(payload.clone()))
        seal(header, forged.numpy().data, payload=True)
        self.link._frames.append(forged)
        return self.receiver.receive(microbatch)

    def buffers(self):
        """What both ends remember."""
        return [store.read(torch.arange(4)) for store in self.stores]


def repeated(word, length):
    return torch.frombuffer(bytearray((word * length)[:length]), dtype=torch.uint8)


def put(word, start):
    """A forgery: a word at a place, or as near the end as it fits."""

    def forge(payload):
        place = min(start(payload), max(0, len(payload) - len(word)))
        payload[place : place + len(word)] = repeated(word, min(len(word), len(payload) - place))
        return payload

    return forge


def forgeries():
    """What a hostile peer might write: one word all over, one in any place, and noise, all over and in one place."""
    draw = random.Random(0)
    for word in WORDS.values():
        yield lambda payload, word=word: repeated(word, len(payload))
        yield put(word, lambda payload: 0)
        yield put(word, len)
        for _ in range(4):
            yield put(word, lambda payload: draw.randrange(len(payload)) // 4 * 4)
    for _ in range(20):
        yield lambda payload: repeated(draw.randbytes(len(payload)), len(payload))
        yield put(draw.randbytes(draw.randint(1, 8)), lambda payload: draw.randrange(len(payload)))


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that is made."""

    nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else [made]:
            if isinstance(one, torch.Tensor):
                self.nbytes = max(self.nbytes, one.untyped_storage().nbytes())
        return made


@pytest.fixture(autouse=True)
def no_message_before(monkeypatch):
    """Whatever other tests have coded, kernels are not tried out here: their sample is larger than any message."""
    monkeypatch.setattr(cpu, "_messages", 0)


@pytest.mark.parametrize("codec", dict.fromkeys([*EXPRESSIONS, *SPARSE, *AROUND, *FEEDBACK, *CODED]))
def test_a_payload_is_decoded_to_finite_numbers_or_refused_by_one_error(codec):
    """Indices out of bounds ended in an AssertionError, blamed on the receiver; NaN scales were trained on."""
    torch.manual_seed(0)
    ends, largest, refused = Ends(codec), Largest(), 0
    for step in range(2):
        [got] = ends.step(step)
    for number, forge in enumerate(forgeries()):
        try:
            with largest if number % 10 == 0 else nullcontext():
                [got] = ends.again(forge)
        except WireError as error:
            assert str(error).startswith("stage 1 received from stage 0, as activations of micro-batch 0")
            refused += 1
        else:
            assert got.shape == SHAPE and bool(got.isfinite().all())
    assert refused, "some of these words are no numbers, or no indices"
    assert largest.nbytes <= 8 * max(capacity_of(ends.receiver.coders), got.numel()), "8 bytes for each element"
    assert all(bool(buffer.isfinite().all()) for buffer in ends.buffers())


def test_reuse_refuses_numbers_that_are_not_finite():
    torch.manual_seed(0)
    forward = Ends("topk(0.1)")
    around = (forward.receiver.coders[0], forward.sender.coders[0])
    back, refused = Ends("reuse", "gradients", around), 0
    for step, forge in enumerate(forgeries()):
        forward.step(step)
        try:
            [got] = back.step(step, forge)
        except WireError as error:
            assert "must hold finite numbers, got NaN or infinity" in str(error)
            refused += 1
        else:
            assert bool(got.isfinite().all())
    assert refused


@pytest.mark.parametrize("codec", KEPT_BY_BOTH)
def test_no_nan_and_no_infinity_enters_a_buffer(codec):
    """Of what goes in full, and of what feedback adds; even where a run passes such numbers on."""
    torch.manual_seed(0)
    for first in (True, False):
        for forge in [put(word, lambda payload: 0) for word in WORDS.values()]:
            ends = Ends(codec, nonfinite="send")
            if not first:
                ends.step(0)
            with suppress(WireError):
                ends.step(int(not first), forge)
            assert len(ends.buffers()) == 2
            assert all(bool(buffer.isfinite().all()) for buffer in ends.buffers())


@pytest.mark.parametrize("codec", [expression for expression in EXPRESSIONS if expression != "none"])
def test_a_run_that_passes_nan_on_gets_it(codec):
    x = torch.randn(SHAPE)
    x[1, 2, 3] = torch.nan
    [got] = Ends(codec, nonfinite="send").step(0, x=x)
    assert not bool(got[1, 2, 3].isfinite())


def test_indices_out_of_bounds_are_named():
    ends = Ends("topk(0.02)")
    with pytest.raises(WireError, match="indices"):
        ends.step(0, lambda payload: torch.full_like(payload, 255))
