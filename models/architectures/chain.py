"""The layer of most models: modules of the unsplit model, one after the other."""

from collections.abc import Mapping

from torch import Tensor, nn

from thinwire.models.layers import Layer
from thinwire.models.tensors import as_tuple


class Chain(Layer):
    """Runs its parts in order; the result of one, a tensor or a tuple, is the next one's arguments."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.parts = dict(parts)
        # the names of parts have dots, which those of submodules may not
        self.sequence = nn.ModuleList(parts.values())

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The result of the last part."""
        result: Tensor | tuple[Tensor, ...] = tensors
        for module in self.sequence:
            result = module(*as_tuple(result))
        return result
