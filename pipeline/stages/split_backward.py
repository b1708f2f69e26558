"""A stage's backward in two parts, as zero-bubble schedules ask: gradients of its inputs now, those of weights later.

torch's own parts (torch.distributed.pipelining, 2.11 to 2.15) lose what reaches an output past the inputs, run hooks on
gradients twice, and leave out those that wait for a weight's gradient.

    inputs ──► node ──► node ──► outputs       the way of the inputs
                ▲        ▲
             weights  weights ──────► outputs  beside it

The first part goes down the way of the inputs, and keeps the gradient that arrives at each of its nodes that weights
feed. The second goes on from there, beside the way, and from the outputs that no input reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from thinwire.pipeline.stages.graph import Gradients, Root, edge


@dataclass(eq=False)
class _Group:
    """Weights with common ways to the outputs, and where these ways begin."""

    weights: set[Node]
    joints: list[Node] = field(default_factory=list)
    """Nodes on the way of the inputs."""
    outputs: list[int] = field(default_factory=list)
    """Outputs that no input reaches, by index."""


class SplitBackward:
    """The backward of one micro-batch, in two parts.

    Args:
        outputs: where the graph of what the stage returned begins, or its loss.
        gradients: theirs; None where one has none, or is a loss.
        inputs: leaves.
    """

    def __init__(self, outputs: Sequence[Root], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> None:
        self._outputs, self._gradients = tuple(outputs), tuple(gradients)
        self._inputs = [edge(leaf) if leaf.requires_grad else None for leaf in inputs]
        self._roots = [edge(output) for output in outputs]
        self._nodes = _in_order([root.node for root in self._roots])
        self._on_way = self._way_of_inputs()
        self._arrived: dict[Node, Gradients] = {}

    @property
    def is_possible(self) -> bool:
        """Whether each node may run twice: of those in Python, such as a compiled layer, only ours say so (repeats)."""
        in_python = {getattr(type(node), "_forward_cls", None) for node in self._nodes} - {None}
        return all(hasattr(function, "repeats") for function in in_python)

    def of_inputs(self) -> Gradients:
        """The gradients of the inputs; None where there is none."""
        self._groups = self._grouped()
        joints = {joint for group in self._groups for joint in group.joints}
        reached = [index for index, root in enumerate(self._roots) if root.node in self._on_way]
        wanted = [edge for edge in self._inputs if edge is not None and edge.node in self._on_way]
        found: Gradients = ()
        if reached:
            with ExitStack() as hooks:
                for joint in joints:
                    hooks.enter_context(joint.register_prehook(partial(self._arrive, joint)))
                found = torch.autograd.grad(
                    [self._roots[index] for index in reached],
                    wanted,
                    [self._gradients[index] for index in reached],
                    retain_graph=True,
                    allow_unused=True,
                )
        by_node = {edge.node: gradient for edge, gradient in zip(wanted, found, strict=True)}
        # others hold the loss until the step ends, and with it what lies above the joints and is not needed again
        for root, output in zip(self._roots, self._outputs, strict=True):
            if isinstance(output, Tensor) and root.node in self._on_way - joints and not output._is_view():
                output.detach_()
        self._begins = {
            index: (self._roots[index], self._gradients[index]) for group in self._groups for index in group.outputs
        }
        self._outputs, self._gradients, self._roots, self._nodes, self._on_way = (), (), [], [], set()
        return tuple(None if edge is None else by_node.get(edge.node) for edge in self._inputs)

    def of_weights(self) -> None:
        """Add the gradients of the weights to what they have. Call it once, after `of_inputs`."""
        for group in self._groups:
            self._go_on(group)

    def _go_on(self, group: _Group) -> None:
        arrived = {joint: self._arrived[joint] for joint in group.joints if joint in self._arrived}
        begins: list[tuple[GradientEdge, Tensor | None]] = [
            (GradientEdge(joint, index), gradient)
            for joint, gradients in arrived.items()
            for index, gradient in enumerate(gradients)
            if gradient is not None
        ]
        begins += [self._begins[index] for index in group.outputs]
        if not begins:
            return
        weights = [GradientEdge(weight, 0) for weight in group.weights]
        edges, gradients = zip(*begins, strict=True)
        with ExitStack() as hooks:
            # a joint gets what arrived there, whatever comes from the other joints and from hooks
            for joint, kept in arrived.items():
                hooks.enter_context(joint.register_prehook(lambda _, kept=kept: kept))
            torch.autograd.backward(edges, gradients, retain_graph=True, inputs=weights)

    def _arrive(self, joint: Node, gradients: Gradients) -> None:
        self._arrived[joint] = gradients

    def _way_of_inputs(self) -> set[Node]:
        """The nodes that an input reaches, itself included."""
        inputs = {edge.node for edge in self._inputs if edge is not None}
        way: set[Node] = set()
        for node in self._nodes:
            if node in inputs or any(before in way for before in _before(node)):
                way.add(node)
        return way

    def _grouped(self) -> list[_Group]:
        """All weights, in groups that have no node beside the way of the inputs in common."""
        weights_of: dict[Node, set[Node]] = {}
        groups: dict[Node, _Group] = {}

        def join(weights: set[Node]) -> _Group:
            found = _Group(set(weights))
            for other in {id(groups[weight]): groups[weight] for weight in weights if weight in groups}.values():
                found.weights |= other.weights
                found.joints += other.joints
                found.outputs += other.outputs
            groups.update(dict.fromkeys(found.weights, found))
            return found

        for node in self._nodes:
            beside = [before for before in _before(node) if before not in self._on_way]
            weights = set().union(*(weights_of[before] for before in beside)) if beside else set()
            if node not in self._on_way:
                weights_of[node] = weights if _before(node) else {node}
            elif weights:
                join(weights).joints.append(node)
        for index, root in enumerate(self._roots):
            if root.node not in self._on_way:
                join(weights_of[root.node]).outputs.append(index)
        return list({id(group): group for group in groups.values()}.values())


def changeable(leaf: Tensor) -> Tensor:
    """The same numbers in the same memory, for a module that may change them in place; gradients reach the leaf.

    autograd forbids to change a leaf, or a view of one; this alias of its memory is no view for autograd.
    """
    return torch.ops.aten._unsafe_view(leaf, leaf.shape) if leaf.requires_grad else leaf


def _before(node: Node) -> list[Node]:
    return [before for before, _ in node.next_functions if before is not None]


def _in_order(roots: Sequence[Node]) -> list[Node]:
    """All nodes that lead to the roots, each behind those that lead to it."""
    ordered: dict[Node, None] = {}
    waiting = [(root, False) for root in reversed(roots)]
    while waiting:
        node, is_complete = waiting.pop()
        if node in ordered:
            continue
        if is_complete:
            ordered[node] = None
            continue
        waiting.append((node, True))
        waiting += [(before, False) for before in _before(node) if before not in ordered]
    return list(ordered)
