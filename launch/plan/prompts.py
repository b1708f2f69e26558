"""The prompts of a recipe: read before a process starts, so that the first evaluation finds no mistake."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from thinwire.launch.recipe.recipe import Recipe
from thinwire.models.data.load import require_language
from thinwire.models.data.tokenizer import Bytes, Pretrained, make_tokenizer
from thinwire.models.errors import require
from thinwire.models.layers import Blueprint
from thinwire.pipeline.wire.channel import is_sums


@dataclass(frozen=True)
class Prompts:
    """Prompts as tokens, and what their answers need."""

    tokenizer: Bytes | Pretrained
    tokens: tuple[Tensor, ...]
    """Of each prompt, int64 [N]."""
    most: tuple[int, ...]
    """The most tokens of each answer."""
    ends: frozenset[int]
    """The tokens that end an answer."""
    remembers: bool
    """Whether the layers remember earlier tokens, so that none passes twice."""
    notes: tuple[str, ...]
    """Sentences: the model has fewer positions than an answer may take, or settings that are not followed."""

    def text(self, answer: Sequence[int]) -> str:
        """An answer as text, without special tokens."""
        return self.tokenizer.decode(answer, special=False)


def read_prompts(recipe: Recipe, model: Blueprint, outputs: Sequence[tuple[Tensor, ...]]) -> Prompts:
    """The prompts of a recipe.

    `outputs` are those of each stage for a micro-batch, as meta tensors.

    Raises:
        ModelError: the model does not write text, or a prompt leaves it no room.
    """
    data, training = recipe.data, recipe.training
    require_language(data)
    *crossing, last = outputs
    of_tokens = [one for tensors in (*crossing, last[:1]) for one in tensors if not is_sums(one)]
    alike = all(one.dim() > 1 and one.shape[1] == data.block_size for one in of_tokens)
    require(
        (alike, "prompts need a model whose stages hand on tensors of [rows, tokens, ...], and this model's do not")
    )
    tokenizer = make_tokenizer(data.tokenizer, data.date)
    tokens = tuple(tokenizer.prompt(text, chat=data.chosen_kind.template) for text in training.prompts)
    longest = max(map(len, tokens))
    room = model.max_positions or longest + training.answer_tokens
    require(
        (all(map(len, tokens)), "a prompt must have at least one token, got none"),
        (longest < room, f"a prompt must be shorter than the model's {room} positions, got {longest} tokens"),
    )
    left = room - longest
    short = f"the model has {room} positions and the longest prompt takes {longest}: its answer ends at {left} tokens"
    unheeded = ", ".join(model.unheeded())
    other = f"the model's generation settings name {unheeded}, which transformers follows and these answers do not"
    return Prompts(
        tokenizer,
        tokens,
        tuple(min(training.answer_tokens, room - len(each)) for each in tokens),
        frozenset([*tokenizer.ends, *model.ends(), *model.more_ends]),
        model.remembers is not None and model.remembers(),
        (*([short] if training.answer_tokens > left else []), *([other] if unheeded else [])),
    )
