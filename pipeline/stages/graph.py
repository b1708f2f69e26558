"""What a stage keeps of a micro-batch between its forward and its backward: where its graph begins and ends.

An output is kept as an edge of the graph, so its memory is free once its frame is on the way, unless the graph itself
saved it. torch does the same from 2.15 on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

Root = Tensor | GradientEdge
Gradients = tuple[Tensor | None, ...]


@dataclass(frozen=True, eq=False)
class Graph:
    """The graph of one micro-batch.

    Attributes:
        roots: where its backward begins, for each output; None for one that has no graph.
        leaves: what the stage received, to which gradients flow.
    """

    roots: tuple[Root | None, ...]
    leaves: tuple[Tensor, ...]

    @classmethod
    def of(cls, outputs: Sequence[Tensor], leaves: tuple[Tensor, ...], *, keeps_outputs: bool) -> Graph:
        """The graph of a forward; with `keeps_outputs`, which DDP and FSDP need, its roots are the outputs."""
        return cls(tuple(_root(output, keeps_outputs) if output.requires_grad else None for output in outputs), leaves)

    def begins(self, gradients: Sequence[Tensor | None] | None) -> tuple[list[Root], list[Tensor | None]]:
        """The roots that a backward begins at, and their gradients; None is that of a loss, without a gradient.

        Nothing goes back from an output whose gradient is None, not even zeros.
        """
        if gradients is None:
            roots = [root for root in self.roots if root is not None]
            return roots, [None] * len(roots)
        pairs = zip(self.roots, gradients, strict=True)
        found = [(root, one) for root, one in pairs if root is not None and one is not None]
        return [root for root, _ in found], [one for _, one in found]

    def take_gradients(self) -> Gradients:
        """The gradients that reached the leaves, which have them no more; None where none did."""
        gradients = tuple(leaf.grad for leaf in self.leaves)
        for leaf in self.leaves:
            leaf.grad = None
        return gradients


def edge(root: Root) -> GradientEdge:
    """Where a root is in the graph."""
    return get_gradient_edge(root) if isinstance(root, Tensor) else root


def _root(output: Tensor, is_kept: bool) -> Root:
    return output if is_kept else edge(output)
