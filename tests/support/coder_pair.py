"""Both ends of one tensor's channel in one process, for tests of feedback."""

import torch

from thinwire.compress import Decoder, Encoder, Key, Microbatch, SlotCounts, parse
from thinwire.compress.stores.memory import MemoryStore

ROWS, WIDTH = 4, 24


class Pair:
    """Both ends of one tensor's channel, and what crossed between them."""

    def __init__(
        self,
        expression,
        dtype=torch.float32,
        positions=ROWS,
        samples=16,
        fill=True,
        activations=(None, None),
        shape=(ROWS, WIDTH),
    ):
        example = torch.empty(shape, dtype=dtype, device="meta")
        counts = SlotCounts(positions=positions, samples=samples, evaluation_samples=samples)
        self.dtype = dtype
        self.sender, self.receiver = (
            kind(
                parse(expression),
                example,
                counts=counts,
                make_store=lambda layout, purpose: MemoryStore(layout),
                warmup_fill=fill,
                activation=activation,
            )
            for kind, activation in zip((Encoder, Decoder), activations, strict=True)
        )

    def carry(self, x, samples=None, kind="train", step=0, start=0):
        positions = range(start, start + self.sender.rows)
        ids = None if samples is None else torch.tensor(samples)
        microbatch = Microbatch(kind, positions, ids)
        key = Key(0, 0, "activations", kind, step, 0)
        sent, received = self.sender.plan(microbatch), self.receiver.plan(microbatch)
        assert sent.nbytes == received.nbytes <= self.sender.capacity
        self.nbytes = sent.nbytes
        payload = torch.empty(self.nbytes, dtype=torch.uint8)
        x = x.to(self.dtype)
        before = x.clone()
        encoded = self.sender.encode(x, payload, key, sent)
        self.sent = payload.clone()
        self.sender.settle(encoded)
        assert torch.equal(payload, self.sent), "settle wrote into a frame that may be on its way"
        assert torch.equal(x, before), "the tensor sent was changed"
        out = torch.empty_like(x)
        self.receiver.decode(payload, out, key, received)
        assert self.sender.buffers.digests() == self.receiver.buffers.digests()
        return out


def random(step):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
