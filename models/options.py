"""What a user can choose about the model: the fields of a recipe's `model`, with their checks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from thinwire.models.errors import require

Tied = Literal["untie", "sum"]
FRESH, PRETRAINED = "fresh", "pretrained"
ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """LoRA: the model is frozen, and small matrices beside its linear modules train. Needs the library peft."""

    rank: int | None = None
    """The rank of the matrices; null trains the model itself."""
    alpha: float | None = None
    """The output of the matrices is multiplied by alpha / rank; null means twice the rank."""
    dropout: float = 0.0
    """Share of a module's inputs that are dropped in front of its matrices in training."""
    targets: list[str] | str = ALL_LINEAR
    """The modules: "all-linear", all linear modules but the head; a list of ends of names, [q_proj, v_proj]; or one
    regular expression for whole names."""
    weights: str = FRESH
    """"fresh" draws the first values from the seed; a folder with adapter_model.safetensors reads that adapter; the
    folder of a run with LoRA reads its newest saved adapter."""

    def __post_init__(self) -> None:
        given = self.rank is not None
        others = (self.alpha, self.dropout, self.targets, self.weights) != (None, 0.0, ALL_LINEAR, FRESH)
        require(
            (not given or (self.rank or 0) > 0, f"model.lora.rank must be at least 1, got {self.rank}"),
            (self.alpha is None or self.alpha > 0, f"model.lora.alpha must be above 0, got {self.alpha}"),
            (0 <= self.dropout < 1, f"model.lora.dropout must lie in 0..1, below 1, got {self.dropout}"),
            (bool(self.targets), "model.lora.targets must name modules, got none"),
            (
                isinstance(self.targets, list) or _is_expression(self.targets),
                f"model.lora.targets must be {ALL_LINEAR}, a list of ends of names, or a regular expression for whole "
                f"names such as .*q_proj, got {self.targets}",
            ),
            (bool(self.weights), f"model.lora.weights must be {FRESH} or a folder, got nothing"),
            (given or not others, "model.lora needs a rank, such as model.lora.rank 16"),
        )

    @property
    def scale(self) -> float:
        """alpha, given or not; a whole number as one."""
        assert self.rank is not None, "asked only of an adapter"
        alpha = 2 * self.rank if self.alpha is None else self.alpha
        return int(alpha) if alpha == int(alpha) else alpha


def _is_expression(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


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

    tied: Tied | None = None
    """How a head trains that shares its weight with the token embedding: "untie" trains two weights, and the exported
    model has both unless they are still equal; "sum" keeps one, and each step sends its gradient, as large as the
    weight, from one end of the pipeline to the other and back. null is "sum" where that is at most a tenth of what a
    step sends through a boundary uncompressed, so where a step has ten times more tokens than the vocabulary; else,
    with LoRA, and where the weights to start with have a head of their own, "untie"."""
    dtype: Literal["fp32", "bf16", "nf4"] = "fp32"
    """Dtype of the weights while they train, of their gradients and of the optimizer's moments: fp32, or bf16, which
    takes half the memory and loses small updates. With LoRA it is the dtype of frozen weights; trainable weights stay
    fp32. "nf4" is for LoRA alone, and needs bitsandbytes: the linear modules of blocks in 4 bits, as in QLoRA, the rest
    in bf16."""

    lora: LoraOptions = field(default_factory=LoraOptions)

    def __post_init__(self) -> None:
        require(
            (bool(self.name), "name must be a type of model, a pretrained model or module:factory, got nothing"),
            (bool(self.weights), f"weights must be {FRESH}, {PRETRAINED} or a folder, got nothing"),
            (
                self.lora.rank is None or self.weights != FRESH,
                f"weights must be {PRETRAINED} or a folder for model.lora, which freezes the model, got {FRESH}",
            ),
            (
                self.lora.rank is not None or self.dtype != "nf4",
                "dtype nf4 needs model.lora, because weights of 4 bits do not train; give it a rank, or take bf16",
            ),
        )

    def with_weights(self, folder: str) -> ModelOptions:
        """The same model with the weights that a run saved in a folder: those of its adapter, if it has one."""
        if self.lora.rank is None:
            return replace(self, weights=folder)
        return replace(self, lora=replace(self.lora, weights=folder))
