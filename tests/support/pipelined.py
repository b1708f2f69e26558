"""Stages of a blueprint run as a pipeline does it, without processes: each boundary ends a graph and begins another."""

import torch
from torch import Tensor, nn

from thinwire.models.layers import Stage


def run(stages: list[Stage], microbatches: list[Tensor], output_gradients: list[Tensor]) -> list[Tensor]:
    """GPipe's order: every micro-batch forward, then every one backward; returns the outputs."""
    outputs, graphs = [], []
    for microbatch in microbatches:
        leaves, graph = (microbatch,), []
        for stage in stages:
            results = as_tuple(stage(*leaves))
            graph.append((leaves, results))
            leaves = tuple(result.detach().requires_grad_() for result in results)
        [output] = leaves
        outputs.append(output.detach())
        graphs.append(graph)
    for graph, output_gradient in zip(graphs, output_gradients, strict=True):
        gradients = (output_gradient,)
        for leaves, results in reversed(graph):
            torch.autograd.backward(results, gradients)
            gradients = tuple(leaf.grad for leaf in leaves)
    return outputs


def as_tuple(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def state_of(stages: list[Stage]) -> dict[str, Tensor]:
    return {name: tensor for stage in stages for name, tensor in stage.full_state().items()}


def gradients_of(stages: list[Stage]) -> dict[str, Tensor]:
    gradients = {}
    for part_name, part in ((n, p) for stage in stages for layer in stage.layers for n, p in layer.parts.items()):
        for name, parameter in part.named_parameters():
            gradients[".".join(filter(None, (part_name, name)))] = parameter.grad
    return gradients


def reset(full_name: str, module: nn.Module) -> None:
    """For blueprints of torch's own modules: what their constructors do."""
    if next(module.parameters(recurse=False), None) is not None:
        module.reset_parameters()


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
