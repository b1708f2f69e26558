"""NeMo AutoModel's pipeline with a tiny Llama in two processes on a CPU: a script; its output is what each run found.

    nemo_run.py NAME=CODECS[;SCHEDULE]...

Runs each NAME in turn: with torch's own stage where CODECS is torch, else with CompressedStage.
"""

import json
import sys

import torch
import torch.distributed as dist
from nemo_automodel.components.distributed.pipelining import functional
from nemo_automodel.components.distributed.pipelining.autopipeline import AutoPipeline
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from thinwire.pipeline import CompressedStage, compressed

TORCHS = functional.PipelineStage
VOCABULARY, ROWS = 64, 8
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
    use_cache=False,
)


def loss_of(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def trained(codecs, schedule="1f1b"):
    """The losses of each step and the squared norm of its gradients, and the bytes sent and those without compression.

    One step has longer sequences than the others.
    """
    functional.PipelineStage = TORCHS if codecs == "torch" else CompressedStage
    torch.manual_seed(0)
    pipe = AutoPipeline(
        world_mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)),
        dp_axis_names=(),
        pp_schedule=schedule,
        pp_microbatch_size=2,
        pp_batch_size=ROWS,
        device=torch.device("cpu"),
        dtype=torch.float32,
        layers_per_stage=2 if schedule == "1f1b" else 1,
        scale_grads_in_schedule=True,
    )
    with compressed("none" if codecs == "torch" else codecs):
        pipe.build(LlamaForCausalLM(CONFIG), loss_fn=loss_of)
    parameters = [parameter for part in pipe.parts for parameter in part.parameters()]
    optimizer, steps = torch.optim.AdamW(parameters, lr=0.001), []
    for step, length in enumerate((16, 24, 16)):
        first = torch.randint(0, VOCABULARY, (ROWS, 1), generator=torch.Generator().manual_seed(step))
        ids = (first + torch.arange(length + 1)) % VOCABULARY
        pipe.update_seq_len(length)
        losses = []
        target = {"target": ids[:, 1:].contiguous(), "losses": losses} if pipe.info.has_last_stage else {}
        pipe.step(ids[:, :-1].contiguous(), **target)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        steps.append([[loss.item() for loss in losses], sum(g.square().sum().item() for g in gradients)])
        optimizer.step()
        optimizer.zero_grad()
    sent = [] if codecs == "torch" else [each for stage in pipe.info.stages for each in stage.meter.sent.values()]
    return {
        "steps": steps,
        "bytes": sum(each.bytes for each in sent),
        "uncompressed": sum(each.uncompressed for each in sent),
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    runs = [run.partition("=")[::2] for run in sys.argv[1:]]
    print("found", json.dumps({name: trained(*given.split(";")) for name, given in runs}), flush=True)
    dist.destroy_process_group()
