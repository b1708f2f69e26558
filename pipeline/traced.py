"""Stages of a model that torch traced and cut (`torch.distributed.pipelining.pipeline`)."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Pipe
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.stage import CompressedStage
from thinwire.pipeline.wire.wire import Wire


def stage_from(
    pipe: Pipe,
    stage_index: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    *,
    wire: Wire | None = None,
    first_layer: int | None = None,
) -> CompressedStage:
    """A stage of a traced model, in place of `pipe.build_stage`; the examples are those that it was traced with.

    An input of the model that a later stage needs too, such as a mask, is given to the schedule there by its name.

    Raises OptionsError if the model has a skip connection: a stage must take all that the stage before returns, and
    nothing else of other stages.
    """
    nodes = [node for node in pipe.info().graph.nodes if node.op in ("call_module", "output")]
    for index, (before, node) in enumerate(pairwise(nodes)):
        returned = [(before, position) for position in range(len(_outputs(pipe.get_stage_module(index))))]
        taken = [_source(arg) for arg in tree_leaves(node.args) if isinstance(arg, Node) and arg.op != "placeholder"]
        if not (set(taken) <= set(returned) if node.op == "output" else taken == returned):
            found = ", ".join(f"{position} of {_name(source)}" for source, position in taken)
            raise OptionsError(
                f"a traced model must have no skip connections: {_name(node)} must take what {_name(before)} returns, "
                f"all of it in its order, got {found}; return what a later stage needs from each stage before it, or "
                f"use CompressedStage with modules of your own"
            )
    module = pipe.build_stage(stage_index, device, group).submod  # on the device, and so are tensors that it creates
    assert isinstance(module, GraphModule), "a traced stage is a graph"
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    received = [
        placeholder
        for placeholder, arg in zip(placeholders, nodes[stage_index].args, strict=True)
        if stage_index == 0 or arg.op != "placeholder"
    ]
    return CompressedStage(
        module,
        stage_index,
        pipe.num_stages,
        device,
        input_args=_examples(received),
        output_args=_examples(_outputs(module)),
        group=group,
        wire=wire,
        first_layer=first_layer,
    )


def _source(arg: Node) -> tuple[Node, int]:
    """The stage that returns a tensor, and its position among what that returns."""
    if arg.target is operator.getitem:
        stage, position = arg.args
        assert isinstance(stage, Node) and isinstance(position, int)
        return stage, position
    return arg, 0


def _outputs(module: nn.Module) -> list[Node]:
    assert isinstance(module, GraphModule), "a traced stage is a graph"
    [output] = [node for node in module.graph.nodes if node.op == "output"]
    return tree_leaves(output.args)


def _examples(nodes: Sequence[Node]) -> tuple[Tensor, ...]:
    values: list[Any] = [node.meta["val"] for node in nodes]
    return tuple(torch.empty(value.shape, dtype=value.dtype, device="meta") for value in values)


def _name(node: Node) -> str:
    return "what the model returns" if node.op == "output" else str(node.target)
