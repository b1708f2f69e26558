"""The layers of a learned codec: a linear map to few features at the end of a stage, and one back at the next one.

After Bian et al. (2301.02654). An encoder writes its features into the first ones of a tensor as wide as before, and
zeros into the others, which nobody sends. So a pass without compression sends a tensor of the same shape: then both
layers do nothing.

Both maps are named by the model's layer behind the cut: `autoencoder.3.0.encoder` [rank, features] and
`autoencoder.3.0.decoder` [features, rank] are for the first tensor that crosses in front of layer 3.

At the start each of the `rank` features is the scaled sum of a few features, with random signs, and the decoder is the
encoder's transpose. So the rows of the encoder are orthonormal, and square roots give the same bits on every machine.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from thinwire.models.checkpoint import Checkpoint
from thinwire.models.errors import require
from thinwire.models.layers import Blueprint, Initialize, Layer, LayerSpec

PREFIX = "autoencoder."
"""What the full names of all these weights begin with; no other weights have such names."""

Features = Sequence[int | None]
"""The number of features of each tensor that crosses; None for a tensor that needs no gradient and stays as it is."""


class _Map(nn.Module):
    """One linear map; its only parameter is called as its kind: encoder or decoder."""

    def __init__(self, kind: str, rank: int, features: int) -> None:
        super().__init__()
        self.kind, self.rank, self.features = kind, rank, features
        shape = (rank, features) if kind == "encoder" else (features, rank)
        self.register_parameter(kind, nn.Parameter(torch.empty(shape)))

    def initialize(self) -> None:
        """Fill the parameter: with the same random numbers, the two halves are each other's transpose."""
        order = torch.randperm(self.features)
        signs = torch.randint(2, (self.features,)) * 2.0 - 1.0
        group = torch.arange(self.features) % self.rank
        sizes = torch.bincount(group, minlength=self.rank).double().sqrt()
        encoder = torch.zeros(self.rank, self.features)
        encoder[group, order] = (signs / sizes[group]).float()
        self.get_parameter(self.kind).copy_(encoder if self.kind == "encoder" else encoder.T)

    def forward(self, x: Tensor) -> Tensor:
        """The map of each position's features, in the dtype of `x`."""
        weight = self.get_parameter(self.kind)
        if x.dim() == 4:
            return nn.functional.conv2d(x, weight[:, :, None, None]).to(x.dtype)
        return nn.functional.linear(x, weight).to(x.dtype)


class Half(Layer):
    """The encoder or the decoder of all tensors at one boundary.

    Attributes:
        rank: how many features cross.
        active: whether it maps; if not, tensors pass as they are.
    """

    name: str

    def __init__(self, place: str, rank: int, features: Features) -> None:
        super().__init__()
        self.rank, self.active = rank, True
        self.maps = nn.ModuleDict(
            {str(index): _Map(self.name, rank, count) for index, count in enumerate(features) if count is not None}
        )
        self.parts = {f"{place}.{index}": part for index, part in self.maps.items()}

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The same tensors, those that need gradients mapped."""
        mapped = tuple(
            self._mapped(x, self.maps[str(index)]) if self.active and str(index) in self.maps else x
            for index, x in enumerate(tensors)
        )
        return mapped if len(mapped) > 1 else mapped[0]

    def _mapped(self, x: Tensor, part: nn.Module) -> Tensor:
        raise NotImplementedError


class EncoderHalf(Half):
    """At the end of the sending stage."""

    name = "encoder"

    def _mapped(self, x: Tensor, part: nn.Module) -> Tensor:
        dim = features_dim(x)
        code: Tensor = part(x)
        rest = list(x.shape)
        rest[dim] -= self.rank
        return torch.cat([code, code.new_zeros(rest)], dim)


class DecoderHalf(Half):
    """At the beginning of the receiving stage."""

    name = "decoder"

    def _mapped(self, x: Tensor, part: nn.Module) -> Tensor:
        decoded: Tensor = part(x.narrow(features_dim(x), 0, self.rank))
        return decoded


def features_dim(x: Tensor) -> int:
    """The dimension of the features: the channels of images [N, C, H, W], else the last."""
    return 1 if x.dim() == 4 else x.dim() - 1


def halves(module: nn.Module) -> Iterator[Half]:
    """All such layers in a stage."""
    return (part for part in module.modules() if isinstance(part, Half))


def with_autoencoders(
    blueprint: Blueprint, cuts: Sequence[range], ranks: Mapping[int, int], outputs: Sequence[Sequence[Tensor]]
) -> tuple[Blueprint, tuple[range, ...]]:
    """The model with an encoder and a decoder at some of its cuts, and the cuts of its longer list of layers.

    Args:
        blueprint: the model.
        cuts: the layers of each stage.
        ranks: how many features cross, by boundary.
        outputs: the outputs of each stage of the model alone, as meta tensors.

    Raises:
        ModelError: a rank is not less than the number of features.
    """
    found = {boundary: _features_of(outputs[boundary]) for boundary in ranks}
    misfits = [
        f"the rank of an autoencoder must be less than the features that it narrows, and {features} cross boundary "
        f"{boundary}, got {ranks[boundary]}; lower the rank, or take another codec there"
        for boundary, counts in found.items()
        for features in counts
        if features is not None and features <= ranks[boundary]
    ]
    require(*((False, misfit) for misfit in misfits))
    layers: list[LayerSpec] = []
    longer = []
    for stage, cut in enumerate(cuts):
        start = len(layers)
        if stage - 1 in found:
            layers.append(_spec(DecoderHalf, cut.start, ranks[stage - 1], found[stage - 1]))
        layers += blueprint.layers[cut.start : cut.stop]
        if stage in found:
            layers.append(_spec(EncoderHalf, cut.stop, ranks[stage], found[stage]))
        longer.append(range(start, len(layers)))
    checkpoint = blueprint.checkpoint
    if isinstance(checkpoint, Checkpoint):  # a pretrained model has no autoencoder; the seed gives it
        checkpoint = replace(checkpoint, fresh=(*checkpoint.fresh, PREFIX))
    initialize = partial(_initialize, blueprint.initialize)
    return replace(blueprint, layers=tuple(layers), initialize=initialize, checkpoint=checkpoint), tuple(longer)


def _features_of(tensors: Sequence[Tensor]) -> Features:
    return [x.shape[features_dim(x)] if x.requires_grad and x.dim() > 1 else None for x in tensors]


def _spec(half: type[Half], layer: int, rank: int, features: Features) -> LayerSpec:
    name = f"{PREFIX}{layer}"
    return LayerSpec(f"{half.name} of {name}", partial(half, name, rank, features), cost=0.0, of_model=False)


def _initialize(of_model: Initialize, full_name: str, module: nn.Module) -> None:
    if isinstance(module, _Map):
        module.initialize()
    else:
        of_model(full_name, module)
