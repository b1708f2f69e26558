"""Replicas of one stage in this process, without a pipeline: they exchange the gradients that a test gives them."""

from datetime import timedelta

import torch
from torch.nn import Parameter

from thinwire.compress import Progress, parse
from thinwire.pipeline.meters import Meter
from thinwire.pipeline.options import WireOptions
from thinwire.pipeline.replicas.ends import LaneEnds
from thinwire.pipeline.replicas.exchange import StageExchange
from thinwire.pipeline.replicas.layout import FLAT
from thinwire.pipeline.replicas.member import BucketMember, Setting, never

SHAPES = {"wide": (3, 700), "bias": (5,), "long": (1000,)}
"""3105 elements, so 7 rows, the last one ragged: of three replicas the first owns three rows, the others two."""
SIZE = 3105
REPLICAS = 3
STEPS_PER_EPOCH = 50


class Replica:
    """One replica of a stage with these parameters."""

    def __init__(self, number, count, links, expression, in_full, layout=FLAT, member=BucketMember):
        self.number = number
        self.parameters = {name: Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        self.meter = Meter()
        setting = Setting(
            stage=1,
            replicas=count,
            method=parse(expression),
            seed=3,
            options=WireOptions(),
            meter=self.meter,
            in_full=in_full,
            layout=layout,
        )
        self.exchange = StageExchange(self.parameters, setting, [number], links, member, lambda mine: [mine])

    @property
    def flat(self):
        """The gradients of all parameters, as one row."""
        return torch.cat([parameter.grad.flatten() for parameter in self.parameters.values()])

    @property
    def weights(self):
        """All parameters, as one row."""
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters.values()])

    def set_gradients(self, flat):
        """Give the parameters these gradients, a row of all elements."""
        parts = flat.split([parameter.numel() for parameter in self.parameters.values()])
        for parameter, part in zip(self.parameters.values(), parts, strict=True):
            parameter.grad = part.view_as(parameter).clone()


def make(expression, count=REPLICAS, in_full=never, **how):
    """So many replicas that exchange through a codec."""
    links = LaneEnds(range(count), None, 2, timedelta(seconds=1))
    return [Replica(number, count, links, expression, in_full, **how) for number in range(count)]


def gradients(step, count=REPLICAS):
    """The gradients of each replica in a step, flat."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(count, SIZE, generator=generator) * torch.linspace(0.1, 3, SIZE)


def exchange(replicas, step):
    """Add up the gradients that the replicas have."""
    progress = Progress(step, STEPS_PER_EPOCH)
    for replica in replicas:
        replica.exchange.submit(replica.number, progress)
    for replica in replicas:
        replica.exchange.add_up(progress)
    for replica in replicas:
        replica.exchange.finish(progress)


def exchanged(replicas, given, step):
    """What each replica has after the exchange of a step, flat."""
    for replica, flat in zip(replicas, given, strict=True):
        replica.set_gradients(flat)
    exchange(replicas, step)
    return [replica.flat for replica in replicas]
