"""Groups of layers that replicas exchange in turn, so that no step carries all weights at once (2501.18512).

With H = every and G groups, group g of every stage is exchanged after step (g + 1) H / G, and then every H steps:

    H = 6, G = 3    after step  1  2  3  4  5  6  7  8  9  10  11  12
                    group          0     1     2     0      1       2

The paper calls a group a fragment. Here a layer goes to the group with the fewest elements so far, the largest layers
first, so groups are about equally large; equal layers take turns, as in the paper's strided fragments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch.nn import Module, Parameter

from thinwire.models.layers import Layer, Stage
from thinwire.pipeline.options import SyncOptions
from thinwire.pipeline.state import parameters_of


def due(sync: SyncOptions, done: int) -> list[int]:
    """The groups that are exchanged after `done` optimizer steps."""
    return [group for group in range(sync.groups) if (done - (group + 1) * sync.every // sync.groups) % sync.every == 0]


def divide_layers(module: Module, groups: int) -> list[dict[str, Parameter]]:
    """The trained parameters of a stage in groups, in their order in the stage, named as in the unsplit model.

    Weights that several stages may hold are all in the first group, because their copies are averaged together. There
    may be fewer layers than groups; then groups are empty.
    """
    everything = trained(module)
    if groups == 1:
        return [everything]
    shared = _shared(module)
    group_of = dict.fromkeys(shared, 0)
    sizes = [_elements(each for each in everything.values() if id(each) in shared), *[0] * (groups - 1)]
    layers = [[each for each in layer.values() if id(each) not in shared] for layer in layers_with_weights(module)]
    for layer in sorted(filter(None, layers), key=lambda layer: -_elements(layer)):
        group = sizes.index(min(sizes))
        sizes[group] += _elements(layer)
        group_of |= {id(each): group for each in layer}
    return [{name: each for name, each in everything.items() if group_of[id(each)] == group} for group in range(groups)]


def layers_with_weights(module: Module) -> list[dict[str, Parameter]]:
    """The trained parameters of each layer of a stage that has any, each parameter once."""
    if isinstance(module, Stage):
        return trained_by_layer([layer for layer in module.layers if isinstance(layer, Layer)])
    by_layer: dict[str, dict[str, Parameter]] = {}
    for name, each in module.named_parameters():
        if each.requires_grad:
            by_layer.setdefault(name.partition(".")[0], {})[name] = each
    return list(by_layer.values())


def trained_by_layer(layers: Sequence[Layer]) -> list[dict[str, Parameter]]:
    """The trained parameters of each layer that has any, each parameter once, by names in the unsplit model."""
    seen: set[int] = set()
    found = []
    for layer in layers:
        own = {
            name: each for name, each in layer.full_parameters().items() if each.requires_grad and id(each) not in seen
        }
        seen |= {id(each) for each in own.values()}
        found += [own] if own else []
    return found


def trained(module: Module) -> dict[str, Parameter]:
    """The parameters that a stage trains, each once, by its first name in the unsplit model."""
    found = {id(each): (name, each) for name, each in reversed(parameters_of(module).items())}
    return {name: each for name, each in reversed(found.values()) if each.requires_grad}


def _elements(parameters: Iterable[Parameter]) -> int:
    return sum(each.numel() for each in parameters)


def _shared(module: Module) -> Collection[int]:
    """The parameters that other stages may hold too, by id."""
    if not isinstance(module, Stage):
        return set()
    layers = [layer for layer in module.layers if isinstance(layer, Layer)]
    parts = [part for layer in layers for name, part in layer.parts.items() if name in module.shared]
    return {id(each) for part in parts for each in part.parameters()}
