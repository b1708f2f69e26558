"""SparseLoCo between replicas: a frame read by the readers of the documentation alone, its bits, its arithmetic."""

import struct
from datetime import timedelta

import torch
from torch.nn import Parameter

from support.codec_contract import documented
from thinwire.compress import Progress, parse
from thinwire.pipeline.measuring.meters import Meter
from thinwire.pipeline.options import WireOptions
from thinwire.pipeline.replicas.lane import LaneEnds
from thinwire.pipeline.replicas.layout import TILES
from thinwire.pipeline.replicas.member import Setting
from thinwire.pipeline.replicas.stage_exchange import StageExchange

PUBLISHED = 'ef(topk(0.015625, values="means(2)", code="entropy"), decay=0.95)'
REPLICAS = 2


class Recorded(LaneEnds):
    """Ends that keep the bytes of every frame, by its sender."""

    def __init__(self):
        super().__init__(range(REPLICAS), None, 1, timedelta(seconds=1))
        self.frames = {replica: [] for replica in range(REPLICAS)}

    def sending(self, lane, to, capacity):
        end = super().sending(lane, to, capacity)
        send = end.send

        def kept(buffer, nbytes, what, seal):
            nbytes = seal(buffer, nbytes)
            self.frames[lane.replica].append(bytes(buffer[:nbytes].tolist()))
            send(buffer, nbytes, what)

        end.send = kept
        return end


def make(shapes):
    """The exchange of both replicas of a stage with these shapes, its parameters, its frames and its meter."""
    ends, meter = Recorded(), Meter()
    parameters = {str(index): Parameter(torch.zeros(shape)) for index, shape in enumerate(shapes)}
    setting = Setting(
        stage=0,
        replicas=REPLICAS,
        here=range(REPLICAS),
        to_all=True,
        links=ends,
        everyone=list,
        method=parse(PUBLISHED),
        seed=0,
        options=WireOptions(),
        meter=meter,
        layout=TILES,
    )
    exchange = StageExchange(parameters, setting)
    return exchange, list(parameters.values()), ends.frames, meter


def drawn(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def exchanged(exchange, parameters, moved, step):
    """The sum of what both replicas moved, as it arrives."""
    for replica, tensors in enumerate(moved):
        for parameter, tensor in zip(parameters, tensors, strict=True):
            parameter.grad = tensor.clone()
        exchange.submit(replica, Progress(step, 10))
    exchange.add_up(Progress(step, 10))
    exchange.finish(Progress(step, 10))
    return [parameter.grad.clone() for parameter in parameters]


def test_a_frame_is_read_by_the_readers_of_the_documentation():
    shapes = [(130, 70), (512, 256), (5,), (3, 40)]
    exchange, parameters, frames, _ = make(shapes)
    total = exchanged(exchange, parameters, [drawn(shapes, 1), drawn(shapes, 2)], 30)
    rows = 34 + 1  # 34 tiles, and 130 * 70 - 2 * 4096 + 5 + 120 elements that are in none
    found = []
    for replica in range(REPLICAS):
        [frame] = frames[replica]
        payload = frame[64:]
        [length] = struct.unpack("<I", payload[:4])
        assert length == len(payload) == struct.unpack("<Q", frame[32:40])[0]
        start = 4 + 16 + rows * 64 // 4
        values = documented("read_means")(payload[4:start], rows * 64)
        places = documented("read_gaps", "uncoded", "read_integers")(payload[start:], rows, 4096, 64)
        elements = [0.0] * (rows * 4096)
        for place, value in zip(places, values, strict=True):
            elements[place] = value
        found.append(documented("parameters")(elements, [list(shape) for shape in shapes]))
    for index, got in enumerate(total):
        read = torch.tensor(found[0][index]) + torch.tensor(found[1][index])
        assert torch.equal(got.flatten(), read)


def test_it_is_the_published_arithmetic():
    """e <- 0.95 e + d; s = the 64 largest of each tile of e; e <- e - s."""
    shapes = [(128, 64)]
    exchange, parameters, _, _ = make(shapes)
    errors = torch.zeros(REPLICAS, 128, 64)
    for step in range(4):
        moved = [drawn(shapes, 10 * step), drawn(shapes, 10 * step + 1)]
        total = torch.zeros(128, 64)
        for replica in range(REPLICAS):
            errors[replica] = 0.95 * errors[replica] + moved[replica][0]
            tiles = errors[replica].view(2, 4096)
            kept = tiles.abs().topk(64).indices
            values = tiles.gather(1, kept)
            sent = torch.zeros(2, 4096).scatter_(1, kept, in_two_bits(values))
            errors[replica] -= sent.view(128, 64)
            total += sent.view(128, 64)
        [got] = exchanged(exchange, parameters, moved, step)
        torch.testing.assert_close(got, total, rtol=1e-5, atol=1e-5)


def in_two_bits(values):
    """Four bins over three standard deviations, each as its mean."""
    middle, deviation = values.mean(), values.std()
    edges = middle + torch.tensor([-1.5, 0.0, 1.5]) * deviation
    bins = torch.bucketize(values, edges, right=True)
    return sum(torch.where(bins == each, values[bins == each].mean(), 0.0) for each in bins.unique())


def test_it_takes_fewer_than_a_two_hundredth_of_float32():
    shapes = [(1024, 1024)]
    exchange, parameters, frames, meter = make(shapes)
    exchanged(exchange, parameters, [drawn(shapes, 1), drawn(shapes, 2)], 0)
    carried = meter.sent[0, "parts", "train"]
    assert carried.bytes == sum(len(frame) for each in frames.values() for frame in each)
    assert carried.elements == REPLICAS * 1024 * 1024
    assert 200 < 32 / carried.bits_per_element < 217, carried.bits_per_element
