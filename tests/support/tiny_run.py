"""A recipe as small as can be, prepared and run in this process."""

from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist

from thinwire.launch.folder.policy import all_held
from thinwire.launch.plan.places import simulated_placement
from thinwire.launch.plan.training import prepare_training
from thinwire.launch.recipe import recipe
from thinwire.launch.run.run import Run

SMALL = """
model:
  name: gpt2
  config:
    {vocab_size: 256, n_layer: 2, n_embd: 16, n_head: 2, n_positions: 16, resid_pdrop: 0, embd_pdrop: 0, attn_pdrop: 0}
data: {name: text, block_size: 16, held_out: 0.08}
pipeline: {num_stages: 2, num_microbatches: 2, microbatch_size: 2}
"""
"""The model, data and pipeline of several tests."""
RECIPE = f"""{SMALL}
compression: {{activations: q(4), gradients: q(8)}}
training: {{steps: 2}}
"""
TEXT = (bytes(range(32, 132)) * 18)[:1736]
# of which 1597 and 139 bytes are in blocks of 16 with a byte behind: 99 samples to train on, 8 held out
STEPS_PER_EPOCH = 99 // 4


def write_recipe(folder):
    """Write `tiny.yaml` and its text."""
    (folder / "tiny.yaml").write_text(RECIPE)
    (folder / "text").write_bytes(TEXT)


def prepared(*options):
    """The recipe `tiny.yaml` of the current folder with options, prepared."""
    return prepare_training(recipe.parse(["tiny.yaml", *options]), copies=0)


@contextmanager
def alone():
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def ran(*options):
    """The run of `tiny.yaml` with options, after it has ended."""
    ready = prepared(*options)
    ready.recipe.folder.mkdir(parents=True, exist_ok=True)
    with alone(), all_held(ready.recipe):
        run = Run(replace(ready, recipe=ready.recipe.again), simulated_placement(ready.recipe))
        run.go()
    return run
