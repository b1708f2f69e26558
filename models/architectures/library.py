"""Any language model or classifier of transformers in layers, by running the library's own forward.

A model is a list of blocks with something before and something after it. Each layer is a stretch of the forward: up to
the first block, from one block to the next, or from the last block to the logits. A layer holds a copy of the whole
model in which the other blocks are stand-ins that hand on what they get, and the weights of other stretches are zeros
without memory. It runs the library's forward, puts what it received in the place of the hidden state where its stretch
begins, and leaves the forward where the stretch ends. So masks, positions and rotary angles are the library's own, made
again in each layer from the shape of the hidden state and the side inputs, and nothing but the hidden state crosses a
boundary. What else a library's forward carries from block to block would be lost: `parity` compares, before training.

The auxiliary loss of routers multiplies means over all blocks. So where a model has it, sums cross beside the hidden
state: each layer adds those of its own routers, and the last one computes the means and the loss from them.

The head of a language model has its own weight, for any number of stages. Many models tie it to the token embedding,
but the two are at opposite ends of the pipeline: tied, every step sends the gradient of the whole vocabulary matrix,
154 MB for GPT-2 small, which no compression of activations makes smaller. With one stage it is untied too, so the model
is the same for every cut. A pretrained head starts as a copy of the embedding. With `tied: sum` the two stay one: the
first and the last layer share it, as layers share the relative embeddings of DeBERTa.

Tensor names end in their shape: B samples, T tokens, C channels.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from thinwire.errors.calls import first_line
from thinwire.errors.files import read_object
from thinwire.models import hub
from thinwire.models.architectures.conversion import as_in_model, as_stored
from thinwire.models.checkpoint import find, is_of_run, open_checkpoint
from thinwire.models.errors import ModelError
from thinwire.models.layers import Blueprint, Layer, LayerSpec, parameters_on_meta
from thinwire.models.options import Tied
from thinwire.models.tasks import TaskName, WithLoss
from thinwire.models.tensors import replace_tensors

GENERATION = "generation_config.json"

_BEYOND_THE_LARGEST: Mapping[str, Any] = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "min_length": 0,
    "guidance_scale": 1.0,
    **dict.fromkeys(("min_new_tokens", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")),
}
"""Generation settings by which the library takes another token than the most likely one, and what changes nothing."""
_BUFFERS = (r"rotary_emb\.inv_freq$", r"\.position_ids$", r"masked_bias$")
"""Buffers that older releases of transformers stored."""

AUTO_CLASSES: Mapping[TaskName, str] = {
    "causal-lm": "AutoModelForCausalLM",
    "classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
}
"""The classes of transformers that make a model for a task."""
_SIDE = ("attention_mask", "token_type_ids", "position_ids")
"""The side inputs that a model may take, by the library's names."""
_CACHES = ("cache", "past_key_values")
"""What releases of the library call the cache of keys and values."""
AUX_LOSS_WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef")
"""What configurations call the weight of the auxiliary loss of routers."""
_ROWS, _LENGTH = 2, 3
"""The samples and tokens of the forward that shows which weights belong where."""
_DEAR = 10
"""How many times more tokens than the vocabulary has words a step must have for a tied head to cost little.

Its gradient has a row for each word, the frames of a boundary one for each token. Neither the cut nor the codecs count,
so that runs that differ in them train the same model. A head of its own in the weights to start with, as a run that
untied it saves, stays one."""
_LARGE = 2**20
"""Values of a weight that is never made where only its shape is asked for."""


class _Reached(BaseException):  # no `except Exception` of the library may stop it
    """The forward has come to the end of a layer's stretch."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _Seat(nn.Module):
    """What stands in the list of blocks in place of a block of another layer: it hands on the hidden state."""

    def __init__(self, block: nn.Module, length: int | None) -> None:
        super().__init__()
        # forwards ask blocks for these, of their own or of their class: layer_idx, attention_type
        owners = [one for one in reversed(type(block).__mro__) if one not in nn.Module.__mro__]
        plain = {name: value for one in owners for name, value in vars(one).items() if not hasattr(value, "__get__")}
        given = plain | vars(block)
        vars(self).update({name: value for name, value in given.items() if not name.startswith("_")})
        self.length = length

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The hidden state, in a tuple where the library's block returns one."""
        return self.returned(_hidden(args, kwargs))

    def returned(self, hidden: Tensor) -> Any:
        """A hidden state as the library's block returns it."""
        return hidden if self.length is None else (hidden, *[None] * (self.length - 1))


class _End(_Seat):
    """The end of a stretch: the next block would come here."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Leave the forward."""
        raise _Reached(_hidden(args, kwargs))


