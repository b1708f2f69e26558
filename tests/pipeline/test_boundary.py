import math
from types import SimpleNamespace

import pytest
import torch

from support.own_code import add_module
from thinwire.compress import Decoder, Encoder, Microbatch, SlotCounts, parse
from thinwire.compress.stores.memory import MemoryStore
from thinwire.pipeline import frames
from thinwire.pipeline.errors import NonFiniteError, PipelineError, WireError
from thinwire.pipeline.frames import HEADER_BYTES, PHASES, Header, seal
from thinwire.pipeline.measuring import meters
from thinwire.pipeline.measuring.meters import Meter
from thinwire.pipeline.options import WireOptions
from thinwire.pipeline.processes.transport import MemoryEnd
from thinwire.pipeline.replicas.lane import Lane
from thinwire.pipeline.wire import boundary
from thinwire.pipeline.wire.boundary import Receiver, Sender, capacity_of
from thinwire.pipeline.wire.channel import Channel, frame_bytes, frame_length, place_of


def example(*shape, dtype=torch.float32, gradient=True):
    return torch.empty(shape, dtype=dtype, device="meta").requires_grad_(gradient)


def channel(*examples, codec="q(4)", name="activations"):
    return Channel(boundary=1, name=name, examples=examples, method=parse(codec), seed=3)


def coders(described, sends):
    return [
        (Encoder if sends else Decoder)(
            method,
            tensor,
            counts=SlotCounts(positions=64),
            make_store=lambda layout, purpose: MemoryStore(layout),
        )
        for method, tensor in zip(described.methods, described.examples, strict=True)
    ]


def which(kind="train", step=0, index=0):
    return Microbatch(kind, range(64), None, step, index)


def ends(described, options=None):
    meter = Meter()
    leaving, arriving = coders(described, True), coders(described, False)
    link = MemoryEnd(capacity_of(leaving))
    sender = Sender(described, leaving, link, options or WireOptions(), meter)
    return sender, Receiver(described, arriving, link, options or WireOptions(), meter), meter, link


def carry(described, tensors, *args, **kwargs):
    sender, receiver, _, _ = ends(described)
    sender.send(which(*args, **kwargs), tensors)
    return receiver.receive(which(*args, **kwargs))


def test_payloads_lie_behind_the_header_at_multiples_of_16():
    sizes, stop, places = [12, 56, 0, 8], 64, []
    for size in sizes:
        places.append(place_of(size, stop))
        stop = places[-1].stop
    assert [(place.start, place.stop) for place in places] == [(64, 76), (80, 136), (144, 144), (144, 152)]
    assert frame_bytes(sizes) == 152


@pytest.mark.parametrize("tensors", [1, 2])
def test_nobody_looks_at_the_length_of_the_last_payload_before_the_courier_has_it(tensors, monkeypatch):
    """On a GPU the thread that launches compute would wait for it."""
    described = channel(*(example(4, 64) for _ in range(tensors)), codec="q(8, step=0.2)")
    sender, receiver, meter, link = ends(described)
    orders, looks, used, send = [], [], Encoder.used, link.send
    monkeypatch.setattr(Encoder, "used", lambda *given: looks.append(given) or used(*given))
    monkeypatch.setattr(link, "send", lambda *given: orders.append(given))
    hidden = [torch.randn(4, 64) for _ in range(tensors)]
    sender.send(which(), hidden)
    assert len(looks) == tensors - 1
    send(*orders[0])
    assert len(looks) == tensors
    got = receiver.receive(which())
    assert [*meter.sent.values()] == [*meter.received.values()]
    assert all((one - other).abs().max() < 0.3 for one, other in zip(got, hidden, strict=True))


def test_only_floating_tensors_that_need_gradients_are_compressed():
    described = channel(example(64, 64), example(4, dtype=torch.int64, gradient=False), example(64, 64, gradient=False))
    hidden, ids, mask = torch.randn(64, 64), torch.tensor([2**40, -1, 0, 7]), torch.randn(64, 64)
    got = carry(described, (hidden, ids, mask))
    assert torch.equal(got[1], ids)
    assert torch.equal(got[2], mask)
    error = (got[0] - hidden).norm() / hidden.norm()
    assert 0.02 < error < 0.2, error


