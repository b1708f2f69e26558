"""Weights so large that a second gradient of one counts: each micro-batch adds to the first in place.

torch computes the gradient of each micro-batch whole before it adds it to the others: 0.3 GB for the head of 150,000
tokens and width 1,024 in bf16, and for the embedding as much.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node
from torch.nn import functional

LARGE = 2**24
"""The elements from which a weight is large."""


class LargeLinear(nn.Linear):
    """A linear layer without a bias, whose weight gets its gradients in place."""

    def forward(self, input: Tensor) -> Tensor:
        """The products [..., out] of inputs [..., in]."""
        device = input.device.type
        of_one_type = input.dtype == self.weight.dtype and (
            not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) == input.dtype
        )
        if not _may_add(self.weight) or not of_one_type:
            return super().forward(input)
        output: Tensor = _Product.apply(input, self.weight)
        return output


class LargeEmbedding(nn.Embedding):
    """An embedding whose weight gets its gradients in place."""

    def forward(self, input: Tensor) -> Tensor:
        """The rows [..., width] of ids [...]."""
        if not _may_add(self.weight):
            return super().forward(input)
        output: Tensor = _Rows.apply(input, self.weight)
        return output


def add_in_place(module: nn.Module) -> None:
    """Let the large linear layers and embeddings of a module add up their gradients in place."""
    for each in module.modules():
        own = dict(each.named_parameters(recurse=False))  # a layer may lack parameters that belong to others
        if own.keys() != {"weight"} or own["weight"].numel() < LARGE:
            continue
        if type(each) is nn.Linear:
            each.__class__ = LargeLinear
        elif type(each) is nn.Embedding and not _has_options(each):
            each.__class__ = LargeEmbedding


def added_in_place(module: nn.Module, products: torch.dtype) -> set[Tensor]:
    """The weights of a module whose gradients are added up in place, where its products have this type."""
    return {
        each.weight
        for each in module.modules()
        if isinstance(each, LargeEmbedding) or (isinstance(each, LargeLinear) and each.weight.dtype == products)
    }


def _has_options(embedding: nn.Embedding) -> bool:
    of_rows = embedding.padding_idx is not None or embedding.max_norm is not None
    return of_rows or embedding.sparse or embedding.scale_grad_by_freq


def _may_add(weight: Tensor) -> bool:
    """Whether nobody but the optimizer looks at the weight's gradient."""
    watched = weight._backward_hooks or weight._post_accumulate_grad_hooks
    return weight.requires_grad and type(weight) is nn.Parameter and not watched and not torch.compiler.is_compiling()


def _settle(node: Node, weight: Tensor, whole: Callable[[], Tensor], add: Callable[[Tensor], object]) -> Tensor | None:
    """The gradient of a weight, or None after it was added to the one that is there.

    `node` is where autograd would add it. `whole` computes it, `add` adds it to another one.
    """
    try:
        if not torch._C._will_engine_execute_node(node):
            return None
    except RuntimeError:  # torch.autograd.grad is asked for it
        return whole()
    if weight.grad is None:
        return whole()
    add(weight.grad)
    return None


class _Product(torch.autograd.Function):
    """A linear layer's product. Its backward may run once for the input and once for the weight."""

    if torch.__version__ >= "2.13":  # torch 2.11 drops it between the two
        repeats = True

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        """The products [..., out] of inputs [..., in] and a weight [out, in]."""
        ctx.save_for_backward(input, weight)
        return functional.linear(input, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of the input and of the weight."""
        input, weight = ctx.saved_tensors
        rows, given = gradient.flatten(0, -2), input.flatten(0, -2)
        return gradient @ weight if ctx.needs_input_grad[0] else None, _settle(
            ctx.next_functions[1][0], weight, lambda: rows.T @ given, lambda sum: sum.addmm_(rows.T, given)
        )


class _Rows(torch.autograd.Function):
    """The rows of an embedding."""

    repeats = True

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        """The rows [..., width] of ids [...] in a weight [vocabulary, width]."""
        ctx.save_for_backward(ids, weight)
        return functional.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        """No gradient of the ids, and that of the weight."""
        ids, weight = ctx.saved_tensors
        dense = torch.ops.aten.embedding_dense_backward

        def add(sum: Tensor) -> None:
            # each row once: several threads would add an id's gradients in any order
            used, places = ids.unique(return_inverse=True)
            sum.index_add_(0, used, dense(gradient, places, len(used), -1, False))

        return None, _settle(
            ctx.next_functions[1][0], weight, lambda: dense(gradient, ids, weight.shape[0], -1, False), add
        )