class _Start(_Seat):
    """The start of a stretch: what was received takes the place of the hidden state."""

    def __init__(self, block: nn.Module, length: int | None, own: nn.Module | None, *, ends: bool) -> None:
        """`own` is the layer's block, None where the stretch begins after it; `ends` if it ends there too."""
        super().__init__(block, length)
        self.own, self.ends = own, ends
        self.received: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer's block makes of the received state, or that state."""
        received, self.received = self.received, None
        assert received is not None
        if self.own is None:
            return self.returned(received)
        rest = kwargs if args else kwargs | {next(iter(kwargs)): received}
        result = self.own(*((received, *args[1:]) if args else ()), **rest)
        if self.ends:
            raise _Reached(result[0] if isinstance(result, tuple) else result)
        return result


class _Source(nn.Module):
    """In place of the module that makes the first hidden state: what a layer received."""

    def __init__(self, start: _Start) -> None:
        super().__init__()
        self.start = start

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """The received state."""
        return self.start.received


def _hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The hidden state of a block's call: its first argument."""
    hidden: Tensor = args[0] if args else next(iter(kwargs.values()))
    return hidden


class _Memory:
    """What a stretch keeps of earlier tokens, as a cache of the library: the keys and values of its own block.

    The places of all other blocks count the tokens: masks and positions are made from their number.
    """

    def __init__(self, config: Any, own: int | None) -> None:
        """`own` is the index of the stretch's block, None if it has none."""
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        self.cache = DynamicCache(config=config)
        self._counter = DynamicLayer()  # type: ignore[no-untyped-call]
        self.cache.layers = [layer if index == own else self._counter for index, layer in enumerate(self.cache.layers)]

    def count(self, tokens: int) -> None:
        """Count tokens that have passed."""
        self._counter.update(torch.zeros(1, 1, tokens, 1), torch.zeros(1, 1, tokens, 1))


@dataclass(frozen=True)
class Routers:
    """The loss by which routers spread tokens over experts: `load_balancing_loss_func` of the library, from sums.

    weight * E * (f * p).sum(), where f [E] is the mean over all routers and tokens of how often a token goes to each
    expert, which has no gradient, and p [E] is the mean of the routers' probabilities.
    """

    kind: type[nn.Module]
    """The class of the routers."""
    index: int
    """Where the logits are in what a router returns."""
    top_k: int
    """The experts of a token."""
    weight: float

    def sums(self, logits: Sequence[Tensor], counts_BT: Tensor | None) -> Tensor:
        """How often tokens went to each expert, and the sum of their probabilities: float64 [2 E].

        `logits` of each router are [B T, E]; `counts_BT` says which tokens count, None means all.
        """
        found = []
        for each in logits:
            probabilities = each.flatten(0, -2).softmax(-1)
            chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(self.top_k).indices, 1)
            rows = torch.cat([chosen, probabilities], 1)
            found.append(rows if counts_BT is None else rows * counts_BT.reshape(-1, 1))
        return torch.stack([rows.sum(0, dtype=torch.float64) for rows in found]).sum(0)

    def loss(self, sums: Tensor) -> Tensor:
        """The loss of the sums of all routers: a float32 scalar."""
        chosen, probabilities = sums.chunk(2)
        tokens = chosen.detach().sum() / self.top_k
        shares = chosen.detach() / tokens * (probabilities / tokens)
        return self.weight * len(chosen) * shares.sum().float()