def test_a_bool_mask_crosses_as_it_is():
    mask = torch.rand(5, 3) > 0.5
    assert torch.equal(carry(channel(example(5, 3, dtype=torch.bool, gradient=False)), (mask,))[0], mask)


def test_evaluation_with_compression_off_is_exact_and_on_is_not():
    described, hidden = channel(example(8, 32)), torch.randn(8, 32)
    assert torch.equal(carry(described, (hidden,), "eval-off")[0], hidden)
    assert not torch.equal(carry(described, (hidden,), "eval-on")[0], hidden)


LEARNT = """
    from dataclasses import dataclass

    import torch

    from thinwire.compress.feedback import DifferenceFeedback


    @dataclass(frozen=True, repr=False)
    class Learnt(DifferenceFeedback):
        factor = torch.nn.Parameter(torch.tensor(0.5))

        def advance(self, message, decoded, buffer):
            super().advance(message, decoded.mul_(self.factor), buffer)

        def receive(self, decoded, buffer):
            super().receive(decoded.mul_(self.factor), buffer)
"""


def test_feedback_that_holds_parameters_carries_without_a_graph(monkeypatch):
    add_module(monkeypatch, "learnt", LEARNT)
    hidden = torch.randn(64, 4)
    (crossed,) = carry(channel(example(64, 4), codec="learnt.Learnt(q(8))"), (hidden,))
    assert torch.allclose(crossed, hidden / 2, atol=0.02)
    assert not crossed.requires_grad


def test_none_crosses_as_none():
    described = channel(example(4, 4), example(4, 4), name="gradients")
    present = torch.randn(4, 4)
    first, second = carry(described, (None, present))
    assert first is None
    assert torch.allclose(second, present, atol=0.5)


@pytest.mark.parametrize("name", ["activations", "sums"])
def test_only_gradients_of_a_boundary_may_be_none(name):
    """An owner's sum that said so left a replica with its own gradients in place of the sum, without a word."""
    described = channel(example(4, 4))
    if name == "sums":
        same = {"examples": described.examples, "method": described.method, "seed": described.seed}
        described = Lane(boundary=1, name=name, bucket=0, replica=0, to=1, to_all=True, replicas=2, **same)
    sender, receiver, _, link = ends(described)
    with pytest.raises(PipelineError, match=r"stage 1 announced .* but has \[None\]"):
        sender.send(which(), (None,))
    sender.send(which(), (torch.randn(4, 4),))
    frame = link._frames[0]
    seal(Header.read(frame.numpy().data)._replace(nones=1), frame.numpy().data, payload=True)
    room = torch.zeros(4, 4)
    with pytest.raises(WireError, match="tensor 0 is None, and only gradients between stages may be"):
        receiver.receive(which(), [room])


def test_a_frame_is_as_long_as_its_plan_in_every_phase_and_no_longer_than_the_capacity():
    described = channel(example(9, 31, dtype=torch.bfloat16), codec='q(3, scale="minmax", per="tensor")')
    planned = {}
    for phase in PHASES:
        sender, _, meter, link = ends(described)
        sender.send(which(phase), (torch.randn(9, 31).bfloat16(),))
        planned[phase] = sender.plan(which(phase)).nbytes
        (traffic,) = meter.sent.values()
        assert (traffic.bytes, traffic.uncompressed, traffic.elements) == (planned[phase], 2 * 9 * 31, 9 * 31)
        assert traffic.full_rows == (9 if phase == "eval-off" else 0)
        assert Header.read(link._frames[0].numpy().data).length == planned[phase] - HEADER_BYTES
        assert planned[phase] <= capacity_of(sender.coders)
    assert planned["train"] == planned["eval-on"] == HEADER_BYTES + 8 + math.ceil(9 * 31 * 3 / 8)
    assert planned["eval-off"] == HEADER_BYTES + 2 * 9 * 31


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_are_named_and_can_be_sent_on(bad):
    described, hidden = channel(example(4, 8)), torch.ones(4, 8)
    hidden[2, 3] = bad
    sender, _, _, _ = ends(described)
    with pytest.raises(
        NonFiniteError, match="stage 1 has NaN or infinity in the activations of micro-batch 6, train pass"
    ):
        sender.send(which("train", 5, 6), (hidden,))
    sender, receiver, _, _ = ends(described, WireOptions(nonfinite="send"))
    sender.send(which("train", 5, 6), (hidden,))
    (got,) = receiver.receive(which("train", 5, 6))
    assert not got[2].isfinite().any()
    assert torch.allclose(got[[0, 1, 3]], hidden[[0, 1, 3]], atol=0.1)


