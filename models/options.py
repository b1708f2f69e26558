"""What a user can choose about the model: the fields of a recipe's `model`, with their checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from thinwire.models.errors import require

FRESH, PRETRAINED = "fresh", "pretrained"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model, and where its first weights come from."""

    name: str = "gpt2"
    """A type of model (gpt2, llama, bert, resnet18, ...); a folder or hub name of a pretrained model;
    "smollm2", a language model of 135 M parameters whose weights come with packages instead of the hub; or
    "module:factory", a function that returns an nn.Sequential or a list of layers."""
    weights: str = FRESH
    """"fresh" draws them from the seed; "pretrained" reads the weights of the named model; a folder with
    model.safetensors, or torchvision's name of weights (IMAGENET1K_V1), reads those; the folder of a run or of
    a checkpoint reads the newest weights there. Each stage reads only its own tensors."""
    config: dict[str, Any] = field(default_factory=dict)
    """Changes to the model's configuration, by its library's names (vocab_size, n_layer, ...); for a factory, its
    keyword arguments."""

    dtype: Literal["fp32", "bf16"] = "fp32"
    """The weights themselves while they train, with their gradients and the optimizer's moments: fp32, or bf16, which
    takes half the memory and loses small updates."""

    def __post_init__(self) -> None:
        require(
            (bool(self.name), "name must be a type of model, a pretrained model or module:factory, got nothing"),
            (bool(self.weights), f"weights must be {FRESH}, {PRETRAINED} or a folder, got nothing"),
        )