class Stretch(Layer):
    """One stretch of the library's forward. The first takes token ids [B, T], the others hidden states [B, T, C].

    Beside hidden states go the sums of routers, [2 E], if they have a loss.
    """

    def __init__(self, skeleton: Skeleton, place: int) -> None:
        """`place` 0 is what comes before the blocks, `place` i is block i - 1, and the last what comes after them."""
        super().__init__()
        last = len(skeleton.blocks) + 1
        self.side, self.optional_side = skeleton.side, skeleton.optional_side
        if skeleton.routers is not None:
            self.optional_side += ("lengths",)
        self.first, self.inner = place == 0, 0 < place < last
        self.pad, self.routers = skeleton.pad, skeleton.routers
        self.routed: list[Tensor] = []
        self.make_memory = partial(_Memory, skeleton.config, place - 1 if self.inner else None)
        self.cache_name = skeleton.cache_name
        self.memory: _Memory | None = None
        self.start: _Start | None = None
        seats: dict[int, _Seat] = {}
        memo = skeleton.memo()
        for index, block in enumerate(skeleton.blocks):
            if index == place - 1 or (place == last and index == place - 2):
                own = copy.deepcopy(block, memo) if self.inner else None
                seats[index] = self.start = _Start(block, skeleton.length, own, ends=index == last - 2)
            else:
                seats[index] = (_End if index == place else _Seat)(block, skeleton.length)
        memo |= {id(block): seats[index] for index, block in enumerate(skeleton.blocks)}
        if place == 1 and skeleton.source is not None and self.start is not None:
            memo[id(skeleton.source)] = _Source(self.start)
        self.around = copy.deepcopy(skeleton.model, memo)
        self.parts = {name: self.around.get_submodule(name) for name in skeleton.parts[place]}
        if self.inner:
            assert self.start is not None and self.start.own is not None
            for module in self.start.own.modules():
                if self.routers is not None and isinstance(module, self.routers.kind):
                    module.register_forward_hook(self._keep)  # a method: that of a copied layer is the copy's
            self.parts = {f"{skeleton.list_name}.{place - 1}": self.start.own, **self.parts}
        self.absent = list(_strip(self.around, {m for part in self.parts.values() for m in part.modules()}))

    def forward(
        self, x: Tensor, *sums: Tensor, lengths: Tensor | None = None, **side: Tensor
    ) -> Tensor | tuple[Tensor, ...]:
        """The hidden states [B, T, C] at the end of the stretch, or the logits; and the sums of routers, or their loss.

        `lengths` [B] are the tokens of each sample before its padding.
        """
        self.routed.clear()
        output = self._run(x, side)
        if self.routers is None:
            return output
        if self.routed:
            places_T = torch.arange(x.shape[1], device=x.device)
            own = self.routers.sums(self.routed, None if lengths is None else places_T < lengths[:, None])
            sums = (own + sums[0] if sums else own,)
            self.routed.clear()
        if not sums:
            return output
        return (output, *sums) if self.inner else WithLoss(output, self.routers.loss(*sums))

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        """A hook of the block's routers: their logits in each forward."""
        assert self.routers is not None
        self.routed.append(output[self.routers.index] if isinstance(output, tuple) else output)

    def _run(self, x: Tensor, side: Mapping[str, Tensor]) -> Tensor:
        """The hidden states at the end of the stretch, or the logits."""
        ids_BT = x if self.first else self._stand_in(x, side.get("attention_mask"))
        # the narrowest: adapters, and what the library keeps wide, are float32 beside 16 bits
        numbers = (p for p in self.parameters() if p.is_floating_point())
        weight = min(numbers, key=lambda p: p.element_size(), default=None)
        zero = torch.zeros((), dtype=torch.float32 if weight is None else weight.dtype, device=x.device)
        for module, name, shape in self.absent:
            setattr(module, name, zero.expand(shape))
        if self.start is not None:
            self.start.received = x
        remembered = {} if self.memory is None else {self.cache_name: self.memory.cache, "use_cache": True}
        config = self.around.config
        experts = config._experts_implementation
        if isinstance(x, FakeTensor):  # for which torch knows the products of single experts in 16 bits only
            config._experts_implementation = "batched_mm"
            _settle(self.around)
        try:
            logits: Tensor = self.around(input_ids=ids_BT, **side, **remembered).logits
        except _Reached as reached:
            logits = reached.hidden
        finally:
            config._experts_implementation = experts
        if self.memory is not None:
            self.memory.count(ids_BT.shape[1])
        return logits

    def remember(self, remembers: bool) -> None:
        """Keep the keys and values of all tokens from now on, or forget them."""
        self.memory = self.make_memory() if remembers else None

    def train(self, mode: bool = True) -> Stretch:
        """Set the mode of the layer's own modules; dropout before and after the blocks belongs to the layers there."""
        super().train(mode)
        if self.inner:
            self.around.train(False)
            for part in self.parts.values():
                part.train(mode)
        return self

    def _stand_in(self, x_BTC: Tensor, mask_BT: Tensor | None) -> Tensor:
        """Ids of the same shape, padded at the same places: some heads look for the last token by them."""
        other = 0 if self.pad else 1
        ids_BT = torch.full(x_BTC.shape[:2], other, dtype=torch.int64, device=x_BTC.device)
        return ids_BT if mask_BT is None or self.pad is None else ids_BT.masked_fill(mask_BT == 0, self.pad)