def test_large_finite_values_whose_sum_overflows_are_finite():
    hidden = torch.full((4, 8), 3e38)
    sender, _, _, _ = ends(channel(example(4, 8), codec="none"))
    sender.send(which("train", 0, 0), (hidden,))


@pytest.mark.parametrize("tensors", [(torch.ones(4, 7),), (torch.ones(4, 8).half(),), ()])
def test_tensors_that_were_not_announced_are_refused(tensors):
    sender, _, _, _ = ends(channel(example(4, 8)))
    with pytest.raises(PipelineError, match=r"stage 1 announced .*; give output_args"):
        sender.send(which("train", 0, 0), tensors)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("train", 1, 0), "step 0 where 1 was planned"),
        (("train", 0, 1), "microbatch 0 where 1 was planned"),
        (("eval-on", 0, 0), "phase train where eval-on was planned"),
        (("eval-off", 0, 0), "phase train where eval-off was planned, length 36 where 256 was planned"),
    ],
)
def test_a_frame_of_another_micro_batch_names_both_stages(asked, said):
    sender, receiver, _, _ = ends(channel(example(2, 32)))
    sender.send(which("train", 0, 0), (torch.randn(2, 32),))
    with pytest.raises(WireError, match=f"stage 2 received from stage 1, .*{said}"):
        receiver.receive(which(*asked))


def test_a_frame_of_another_boundary_is_refused():
    sender, receiver, _, _ = ends(channel(example(2, 32)))
    sender.channel = Channel(boundary=0, name="activations", examples=(example(2, 32),), method=parse("q(4)"), seed=3)
    sender.send(which("train", 0, 0), (torch.randn(2, 32),))
    with pytest.raises(WireError, match="boundary 0 where 1 was planned"):
        receiver.receive(which("train", 0, 0))


def test_a_corrupted_payload_is_refused_and_unnoticed_only_where_that_was_asked_for():
    for checked in (True, False):
        sender, receiver, _, link = ends(channel(example(2, 32)), WireOptions(checksum=checked))
        sender.send(which("train", 0, 0), (torch.randn(2, 32),))
        link._frames[0][HEADER_BYTES + 20] ^= 64
        assert Header.read(link._frames[0].numpy().data).crc32 != 0
        if checked:
            with pytest.raises(WireError, match="does not match its CRC-32"):
                receiver.receive(which("train", 0, 0))
        else:
            receiver.receive(which("train", 0, 0))


def test_buffers_are_reused_and_received_tensors_are_not_views_of_them():
    described = channel(example(4, 4), codec="none")
    sender, receiver, _, link = ends(described)
    seen = set()
    kept = []
    for step in range(3):
        sender.send(which("train", step, 0), (torch.full((4, 4), float(step)),))
        seen.add(link._frames[0].data_ptr())
        kept.append(receiver.receive(which("train", step, 0))[0])
    assert len(seen) == 1
    assert [float(tensor[0, 0]) for tensor in kept] == [0.0, 1.0, 2.0]


def test_random_numbers_come_from_the_key_alone():
    described, hidden = channel(example(16, 64), codec='q(2, round="stochastic")'), torch.randn(16, 64)
    first = carry(described, (hidden,), step=1, index=2)[0]
    torch.manual_seed(99)
    assert torch.equal(first, carry(described, (hidden,), step=1, index=2)[0])
    assert not torch.equal(first, carry(described, (hidden,), step=1, index=3)[0])
    assert not torch.equal(first, carry(described, (hidden,), step=2, index=2)[0])


AHEAD = 100.0
"""How far the sender's clock is ahead of the receiver's."""


class Crossing(MemoryEnd):
    """A link whose frames take three seconds, counted from when they were sent."""

    def __init__(self, capacity, clock):
        super().__init__(capacity)
        self._clock = clock

    def receive(self, what):
        self._clock.now = 8.0
        return super().receive(what)


