"""Payloads that no encoder writes, in frames with a valid checksum: decoded to something, or refused in one way."""

import random
from contextlib import suppress

import pytest
import torch

from thinwire.compress import Decoder, Encoder, Microbatch, SlotCounts, parse
from thinwire.compress.stores.memory import MemoryStore
from thinwire.pipeline.boundary import ChannelEnd, Receiver, Sender
from thinwire.pipeline.channel import Channel
from thinwire.pipeline.errors import WireError
from thinwire.pipeline.frames import HEADER_BYTES, Header, seal
from thinwire.pipeline.meters import Meter
from thinwire.pipeline.options import WireOptions
from thinwire.pipeline.transport import MemoryEnd

SHAPE = (4, 6, 40)
CODECS = [
    *("none", "fp16", "bf16", "fp8", "q(4)", 'q(2, scale="minmax")', 'q(4, rotate="hadamard")', "q(4, outliers=0.05)"),
    *("topk(0.02)", "topk(0.3)", 'topk(0.1, values="q(4)")', "randk(0.1)", "lowrank(2)", "dither(4)"),
    *("ef(topk(0.1))", "efmixed(topk(0.1))", "ef21(topk(0.1))", "ef21(q(4))", "aqsgd(q(4))", "aqsgd(topk(0.3))"),
]


class Ends:
    """Both ends of a channel in this process."""

    def __init__(self, codec):
        example = torch.empty(SHAPE, device="meta").requires_grad_()
        described = Channel(boundary=0, name="activations", examples=(example,), method=parse(codec), seed=0)
        meter, options = Meter(), WireOptions()
        self.stores = []
        leaving, arriving = (
            [kind(described.methods[0], example, counts=SlotCounts(positions=8, samples=8), make_store=self.store)]
            for kind in (Encoder, Decoder)
        )
        self.link = MemoryEnd(ChannelEnd(described, leaving, meter).capacity)
        self.sender = Sender(described, leaving, self.link, options, meter)
        self.receiver = Receiver(described, arriving, self.link, options, meter)

    def store(self, layout, purpose):
        self.stores.append(MemoryStore(layout))
        return self.stores[-1]

    def step(self, index, forge=None):
        """Carry one micro-batch, its payload replaced by what `forge` makes of it."""
        microbatch = Microbatch("train", range(4), torch.arange(4), index, 0)
        self.sender.send(microbatch, (torch.randn(SHAPE),))
        frame = self.link._frames[0]
        header = Header.read(frame)
        if forge is not None:
            payload = frame[HEADER_BYTES : HEADER_BYTES + header.length]
            payload.copy_(forge(payload.clone()))
            seal(header, frame, payload=True)
        return self.receiver.receive(microbatch)

    def buffers(self):
        """What both ends remember."""
        return [store.read(torch.arange(4)) for store in self.stores]


def forgeries():
    """What a hostile peer might write: all ones, all zeros, NaN and huge floats, noise, and noise in one place."""
    draw = random.Random(0)
    yield lambda payload: torch.full_like(payload, 255)
    yield torch.zeros_like
    for word in (b"\xc0\x7f", b"\x80\x7f", b"\x7f\x7f", b"\x00\x00\xc0\x7f", b"\xff\xff\x7f\x7f"):
        yield lambda payload, word=word: torch.frombuffer(
            bytearray((word * len(payload))[: len(payload)]), dtype=torch.uint8
        )
    for _ in range(20):
        yield lambda payload: torch.frombuffer(bytearray(draw.randbytes(len(payload))), dtype=torch.uint8)
    for _ in range(20):

        def patched(payload):
            place, size = draw.randrange(len(payload)), draw.randint(1, 8)
            payload[place : place + size] = draw.randrange(256)
            return payload

        yield patched


@pytest.mark.parametrize("codec", CODECS)
def test_a_payload_is_decoded_or_refused_by_one_error(codec):
    """Indices out of bounds ended in an AssertionError or a RuntimeError of torch, blamed on the receiver."""
    torch.manual_seed(0)
    for forge in forgeries():
        ends = Ends(codec)
        ends.step(0)
        try:
            [got] = ends.step(1, forge)
        except WireError as error:
            assert str(error).startswith("stage 1 received from stage 0, as activations of micro-batch 0")
        else:
            assert got.shape == SHAPE


@pytest.mark.parametrize("codec", ["ef21(topk(0.1))", "ef21(q(4))", "aqsgd(q(4))", "aqsgd(topk(0.3))"])
def test_no_nan_and_no_infinity_enters_a_buffer(codec):
    torch.manual_seed(0)
    for first in (True, False):  # what goes in full, and what feedback adds
        for forge in forgeries():
            ends = Ends(codec)
            if not first:
                ends.step(0)
            with suppress(WireError):
                ends.step(int(not first), forge)
            assert len(ends.buffers()) == 2
            assert all(bool(buffer.isfinite().all()) for buffer in ends.buffers())


def test_indices_out_of_bounds_are_named():
    ends = Ends("topk(0.02)")
    with pytest.raises(WireError, match="indices"):
        ends.step(0, lambda payload: torch.full_like(payload, 255))