def _settle(model: nn.Module) -> None:
    """Keep rotary angles as they are that change with the length of a text: tensors without data do not say it.

    Dynamic ones change beyond `max_position_embeddings` only, where no data go.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):
            module.rope_type = {name: _still(kind) for name, kind in kinds.items()}  # type: ignore[assignment]
        elif isinstance(kinds, str):
            module.rope_type = _still(kinds)  # type: ignore[assignment]
            if kinds == "longrope":  # PhiMoE looks in its configuration whether to ask for how long a text is
                config: Any = copy.copy(module.config)
                config.rope_parameters = {**config.rope_parameters, "rope_type": "default"}
                module.config = config


def _still(kind: str) -> str:
    return "default" if "dynamic" in kind else kind


def _strip(around: nn.Module, own: set[nn.Module]) -> Iterator[tuple[nn.Module, str, torch.Size]]:
    """Take away all parameters of modules that are not a layer's own: (module, name, shape) of each.

    Their buffers stay, but belong to no checkpoint of this layer. What they share with its own modules stays too.
    """
    held = {id(parameter) for module in own for parameter in module.parameters()}
    for module in around.modules():
        if module in own:
            continue
        module._non_persistent_buffers_set.update(module._buffers)
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) not in held:
                del module._parameters[name]
                yield module, name, parameter.shape


class Skeleton:
    """A whole model of transformers without its weights; layers copy their modules from it.

    Attributes:
        list_name, blocks: the full name of the list of blocks, and the list.
        length: of the tuple that a block returns; None where it returns the hidden state alone.
        parts: of each layer, the names of the modules that it holds beside its block.
        shared: the names of the modules that several layers hold.
        tied: names of parameters that the library ties -> the parameter that they share.
        side, optional_side: the side inputs that each layer needs, or takes if the data have them.
        pad: the number of the padding token.
        cache_name: what the forward calls the cache that it takes; empty if it takes none.
        routers: their loss; None if it is not in the model's.
        source: the module that makes the first hidden state, where the forward reads that state again after the first
            block, as the convolution of DeBERTa does.
    """

    def __init__(self, model: Any, task: TaskName, tied: Tied, weight: float = 0.0) -> None:
        """`weight` is that of the auxiliary loss of routers."""
        self.model, self.config = model, model.config
        self.name = type(model).__name__
        self.tied = tied_names(model)
        if tied == "untie":
            untie(model, self.tied)
        self.pad: int | None = getattr(self.config, "pad_token_id", None)
        taken = inspect.signature(model.forward).parameters
        accepted = tuple(name for name in _SIDE if name in taken)
        self.side = tuple(name for name in accepted if name == "attention_mask" and task != "causal-lm")
        self.optional_side = tuple(name for name in accepted if name not in self.side and self._reads(name))
        self.cache_name = next((name for name in _CACHES if name in taken), "")
        self.routers = _routers(model, weight) if weight else None
        self.list_name, self.blocks = _list_of_blocks(model)
        self.length, found, source = _survey(self)
        self.parts, self.shared = _divide(self, found)
        self.source = model.get_submodule(source) if source and {*self.parts[1]} - {*self.shared} else None

    def memo(self) -> dict[int, Any]:
        """What copies of the model's modules share with it."""
        kept = (self.config, getattr(self.model, "generation_config", None))
        return {id(one): one for one in kept if one is not None}

    def _reads(self, side: str) -> bool:
        """Whether a model reads a side input that its forward takes: BERT's kin may have one type of tokens only."""
        return side != "token_type_ids" or (getattr(self.config, "type_vocab_size", 0) or 0) > 1


def tied_names(model: Any) -> dict[str, str]:
    """The names of parameters that are the same as an earlier one, and the name of that."""
    first: dict[int, str] = {}
    pairs = [
        (name, first.setdefault(id(parameter), name))
        for name, parameter in model.named_parameters(remove_duplicate=False)
    ]
    return {name: other for name, other in pairs if name != other}


def untie(model: Any, tied: Mapping[str, str]) -> None:
    """Give each of these parameters a tensor of its own."""
    for full_name in tied:
        path, _, name = full_name.rpartition(".")
        module = model.get_submodule(path)
        module.register_parameter(name, nn.Parameter(torch.empty_like(module.get_parameter(name))))


def _list_of_blocks(model: Any) -> tuple[str, list[nn.Module]]:
    """The list with as many modules as the configuration has layers, the largest and outermost of them."""
    count = getattr(model.config, "num_hidden_layers", None)
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    }
    if not lists:
        raise ModelError(
            f"{type(model).__name__} must have its blocks in one list of num_hidden_layers ({count}), and has none; "
            "give its layers as module:factory"
        )
    name = max(lists, key=lambda name: sum(p.numel() for p in lists[name].parameters()))
    return name, list(lists[name])


class _Uses(TorchFunctionMode):
    """Notes between which blocks each parameter is used, and which module makes the first hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.place = 0
        self.places: dict[int, set[int]] = defaultdict(set)
        self.first: Tensor | None = None
        self.made: list[tuple[Any, nn.Module]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for one in tree_leaves((args, kwargs)):
            if isinstance(one, nn.Parameter):
                self.places[id(one)].add(self.place)
        return func(*args, **(kwargs or {}))

    def note(self, module: nn.Module, args: Any, output: Any) -> None:
        """A hook of all modules."""
        if not self.place:
            self.made.append((output, module))

    @property
    def source(self) -> nn.Module | None:
        """The outermost module whose output is the first hidden state."""
        return next((module for output, module in reversed(self.made) if output is self.first), None)


class _Milestone(_Seat):
    """A seat that counts the blocks, and notes which parameters reach a block beside the hidden state."""

    def __init__(self, block: nn.Module, length: int | None, uses: _Uses, *, last: bool) -> None:
        super().__init__(block, length)
        self.uses, self.last = uses, last

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As a seat does."""
        hidden = _hidden(args, kwargs)
        if self.uses.first is None:
            self.uses.first = hidden
        self.uses.place += 1
        for one in tree_leaves((args, kwargs)):
            if isinstance(one, Tensor) and one is not hidden and one.requires_grad:
                for parameter in _leaves(one):
                    self.uses.places[parameter].add(self.uses.place)
        self.uses.place += self.last  # what follows the last block is a layer of its own
        return super().forward(*args, **kwargs)