@pytest.mark.parametrize(
    ("local_time", "parts"),
    [(lambda theirs: theirs - AHEAD, {"neighbour": 3.0, "wire": 3.0}), (lambda theirs: None, {"wait": 6.0})],
)
def test_a_wait_is_taken_apart_by_the_departure_that_the_frame_carries(monkeypatch, local_time, parts):
    """The receiver waits from 2 s on, the frame departs at 5 s and is there at 8 s: once all the wire's."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(meters, "time", clock)
    monkeypatch.setattr(boundary, "time", SimpleNamespace(perf_counter_ns=lambda: int(1e9 * (5.0 + AHEAD))))
    described, meter = channel(example(8, 8)), Meter()
    link = Crossing(capacity_of(coders(described, True)), clock)
    sender = Sender(described, coders(described, True), link, WireOptions(), Meter())
    receiver = Receiver(described, coders(described, False), link, WireOptions(), meter, local_time)
    sender.send(which(), (torch.randn(8, 8),))
    clock.now = 2.0
    receiver.receive(which())
    assert {name: spent for name, spent in meter.seconds.items() if spent} == pytest.approx(parts)


CODED = 'q(4, code="entropy")'


@pytest.mark.parametrize("codec", [CODED, f"ef21({CODED})", f"ef({CODED})"])
def test_frames_of_an_entropy_coder_are_as_short_as_their_payloads_and_both_ends_count_the_same(codec):
    described = channel(example(64, 256), example(3, dtype=torch.int64, gradient=False), example(64, 256), codec=codec)
    plain = channel(*described.examples, codec=codec.replace(', code="entropy"', ""))
    (sender, receiver, meter, link), (other, its_receiver, _, _) = ends(described), ends(plain)
    for step in range(3):
        tensors = (torch.randn(64, 256), torch.arange(3), torch.randn(64, 256))
        sender.send(which(step=step), tensors)
        length = HEADER_BYTES + Header.read(link._frames[0].numpy().data).length
        got = receiver.receive(which(step=step))
        other.send(which(step=step), tensors)
        for mine, theirs in zip(got, its_receiver.receive(which(step=step)), strict=True):
            assert torch.equal(mine, theirs)
        assert length < 0.95 * sender.plan(which(step=step)).nbytes
    assert meter.sent == meter.received
    assert sender.digests() == receiver.digests() == other.digests()


def test_a_frame_whose_payloads_end_elsewhere_changes_no_buffer():
    described = channel(example(64, 256), codec=f"ef21({CODED})")
    sender, receiver, _, link = ends(described)
    sender.send(which(), (torch.randn(64, 256),))
    receiver.receive(which())
    before = receiver.digests()
    sender.send(which(step=1), (torch.randn(64, 256),))
    frame = link._frames[0]
    header = Header.read(frame.numpy().data)
    frames.seal(header._replace(length=header.length - 8), frame.numpy().data, payload=True)
    with pytest.raises(WireError, match=r"the frame has \d+ bytes, but its payloads end at \d+"):
        receiver.receive(which(step=1))
    assert receiver.digests() == before


def test_predictions_count_what_gaussian_data_take():
    described = channel(example(64, 256), codec=CODED)
    sender, _, meter, _ = ends(described)
    sender.send(which(), (torch.randn(64, 256),))
    planned = sender.plan(which()).nbytes
    counted = frame_length(described.examples, described.method, described.method)
    assert counted < 0.95 * planned
    assert counted == pytest.approx(sum(traffic.bytes for traffic in meter.sent.values()), rel=0.01)
    assert frame_length(described.examples, parse("q(4)"), parse("q(4)")) == planned - 4


def test_sums_in_float64_go_as_they_are_beside_what_is_coded():
    """Vectors alone: in other shapes float64 is the type of a model of the user's own, which compresses."""
    hidden, sums, wide = example(4, 6), example(8, dtype=torch.float64), example(4, 6, dtype=torch.float64)
    described = channel(hidden, sums, wide, name="gradients")
    assert [str(method) for method in described.methods] == ["q(4)", "none", "q(4)"]
    values = torch.arange(8).double() / 3
    _, arrived, _ = carry(described, (torch.randn(4, 6), values, torch.randn(4, 6).double()))
    assert torch.equal(arrived, values)
    alone, beside = (frame_length(given, parse("q(4)"), parse("none")) for given in ((hidden,), (hidden, sums)))
    assert beside == place_of(64, alone).stop
