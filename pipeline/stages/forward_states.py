"""What torch keeps of a micro-batch between its forward and its backward: the one place where releases differ.

torch 2.11 to 2.14 keep a pair in `fwd_cache`, torch 2.15 an object in `_forward_chunk_states`. A stage is Any here,
since each release has one of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thinwire.pipeline.errors import OptionsError


def require_forward_states(stage: Any) -> None:
    """OptionsError if this torch keeps them elsewhere; the constructor asks, before anything is sent."""
    if not hasattr(stage, "_forward_chunk_states") and not hasattr(stage, "fwd_cache"):
        raise OptionsError(
            f"CompressedStage works with torch 2.11 to 2.15, got torch {torch.__version__}, which keeps the states of "
            f"micro-batches elsewhere; install one of these releases"
        )


def replace_inputs(stage: Any, microbatch: int, leaves: Sequence[Any]) -> None:
    """Let torch read gradients off the leaves, in place of the first inputs. Outputs of the last stage are let go.

    Its gradients come from the loss, and its outputs may be objects of the user's own.
    """
    if hasattr(stage, "_forward_chunk_states"):
        state = stage._forward_chunk_states[microbatch]
        state.input_values = [*leaves, *state.input_values[len(leaves) :]]
        if stage.is_last:
            state.live_outputs, state.output_grad_edges = [], ()
            state.releasable, state.send_pending = (), []
        return
    outputs, inputs = stage.fwd_cache[microbatch]
    stage.fwd_cache[microbatch] = (() if stage.is_last else outputs, [*leaves, *inputs[len(leaves) :]])


def drop(stage: Any, microbatch: int) -> None:
    """Forget a micro-batch that has no backward."""
    states = stage._forward_chunk_states if hasattr(stage, "_forward_chunk_states") else stage.fwd_cache
    del states[microbatch]