def _leaves(tensor: Tensor) -> set[int]:
    """The ids of the parameters that a tensor was computed from."""
    found, seen, nodes = set(), set(), [tensor.grad_fn]
    if tensor.grad_fn is None:
        return {id(tensor)}
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        nodes += [next_node for next_node, _ in node.next_functions]
    return found


def _survey(skeleton: Skeleton) -> tuple[int | None, dict[str, set[int]], str | None]:
    """How long a tuple a block returns, where each parameter outside of blocks is used, and what makes the first state.

    The forward runs with stand-ins for blocks, on tensors without data. Whether a block returns a tensor or a tuple
    shows in the shape of the logits.
    """
    trouble: Exception | None = None
    for length in (None, 1, 2, 3, 4):
        try:
            places, source, shape = _run_without_blocks(skeleton, length)
        except ModelError:
            raise
        except Exception as error:  # of the library
            trouble = trouble or error
            continue
        if shape[0] == _ROWS and len(shape) in (2, 3):
            return length, places, source
    raise ModelError(
        f"{skeleton.name} must run with stand-ins for its blocks, and does not: "
        f"{first_line(trouble) if trouble else 'its output has another shape'}; give its layers as module:factory"
    )


def _run_without_blocks(skeleton: Skeleton, length: int | None) -> tuple[dict[str, set[int]], str | None, torch.Size]:
    uses = _Uses()
    *_, last = skeleton.blocks
    memo = skeleton.memo() | {
        id(block): _Milestone(block, length, uses, last=block is last) for block in skeleton.blocks
    }
    model = copy.deepcopy(skeleton.model, memo)
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        replace_tensors(model, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
        _settle(model)
        ids = torch.ones(_ROWS, _LENGTH, dtype=torch.int64)
        side = {name: torch.ones_like(ids) for name in skeleton.side}
        hook = register_module_forward_hook(uses.note)
        try:
            with uses:
                logits = model(input_ids=ids, **side).logits
        finally:
            hook.remove()
    if uses.place != len(skeleton.blocks) + 1:
        raise ModelError(
            f"{skeleton.name} must run each of its {len(skeleton.blocks)} blocks once, one after the other, and does "
            "not; give its layers as module:factory"
        )
    parameters = model.named_parameters(remove_duplicate=False)
    places = {name: uses.places[id(parameter)] for name, parameter in parameters}
    return places, next((name for name, module in model.named_modules() if module is uses.source), None), logits.shape


def _divide(skeleton: Skeleton, found: Mapping[str, set[int]]) -> tuple[list[list[str]], tuple[str, ...]]:
    """The names of the modules beside its block that each layer holds; and those that several layers hold.

    A module whose parameters are all used in the same layers is one part.
    """
    parts: list[list[str]] = [[] for _ in range(len(skeleton.blocks) + 2)]
    shared: list[str] = []
    one = tied_names(skeleton.model)  # held under the name of the other

    def divide(full_name: str, module: nn.Module) -> None:
        if full_name == skeleton.list_name:
            return
        prefix = f"{full_name}." if full_name else ""
        names = [name for name in module.state_dict() if prefix + name not in one]
        if not names:
            return
        holds_blocks = skeleton.list_name.startswith(prefix)
        used = {frozenset(found.get(prefix + name, ())) for name in names} - {frozenset()}
        if holds_blocks or len(used) > 1:
            own = [prefix + name for name in names if "." not in name]
            if own:
                raise ModelError(
                    f"{skeleton.name} must hold its weights in modules of one place in its forward, and holds "
                    f"{', '.join(own)} beside them; give its layers as module:factory"
                )
            for name, child in module.named_children():
                divide(prefix + name, child)
            return
        [places] = used or [frozenset([0])]
        if len(places) > 1:
            shared.append(full_name)
        for place in places:
            parts[place].append(full_name)

    divide("", skeleton.model)
    return parts, tuple(shared)


def take_apart(
    config: Any,
    task: TaskName,
    *,
    block_size: int | None = None,
    source: str | None = None,
    tied: Tied | None = None,
    step_tokens: int = 0,
    narrow: Any = None,
) -> Blueprint:
    """The model of a configuration of transformers in layers, with the weights of `source` if there is one.

    Token ids [B, T] go in; logits come out, [B, T, vocabulary] or [B, labels]. Costs are the multiplications of one
    token's forward pass, `block_size` tokens attending to each other. Without `tied`, the tokens of a step decide.
    `narrow` is `without_weights` of the dtype that weights will have, where it is not float32.

    Raises:
        ModelError: the library refuses the configuration, the model cannot be cut, or there are no weights to read.
    """
    if not isinstance(getattr(config, "hidden_size", None), int):
        raise ModelError(
            f"a model must be one that reads text alone, and {config.model_type} has no hidden_size of its own; give "
            "its layers as module:factory"
        )
    for name in ("layerdrop", "decoder_layerdrop"):
        if getattr(config, name, 0):
            raise ModelError(
                f"{name} must be 0, because each stage runs in each step, got {getattr(config, name)}; set it in "
                f"model.config"
            )
    weight = aux_loss_weight(config) if task == "causal-lm" else 0.0  # the library's classifiers have no such loss
    saved, config = copy.deepcopy(config), copy.deepcopy(config)
    # a cache is for generation only, and what routers give is for their loss, which layers make themselves
    config.use_cache = config.output_router_logits = False
    whole = without_weights(config, task)
    if narrow is not None:
        _take_buffers(whole, narrow)
    twice = tied_names(whole)
    if tied == "sum" and not twice:
        raise ModelError(
            f"model.tied: sum needs a model whose head and embedding are one weight, and those of this "
            f"{config.model_type} are two; leave it out"
        )
    checkpoint = None if source is None else open_checkpoint(source, named=partial(as_in_model, whole), tied=twice)
    if tied is None:
        own_head = checkpoint is not None and bool(checkpoint.stored.keys() & twice.keys())
        tied = "sum" if twice and not own_head and _DEAR * config.vocab_size <= step_tokens else "untie"
    with parameters_on_meta():
        skeleton = Skeleton(whole, task, tied, weight)
    saved.tie_word_embeddings = tied == "sum"
    saved.architectures = [skeleton.name]
    max_positions = _max_positions(skeleton)
    attention = 2.0 * (block_size or max_positions or 0) * config.hidden_size
    base = skeleton.model.base_model_prefix
    head = skeleton.parts[-1]
    if checkpoint is not None:
        checkpoint = replace(
            checkpoint,
            fresh=tuple(f"{name}." for name in head if task != "causal-lm" and _is_new(name, base)),
            ignored=(*_BUFFERS, *(skeleton.model._keys_to_ignore_on_load_unexpected or ())),
        )
    costs = [
        float(config.hidden_size),
        *(_multiplications([block]) + attention for block in skeleton.blocks),
        _multiplications(skeleton.model.get_submodule(name) for name in head),
    ]
    names = ["embedding", *(f"block {index}" for index in range(len(skeleton.blocks))), "head"]
    return Blueprint(
        layers=tuple(
            LayerSpec(name, partial(Stretch, skeleton, place), cost)
            for place, (name, cost) in enumerate(zip(names, costs, strict=True))
        ),
        initialize=partial(_initialize, skeleton),
        checkpoint=checkpoint,
        side=(*skeleton.side, *skeleton.optional_side),
        shared=skeleton.shared,
        vocab_size=config.vocab_size,
        max_positions=max_positions,
        switch=_switch(config),
        save_config=partial(_save_config, saved, source),
        tied=skeleton.tied if tied == "untie" else {},
        head=tied if skeleton.tied else None,
        ends=partial(_ends, skeleton.config, source),
        unheeded=partial(_unheeded, source),
        dtype=str(getattr(saved, "dtype", None) or torch.float32).removeprefix("torch."),
    )


def tasks_of(model_type: str) -> list[TaskName]:
    """The tasks that transformers has a model for, of a type of configuration."""
    from transformers.models.auto import modeling_auto

    encoder = model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    tables = {
        # where tokens of a causal model see later ones, as in BERT, it is for another task
        "causal-lm": () if encoder else modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "classification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "token-classification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    }
    return [task for task in AUTO_CLASSES if model_type in tables[task]]


def text_model_of(config: Any) -> tuple[Any, str]:
    """The configuration of the text model in a model of text and images, and the type of the whole.

    It is taken where transformers takes it: AutoModelForCausalLM makes a Qwen3_5ForCausalLM of the weights of a
    Qwen3_5ForConditionalGeneration. Other configurations stay as they are, and the type is empty.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    of_text = (config.sub_configs or {}).get("text_config")
    if of_text is None or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config, ""
    made: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    text = config.get_text_config()
    if made.config_class != of_text or "causal-lm" not in tasks_of(text.model_type):
        return config, ""
    for name in ("dtype", "quantization_config"):  # which the whole has for all of its parts
        if getattr(text, name, None) is None and getattr(config, name, None) is not None:
            setattr(text, name, getattr(config, name))
    return text, config.model_type


OF_BLOCKS = "per_layer_config"
"""The field with what some blocks have otherwise: {"05": {"head_dim": 512}}."""


def fields_of_blocks(config: Any, count: int) -> dict[str, Any]:
    """The fields that make a configuration one of `count` blocks, at most as many as it has."""
    layers, fields = config.num_hidden_layers, config.to_dict()
    # a list with an entry for each block gets shorter with them
    shortened: dict[str, Any] = {
        name: value[:count] for name, value in fields.items() if isinstance(value, list) and len(value) == layers
    }
    if of_blocks := fields.get(OF_BLOCKS):
        shortened[OF_BLOCKS] = {place: each for place, each in of_blocks.items() if int(place) < count}
    return {**shortened, config.attribute_map.get("num_hidden_layers", "num_hidden_layers"): count}


def kinds_of_blocks(config: Any, task: TaskName) -> list[Any]:
    """What tells the blocks of a model apart: what they hold, and what lists of its configuration say of each.

    Raises:
        ModelError: the library refuses the configuration, or the blocks are no list.
    """
    _, blocks = _list_of_blocks(without_weights(config, task))
    held = [tuple((name, tensor.shape) for name, tensor in block.state_dict().items()) for block in blocks]
    lists = [each for each in config.to_dict().values() if isinstance(each, list) and len(each) == len(blocks)]
    said = [each for each in lists if all(isinstance(one, str) or one in (0, 1) for one in each)]
    return list(zip(held, *said, strict=True))


def unsplit(config: Any, task: TaskName, dtype: torch.dtype = torch.float32) -> Any:
    """The whole model, as the library builds it, without values: to draw them takes twice as long."""
    import transformers
    from transformers.initialization import no_init_weights

    auto: Any = getattr(transformers, AUTO_CLASSES[task])
    # scaled dot-product attention cannot bend its scores
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else None
    with no_init_weights():
        model = auto.from_config(config, dtype=dtype, attn_implementation=attention, **hub.NO_CODE)
    model.tie_weights(recompute_mapping=False)  # `no_init_weights` leaves it out
    return model


def for_the_library(folder: Path, task: TaskName, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a model as the library stores them. `folder` holds its config.json.

    Raises:
        ModelError: the library refuses the configuration.
    """
    from transformers import AutoConfig

    return as_stored(without_weights(hub.load(AutoConfig, str(folder)), task), state)


def wide_names(whole: Any, dtype: torch.dtype) -> frozenset[str]:
    """The tensors that `from_pretrained` keeps float32 in a model of a narrower dtype, by full name."""
    kept = [re.compile(pattern.replace("*", ".*")) for pattern in whole._get_dtype_plan(dtype)]
    floats = {name: each.dtype for name, each in whole.state_dict().items() if each.is_floating_point()}
    return frozenset(n for n, own in floats.items() if own == torch.float32 or any(k.search(n) for k in kept))


def wide_in(folder: Path, task: TaskName, dtype: torch.dtype) -> frozenset[str]:
    """As `wide_names`, of the configuration in a folder. ModelError if the library refuses it."""
    from transformers import AutoConfig

    if dtype == torch.float32:
        return frozenset()
    return wide_names(without_weights(hub.load(AutoConfig, str(folder)), task, dtype), dtype)


def _take_buffers(model: Any, narrow: Any) -> None:
    """Give a model the buffers that no checkpoint holds and that the library makes in a narrower dtype."""
    for full_name, buffer in narrow.named_buffers():
        path, _, name = full_name.rpartition(".")
        module = model.get_submodule(path)
        if name in module._non_persistent_buffers_set and buffer.dtype != module._buffers[name].dtype:
            module._buffers[name] = buffer


def without_weights(config: Any, task: TaskName, dtype: torch.dtype = torch.float32) -> Any:
    """The whole model, its weights on the meta device, as the library builds it."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), parameters_on_meta(), _NeverReal():
            return unsplit(config, task, dtype)
    except Exception as error:  # of the library, whose modules check fields in their own ways
        raise ModelError(
            f"transformers cannot build {config.model_type} of this configuration: {first_line(error)}"
        ) from error


class _NeverReal(TorchFunctionMode):
    """Inside, constructors make large weights on the meta device at once.

    Weights that are made on the CPU and thrown away leave gaps in the heap, a gigabyte for a model of real size. Stages
    then put large tensors there, in place of pages of their own, which would go back to the system when freed.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch; `empty` for the meta device, if what it makes is large and has no device.

        Large zeros may be a buffer, whose values count. NumPy's take no memory until they are used.
        """
        kwargs = kwargs or {}
        if func in (torch.empty, torch.zeros) and kwargs.get("device") is None:
            on_meta = func(*args, **{**kwargs, "device": "meta"})
            if on_meta.numel() >= _LARGE:
                if func is torch.empty:
                    return on_meta
                if on_meta.dtype == torch.float32:
                    return torch.from_numpy(np.zeros(on_meta.shape, np.float32))
        return func(*args, **kwargs)


def aux_loss_weight(config: Any) -> float:
    """What the auxiliary loss of routers is multiplied by in the model's loss; 0 where it is not added."""
    known = [getattr(config, name) for name in AUX_LOSS_WEIGHTS if hasattr(config, name)]
    return max(known, default=1.0) if getattr(config, "output_router_logits", False) else 0.0


def _routers(model: Any, weight: float) -> Routers:
    """The routers of a language model. ModelError unless their loss is that of Mixtral, which layers make of sums."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as known

    own = getattr(sys.modules[type(model).__module__], known.__name__, None)
    recorder: Any = (model.base_model._can_record_outputs or {}).get("router_logits")
    if own is None or inspect.getsource(own) != inspect.getsource(known) or not hasattr(recorder, "index"):
        raise ModelError(
            f"stages can add up only the auxiliary loss of Mixtral's routers, and {model.config.model_type} has "
            f"another one, with weight {weight}; set output_router_logits to false, or the weight to 0, in model.config"
        )
    return Routers(recorder.target_class, recorder.index, model.num_experts_per_tok, weight)


def _is_new(name: str, base: str) -> bool:
    """Whether a part of a classifier's head is none of the pretrained model's: it may be drawn."""
    return not name.startswith(f"{base}.") or name == f"{base}.pooler"


def _save_config(config: Any, source: str | None, folder: Path) -> None:
    """Write config.json, and the source's generation settings: the tokens that end a text, how it samples."""
    config.save_pretrained(folder)
    if (settings := _settings(source)) is not None:
        shutil.copyfile(settings, folder / GENERATION)


def _settings(source: str | None) -> Path | None:
    """The generation settings of a model: they lie beside its weights, or in model/ of the run that has saved those."""
    if source is None:
        return None
    if not is_of_run(source):
        return find(source, GENERATION)
    path = Path(source).resolve().parent.parent / "model" / GENERATION
    return path if path.is_file() else None


def _read_settings(source: str | None) -> dict[str, Any]:
    settings = _settings(source)
    try:
        return {} if settings is None else read_object(settings.resolve())  # a link in the hub's cache
    except (OSError, ValueError) as error:
        raise ModelError(f"{settings} must be an object of JSON, and cannot be read: {error}") from error


def _unheeded(source: str | None) -> list[str]:
    """The source's generation settings without which transformers writes another text, by names."""
    given = _read_settings(source)
    return [name for name, usual in _BEYOND_THE_LARGEST.items() if given.get(name) not in (None, usual)]


def _ends(config: Any, source: str | None) -> tuple[int, ...]:
    """The tokens that end a text, by the source's generation settings, or else by the configuration."""
    found = _read_settings(source).get("eos_token_id", getattr(config, "eos_token_id", None))
    return tuple(token for token in (found if isinstance(found, list) else [found]) if type(token) is int)


def _initialize(skeleton: Skeleton, full_name: str, module: nn.Module) -> None:
    skeleton.model._init_weights(module)
    if skeleton.config.model_type == "gpt2" and full_name.endswith(".c_proj"):
        # smaller at the end of a residual path, as in the GPT-2 paper; transformers forgets it
        std = skeleton.config.initializer_range / math.sqrt(2 * skeleton.config.n_layer)
        nn.init.normal_(module.get_parameter("weight"), std=std)


def _max_positions(skeleton: Skeleton) -> int | None:
    """The positions that tokens can use: RoBERTa's kin count from the number of the padding token on."""
    longest: int | None = getattr(skeleton.config, "max_position_embeddings", None)
    embeddings = [module for module in skeleton.model.modules() if isinstance(module, nn.Embedding)]
    taken = [
        embedding.padding_idx + 1
        for embedding in embeddings
        if embedding.num_embeddings == longest and embedding.padding_idx is not None
    ]
    return longest if longest is None else longest - max(taken, default=0)


def _switch(config: Any) -> int | None:
    """The longest text, in tokens, of which LongRoPE makes its angles by other factors than of longer ones."""
    given = getattr(config, "rope_parameters", None) or {}
    each = [one for one in (given, *given.values()) if isinstance(one, dict) and one.get("rope_type") == "longrope"]
    return min((one["original_max_position_embeddings"] for one in each), default=None)


def _multiplications(modules: Any) -> float:
    """The multiplications of one token: one for each number of each matrix."""
    return float(sum(p.numel() for module in modules for p in module.parameters() if p.ndim > 1))
