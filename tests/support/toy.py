"""A small pipeline for tests: linear layers with dropout, cut anywhere, on real processes or all in one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from thinwire.compress import SlotCounts, parse
from thinwire.models.layers import Layer, Stage
from thinwire.pipeline.measuring.meters import Meter
from thinwire.pipeline.options import (
    CompressionOptions,
    OptimizerOptions,
    PipelineOptions,
    ReplicaOptions,
    SyncOptions,
    TrainingOptions,
    WireOptions,
)
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.replicas.exchange import connect
from thinwire.pipeline.replicas.shared import SharedWeights
from thinwire.pipeline.schedules import actions, build, build_merged, merge, process_of_stages
from thinwire.pipeline.stages.compressed_stage import CompressedStage
from thinwire.pipeline.training.optimization import Update, WholeBatchLoss
from thinwire.pipeline.training.runner import Runner
from thinwire.pipeline.training.sync import sync_of
from thinwire.pipeline.training.trainer import Trainer
from thinwire.pipeline.wire.wire import Wire

WIDTH = 12
IGNORE = -100
needs_inference = pytest.mark.skipif(
    not hasattr(PipelineStage, "_forward_metadata_inference"), reason="this torch learns no shapes"
)


class Samples:
    """Vectors with several targets each, some of them masked: sample 0's all are."""

    lengths = None

    def __len__(self):
        return 64

    def inputs(self, ids, epoch):
        return torch.stack([torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(int(id))) for id in ids])

    def targets(self, ids):
        targets = (ids[:, None] + torch.arange(3)) % WIDTH
        targets[(ids[:, None] * torch.tensor([1, 2, 3])) % 5 == 0] = IGNORE
        return targets

    def side(self, ids):
        return {}


class ScaledSamples(Samples):
    """With a side input that every stage multiplies by."""

    def side(self, ids):
        return {"scale": 1 + ids.view(-1, 1, 1) / 64}


class Task:
    def loss_sum(self, output, target):
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORE, reduction="sum")

    def num_valid(self, target):
        return int((target != IGNORE).sum())

    def observe(self, output, target):
        correct = (output.argmax(-1) == target) & (target != IGNORE)
        return correct.sum(dtype=torch.float64).view(1)

    def metrics(self, mean_loss, counts):
        return {"correct": float(counts[0])}


class Batch:
    def __init__(self, epoch, ids):
        self.epoch, self.ids, self.valid = epoch, ids, torch.ones(len(ids), dtype=torch.bool)


class Sampler:
    def __init__(self, size):
        self.size = size

    @property
    def steps_per_epoch(self):
        return max(1, 16 // self.size)

    def batch(self, step):
        return Batch(0, (torch.arange(self.size) + step * self.size) % 16)


class Scaled(Layer):
    """Modules in a row, the first one's output times a side input where there is one."""

    optional_side = ("scale",)

    def __init__(self, *modules):
        super().__init__()
        self.row = nn.Sequential(*modules)
        self.parts = {"": self.row}

    def forward(self, x, scale=None):
        first, *others = self.row
        x = first(x) if scale is None else first(x) * scale
        for layer in others:
            x = layer(x)
        return x


def module(index, dropout=0.0, depth=1, norm=False):
    """The module of stage `index`: its values depend on the index only."""
    torch.manual_seed(index)
    norms = [nn.BatchNorm1d(3)] if norm else []
    layers = [(nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout), *norms, nn.Tanh()) for _ in range(depth)]
    return Stage([Scaled(*(part for layer in layers for part in layer))])


def row_of(stage):
    """The modules of a stage, one after the other."""
    [layer] = stage.submod.layers
    return layer.row


