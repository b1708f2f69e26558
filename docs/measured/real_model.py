"""What codecs cost SmolLM2 before any training: python docs/measured/real_model.py TEXT --tokens 6144 [CODEC ...].

The unsplit model reads blocks of a text; hidden states after some of its 30 blocks go through a codec and back, with
the payloads that would cross a boundary. Printed are the bits really needed an element, signal to noise of all values
and of the median row, and the loss more than uncompressed, with its standard error over the blocks of text.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from thinwire.compress import Codec, Key, parse
from thinwire.models.smollm2 import folder

CUTS = {2: (15,), 4: (7, 14, 22), 8: (4, 8, 12, 15, 19, 23, 27)}
"""Stages -> after how many of the 30 blocks the model is cut."""
BATCH = 2048
"""Tokens of a message."""
CODECS = ("q(8, step=0.2)", "q(8, step=0.25)", 'q(7, grid="midtread", code="entropy")', 'q(4, grid="midrise")')
_KEY = Key(seed=0, boundary=0, channel="activations", phase="train", step=0, microbatch=0)

Hook = Callable[[object, object, Tensor], Tensor]


@dataclass
class Crossed:
    """What crossed the boundaries so far, by message."""

    bits: list[float] = field(default_factory=list)
    powers: list[Tensor] = field(default_factory=list)
    """Of each row: the squares of its values, and of its errors, [2, rows]."""

    def decibels(self) -> tuple[float, float]:
        """Signal to noise of all values, and of the median row."""
        signal, noise = torch.cat(self.powers, 1).double()
        whole, median = signal.sum() / noise.sum(), (signal / noise).median()
        return 10 * math.log10(whole), 10 * math.log10(median)


def through(codec: Codec, crossed: Crossed, *, keeps_first: bool) -> Hook:
    """A hook on a block of the model that sends its output through a codec, and notes bits and errors.

    With `keeps_first` the first token of each block of text arrives as it was, for its bits all the same.
    """

    def hook(module: object, arguments: object, hidden: Tensor) -> Tensor:
        sent = hidden.contiguous()
        payload = torch.empty(codec.nbytes(sent.shape, sent.dtype), dtype=torch.uint8)
        codec.encode(sent, payload, _KEY)
        crossed.bits.append(8 * codec.used(payload) / sent.numel())
        received = torch.empty_like(sent)
        codec.decode(payload, received, _KEY)
        crossed.powers.append(torch.stack([sent, received - sent]).square().sum(-1).flatten(1))
        if keeps_first:
            received[:, 0] = sent[:, 0]
        return received

    return hook


@torch.no_grad()
def losses(model: torch.nn.Module, blocks: Tensor, cuts: Sequence[int], hook: Hook | None) -> Tensor:
    """The mean loss of each block of text, [blocks], with a hook after each cut."""
    layers = model.get_submodule("model.layers")
    handles = [layers.get_submodule(str(cut - 1)).register_forward_hook(hook) for cut in cuts if hook is not None]
    found = []
    for batch in blocks.split(BATCH // blocks.shape[1]):
        logits = model(batch).logits[:, :-1].flatten(0, 1)
        each = torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten(), reduction="none")
        found.append(each.view(len(batch), -1).mean(1))
    for handle in handles:
        handle.remove()
    return torch.cat(found)


def main() -> None:
    """Print a line for each number of stages and codec."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("codecs", nargs="*", default=CODECS)
    parser.add_argument("--tokens", type=int, default=6144)
    parser.add_argument("--stages", type=int, action="append", choices=CUTS, help="repeat it for more (default: 4)")
    parser.add_argument("--block", type=int, default=512, help="tokens of a block of text")
    parser.add_argument("--alone", action="store_true", help="one cut at a time, too")
    parser.add_argument("--keep-first", action="store_true", help="first tokens arrive as they were")
    options = parser.parse_intermixed_args()  # codecs may follow options
    place = folder()
    tokens = AutoTokenizer.from_pretrained(place)(options.text.read_text())["input_ids"]
    count = options.tokens // options.block
    blocks = torch.tensor(tokens[: count * options.block]).view(count, options.block)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    plain = losses(model, blocks, (), None)
    print(f"uncompressed {plain.mean():.4f} nats a token, {count * options.block} tokens")
    for stages in options.stages or [4]:
        cuts = CUTS[stages]
        for expression in options.codecs:
            for some in [cuts, *([(cut,) for cut in cuts] if options.alone else [])]:
                crossed = Crossed()
                hook = through(parse(expression), crossed, keeps_first=options.keep_first)
                more = losses(model, blocks, some, hook) - plain
                error = more.std() / math.sqrt(count)
                bits, (whole, median) = sum(crossed.bits) / len(crossed.bits), crossed.decibels()
                where = f"{stages} stages" if some == cuts else f"block {some[0]}"
                print(f"{where:9} {expression:45}{bits:6.2f} bits  {whole:5.1f} dB  median row {median:5.1f}", end="  ")
                print(f"{more.mean():+.4f} +- {error:.4f}", flush=True)


if __name__ == "__main__":
    main()
