"""torchtitan with a tiny Llama in two processes on a CPU: a script; what each run found is its output, as JSON.

    torchtitan_run.py NAME=CODECS[;SCHEDULE[;SAVES[;STEP]]]...

Runs each NAME in turn: with torch's own stage where CODECS is torch, else with CompressedStage.
"""

import json
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist

# torchtitan asks for a GPU when it is imported, and for its memory later
torch._utils._get_available_device_type = lambda: "cpu"
for name, value in {
    "set_device": lambda device: None,
    "get_device_name": lambda device: "cpu",
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "get_device_properties": lambda device: SimpleNamespace(total_memory=1 << 30),
    "reset_peak_memory_stats": lambda: None,
    "empty_cache": lambda: None,
    "memory_stats": lambda device: {},
}.items():
    setattr(torch.cpu, name, value)

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import pipeline_parallel  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from thinwire.pipeline import CompressedStage, SavedStages, compressed  # noqa: E402

TORCHS = pipeline_parallel.PipelineStage
STEPS = 4


class Tokens(BaseDataLoader):
    """Sequences that count up."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, seq_len, local_batch_size, **rest):
        self.rows, self.length, self.taken = local_batch_size, seq_len, 0

    def __iter__(self):
        while True:
            generator = torch.Generator().manual_seed(self.taken)
            self.taken += 1
            ids = torch.randint(0, 64, (self.rows, 1), generator=generator) + torch.arange(self.length + 1)
            yield {"input": ids[:, :-1].clone()}, ids[:, 1:].clone()

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **rest):
        super().__init__()

    def encode(self, *args, **options):
        return []

    def decode(self, *args, **options):
        return ""

    def get_vocab_size(self):
        return 2048


class Kept(MetricsProcessor):
    """Keeps the losses and norms that torchtitan prints."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config, **rest):
        super().__init__(config, **rest)
        self.kept = []

    def log(self, step, loss, largest, norm, extra_metrics=None):
        self.kept.append((loss, norm))


def configured(folder, schedule, saves, goes_on_from):
    spec = model_registry("debugmodel")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        tokenizer=NoTokenizer.Config(),
        dataloader=Tokens.Config(),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(local_batch_size=4, seq_len=16, steps=STEPS, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(pipeline_parallel_degree=2, pipeline_parallel_schedule=schedule),
        metrics=Kept.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(
            enable=saves,
            interval=STEPS // 2,
            load_step=goes_on_from,
            last_save_model_only=False,
            exclude_from_loading=[],
        ),
        activation_checkpoint=None,
        dump_folder=folder,
        debug=DebugConfig(seed=1, enable_structured_logging=False),
    )


def trained(codecs, schedule="1F1B", saves=None, goes_on_from=-1):
    """The loss and norm of each step, and the bytes sent and those without compression.

    With `saves`, a folder has every second step, and training goes on from one of them.
    """
    pipeline_parallel.PipelineStage = TORCHS if codecs == "torch" else CompressedStage
    with compressed("none" if codecs == "torch" else codecs):
        trainer = configured(f"outputs/{saves}", schedule, saves is not None, int(goes_on_from)).build()
    schedule = trainer.pp_schedule
    stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    if saves:
        trainer.checkpointer.states["thinwire"] = SavedStages(*stages)
    trainer.train()
    sent = [] if codecs == "torch" else [each for stage in stages for each in stage.meter.sent.values()]
    trainer.close()
    return {
        "steps": trainer.metrics_processor.kept,
        "bytes": sum(each.bytes for each in sent),
        "uncompressed": sum(each.uncompressed for each in sent),
    }


if __name__ == "__main__":
    time.sleep = lambda seconds: None  # torchtitan waits two seconds at its end
    dist.init_process_group("gloo")
    dist.init_process_group = lambda **options: None  # torchtitan's, once for all runs
    runs = [run.partition("=")[::2] for run in sys.argv[1:]]
    print("found", json.dumps({name: trained(*given.split(";")) for name, given in runs}), flush=True)
    dist.destroy_process_group()
