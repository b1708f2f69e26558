"""Where the values of a model come from, as stages see it."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor


class Weights(Protocol):
    """The values of a whole model. A stage takes only its own."""

    def lacking(self, names: Sequence[str]) -> list[str]:
        """The full names among these that have no value here, and that the seed may give.

        Raises:
            ModelError: a value is missing that the seed may not give.
        """

    def unread(self, names: Sequence[str]) -> list[str]:
        """The stored tensors that a model with these full names does not read.

        Raises:
            ModelError: without them the others are wrong, as without the scales of quantized weights.
        """

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Compare the shapes of these tensors, by full name, with the stored ones, if that needs no download.

        Raises:
            ModelError: a tensor has another shape; the message names all such tensors.
        """

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy values into these tensors, by full name.

        Raises:
            ModelError: a tensor has another shape. The message names all such tensors; nothing is copied.
        """
