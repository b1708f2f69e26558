"""Replicas of one stage in this process, without a pipeline: they exchange the gradients that a test gives them."""

from datetime import timedelta

import torch
from torch.nn import Parameter

from thinwire.compress import Progress
from thinwire.pipeline.measuring.meters import Meter
from thinwire.pipeline.options import ReplicaOptions, WireOptions
from thinwire.pipeline.replicas.lane import LaneEnds
from thinwire.pipeline.replicas.layout import FLAT
from thinwire.pipeline.replicas.member import Setting, never
from thinwire.pipeline.replicas.stage_exchange import StageExchange

SHAPES = {"wide": (3, 700), "bias": (5,), "long": (1000,)}
"""3105 elements, so 7 rows, the last one ragged: of three replicas the first owns three rows, the others two."""
SIZE = 3105
REPLICAS = 3
STEPS_PER_EPOCH = 50


class Replica:
    """One replica of a stage with these parameters; with several `here`, the stage of a simulation of them."""

    def __init__(
        self,
        number,
        options,
        links,
        shapes,
        in_full,
        *,
        layout=FLAT,
        to_all=False,
        here=None,
        everyone=lambda mine: [mine],
    ):
        here = [number] if here is None else here
        self.number = number
        self.parameters = {name: Parameter(torch.zeros(shape, dtype=torch.float32)) for name, shape in shapes.items()}
        self.meter = Meter()
        setting = Setting(
            stage=1,
            replicas=options.count,
            here=here,
            to_all=to_all,
            links=links,
            everyone=everyone,
            method=options.method,
            seed=3,
            options=WireOptions(),
            meter=self.meter,
            in_full=in_full,
            layout=layout,
        )
        self.exchange = StageExchange(self.parameters, setting)

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


def make(expression, count=REPLICAS, in_full=never, shapes=SHAPES, **how):
    """So many replicas that exchange through a codec."""
    links = LaneEnds(range(count), None, 2, timedelta(seconds=1))
    options = ReplicaOptions(count=count, gradients=expression)
    return [Replica(number, options, links, shapes, in_full, **how) for number in range(count)]


def simulated(expression, count=2, shapes=SHAPES, **how):
    """A stage of a simulation: so many replicas that exchange through a codec, on one copy of the parameters."""
    links = LaneEnds(range(count), None, 2, timedelta(seconds=1))
    options = ReplicaOptions(count=count, gradients=expression)
    return Replica(0, options, links, shapes, never, here=range(count), **how)


def take_turns(stage, given, step, unused=()):
    """Exchange what the replicas of a simulation have, a flat row each; `unused` are the parameters without, of each.

    Returns the gradients afterwards by name, None for those that have none.
    """
    progress = Progress(step, STEPS_PER_EPOCH)
    for number, flat in enumerate(given):
        stage.set_gradients(flat)
        for name in unused[number] if unused else ():
            stage.parameters[name].grad = None
        stage.exchange.submit(number, progress)
    stage.exchange.add_up(progress)
    stage.exchange.finish(progress)
    return {name: parameter.grad for name, parameter in stage.parameters.items()}


def gradients(step, count=REPLICAS, size=SIZE):
    """The gradients of each replica in a step, flat."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(count, size, generator=generator) * torch.linspace(0.1, 3, size)


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