def unsplit(num_stages, dropout=0.0, depth=1, norm=False):
    return nn.Sequential(*(module(index, dropout, depth, norm) for index in range(num_stages)))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a test may change of the toy; options of other parts are given as their fields."""

    schedule: str = "gpipe"
    num_stages: int = 2
    microbatches: int = 4
    microbatch_size: int = 2
    accumulation: int = 1
    dropout: float = 0.0
    depth: int = 1
    """Layers with weights in each stage."""
    norm: bool = False
    """Whether each layer has a batch norm."""
    steps: int = 3
    simulated: bool = False
    compression: Mapping[str, Any] = field(default_factory=dict)
    wire: Mapping[str, Any] = field(default_factory=lambda: {"timeout": 60.0})
    optimizer: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.05, "max_grad_norm": 0.5})
    samples: type[Samples] = Samples
    shared: bool = False
    """Whether every stage has the layer of the first one, as weights that stages share."""
    replicas: int = 1
    exchange: str = "none"
    sync: Mapping[str, Any] = field(default_factory=dict)

    @property
    def replica_options(self):
        return ReplicaOptions(count=self.replicas, gradients=self.exchange, sync=SyncOptions(**self.sync))

    def batch_size(self, replica=None):
        """Samples of a replica in a step, or of all."""
        return self.pipeline.batch_size * (self.replicas if replica is None else 1)

    @property
    def pipeline(self):
        return PipelineOptions(
            num_stages=self.num_stages,
            schedule=self.schedule,
            num_microbatches=self.microbatches,
            microbatch_size=self.microbatch_size,
            accumulation=self.accumulation,
        )

    def placement(self, rank):
        if self.simulated:
            return Placement(dict.fromkeys(range(self.num_stages), 0))
        replica, count = rank // self.pipeline.num_processes, self.pipeline.num_processes
        alone = process_of_stages(self.schedule, self.num_stages, count)
        return Placement({stage: process + replica * count for stage, process in alone.items()}, replica, self.replicas)


def make_stages(setting, rank, where):
    """The stages of one process on a wire of their own, not yet connected."""
    wire = Wire(
        CompressionOptions(**setting.compression),
        WireOptions(**setting.wire),
        seed=5,
        slots=SlotCounts(
            positions=setting.batch_size(where.replica_of(rank)),
            samples=64,
            evaluation_samples=64,
        ),
        group=where.pipeline,
    )
    example = torch.empty(setting.microbatch_size, 3, WIDTH, device="meta")
    return [
        CompressedStage(
            module(0 if setting.shared else index, setting.dropout, setting.depth, setting.norm),
            index,
            setting.num_stages,
            torch.device("cpu"),
            input_args=example,
            output_args=example,
            group=where.pipeline,
            wire=wire,
            first_layer=index,
        )
        for index in where.stages_of(rank)
    ]


def make_schedule(setting, stages, loss):
    """Torch's schedule; a simulation runs the actions of all processes in one order."""
    if not setting.simulated:
        return build(setting.schedule, stages, setting.microbatches, loss)
    pipeline = setting.pipeline
    order = actions(pipeline.schedule, pipeline.num_stages, pipeline.num_processes, pipeline.num_microbatches)
    return build_merged(merge(order), stages, setting.microbatches, loss)


def shared_weights(setting, stages, where):
    """The weights that all stages share, if they share any."""
    sharing = stages if setting.shared else []
    copies = {stage.stage_index: dict(stage.submod.named_parameters()) for stage in sharing}
    holders = range(setting.num_stages) if setting.shared else []
    return SharedWeights(stages, copies, holders, where, parse("none"))


def make_trainer(rank, *, where=None, **options):
    """A trainer over the stages of one process, connected; the options are fields of `Setting`.

    `where` is the placement of an earlier trainer of the process, for another one beside it.
    """
    setting = Setting(**options)
    optimizer, options = OptimizerOptions(**setting.optimizer), setting.replica_options
    where = where or collectives.connected(setting.placement(rank), timedelta(seconds=60))
    stages, task = make_stages(setting, rank, where), Task()
    loss, shared = WholeBatchLoss(task, Meter()), shared_weights(setting, stages, where)
    training = TrainingOptions(steps=setting.steps)
    runner = Runner(stages, make_schedule(setting, stages, loss), loss)
    replicas = connect(stages, where, options, {}, optimizer.sends_in_full)
    trainer = Trainer(
        runner=runner,
        placement=where,
        samples=setting.samples(),
        sampler=Sampler(setting.batch_size()),
        task=task,
        sync=sync_of(stages, where, replicas, setting.pipeline, optimizer, shared, training.steps),
        update=Update(stages, where, optimizer, training.steps, shared),
    )
    for stage in stages:
        stage.connect()
    return trainer


def train(rank, options):
    """Train; (losses if the last stage lives here, stage -> weights after training, stage -> traffic)."""
    trainer = make_trainer(rank, **options)
    losses = []
    trainer.train(lambda record: losses.append(record.loss))
    weights = {
        stage.stage_index: {name: tensor.clone() for name, tensor in stage.submod.state_dict().items()}
        for stage in trainer.stages
    }
    traffic = {stage.stage_index: dict(stage.meter.sent) for stage in trainer.stages}
    digests = {stage.stage_index: stage.digests() for stage in trainer.stages}
    return (losses if trainer.reports else None), weights, traffic, digests
