"""Stages of a model that torch traced and cut (`torch.distributed.pipelining.pipeline`)."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Pipe
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from thinwire.errors import ThinwireWarning
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.stages.compressed_stage import CompressedStage
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

    The first stage takes the model's inputs in their order. One that a later stage needs too, such as a mask, is given
    to the schedule there by its name. A weight that several stages use has a copy in each, and a warning says so.

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
    _sort_inputs(pipe, module, node := nodes[stage_index])
    _warn_of_copies(pipe, str(node.target))
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    received = [
        placeholder
        for placeholder, arg in zip(placeholders, node.args, strict=True)
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


def _sort_inputs(pipe: Pipe, module: GraphModule, call: Node) -> None:
    """Put what a stage takes from the one before first, then inputs of the model in their order; torch sorts by use."""
    inputs = [node for node in call.graph.nodes if node.op == "placeholder"]
    order = sorted(
        range(len(call.args)), key=lambda at: inputs.index(call.args[at]) + 1 if call.args[at] in inputs else 0
    )
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for one, following in pairwise(placeholders[at] for at in order):
        one.append(following)
    call.args = tuple(call.args[at] for at in order)
    module.recompile()
    pipe.split_gm.recompile()


def _warn_of_copies(pipe: Pipe, stage: str) -> None:
    """Warn of each weight of a stage that is one weight with those of other stages, and trains."""
    for names in pipe.replicated_params:
        if stage in names and pipe.split_gm.get_submodule(stage).get_parameter(names[stage]).requires_grad:
            others = ", ".join(f"{name} of {place}" for place, name in names.items() if place != stage)
            warnings.warn(
                f"{names[stage]} of {stage} is one weight with {others}, but a traced stage trains a copy of its own; "
                f"add their gradients up before the optimizer steps, or untie them",
                ThinwireWarning,
                stacklevel=3,
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
