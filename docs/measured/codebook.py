"""What the option codebook saves on the rows of a real model: bits as they are sent, text by text, while it learns.

    python docs/measured/codebook.py bits FOLDER TEXT [TEXT ..]     # a language model of transformers with model.layers
    python docs/measured/codebook.py times                          # milliseconds beside the same codec without it

The texts are read one after the other, 40,960 tokens of each in windows of 256, messages of 1,024 tokens; both ends are
there, and what arrives is checked.
"""

import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from thinwire.compress import Decoder, Encoder, Microbatch, parse
from thinwire.compress.buffers import SlotCounts
from thinwire.compress.codec import Key
from thinwire.compress.stores.memory import MemoryStore

BLOCKS, STEPS, ENTRIES = (7, 15, 22), (0.2, 0.4, 0.6, 0.8), 4096
WINDOW, WINDOWS, TOKENS = 256, 4, 40_960
SHAPES = ((1024, 576), (2048, 4096))


class Channel:
    """Both ends of a channel, in one process."""

    def __init__(self, expression: str, example: Tensor) -> None:
        method, counts = parse(expression), SlotCounts(positions=len(example))
        self.sender = Encoder(method, example, counts=counts, make_store=lambda layout, purpose: MemoryStore(layout))
        self.receiver = Decoder(method, example, counts=counts, make_store=lambda layout, purpose: MemoryStore(layout))
        self.messages = 0

    def send(self, x: Tensor) -> tuple[int, Tensor, list[float]]:
        """Bytes sent, what arrives, and the seconds of encode, of the update behind it, and of decode."""
        microbatch, self.messages = Microbatch("train", range(len(x)), None, self.messages, 0), self.messages + 1
        key = Key(0, 0, "activations", "train", self.messages, 0)
        plan, again = self.sender.plan(microbatch), self.receiver.plan(microbatch)
        payload, out = torch.empty(plan.nbytes, dtype=torch.uint8), torch.empty_like(x)
        times = [time.perf_counter()]
        encoded = self.sender.encode(x, payload, key, plan)
        times.append(time.perf_counter())
        self.sender.settle(encoded)
        times.append(time.perf_counter())
        self.receiver.decode(payload, out, key, again)
        times.append(time.perf_counter())
        return self.sender.used(payload, plan), out, [after - before for before, after in pairwise(times)]


def captured(folder: str, text: str) -> dict[int, Tensor]:
    """The hidden states after each block, bf16 [windows, WINDOW, width]."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text[: 8 * TOKENS])["input_ids"][:TOKENS])
    ids = ids[: len(ids) // (WINDOW * WINDOWS) * WINDOW * WINDOWS].view(-1, WINDOW)
    found: dict[int, list[Tensor]] = {block: [] for block in BLOCKS}
    for block, kept in found.items():
        model.model.layers[block].register_forward_hook(
            lambda _, inputs, output, kept=kept: kept.append(
                (output[0] if isinstance(output, tuple) else output).bfloat16()
            )
        )
    with torch.no_grad():
        for some in ids.split(WINDOWS):
            model.model(some)
    return {block: torch.cat(kept) for block, kept in found.items()}


def rows(folder: str, paths: list[str]) -> Iterator[str]:
    """A table: for each text, block and step the bits without a codebook, and with one as it learns."""
    texts = {path: captured(folder, Path(path).read_text()) for path in paths}
    yield "| after block | step | text | without | first 10,240 tokens | next 10,240 | after them |\n|" + "---|" * 7
    for block in BLOCKS:
        for step in STEPS:
            channels = [
                Channel(f"q(8, step={step}{option})", torch.empty(WINDOWS, WINDOW, texts[paths[0]][block].shape[-1]))
                for option in ("", f", codebook={ENTRIES}")
            ]
            for path, of in texts.items():
                sizes: list[tuple[float, float]] = []
                for message in of[block].split(WINDOWS):
                    x = message.float()
                    sent = [channel.send(x) for channel in channels]
                    # of rows that are not massive
                    size = x.square().mean(-1, keepdim=True).sqrt()
                    worst = [((out - x).abs() / size)[:, 1:].max().item() for _, out, _ in sent]
                    assert max(worst) < 0.51 * step * 1.01, worst
                    sizes.append((8 * sent[0][0] / x.numel(), 8 * sent[1][0] / x.numel()))
                parts = [sizes[:10], sizes[10:20], sizes[20:]]
                means = [f"{sum(with_it for _, with_it in part) / len(part):.2f}" for part in parts if part]
                without = sum(plain for plain, _ in sizes) / len(sizes)
                yield f"| {block} | {step} | {Path(path).name} | {without:.2f} | {' | '.join(means)} |"


def times() -> Iterator[str]:
    """A table: milliseconds of encode, update and decode on one thread, medians by turns."""
    yield "| shape | codec | encode | update | decode |\n|---|---|---|---|---|"
    for shape in SHAPES:
        kinds = torch.randn(3000, shape[1])
        expressions = ("q(8, step=0.2)", f"q(8, step=0.2, codebook={ENTRIES})")
        channels = [Channel(expression, torch.empty(1, *shape)) for expression in expressions]
        seconds: list[list[list[float]]] = [[], []]
        for _ in range(11):
            x = kinds[torch.randint(len(kinds), (shape[0],))] + 0.5 * torch.randn(shape)
            for channel, kept in zip(channels, seconds, strict=True):
                kept.append(channel.send(x.unsqueeze(0))[2])
        for expression, kept in zip(expressions, seconds, strict=True):
            cells = (f"{1000 * median(part):.1f}" for part in zip(*kept[3:], strict=True))
            yield f"| {list(shape)} | `{expression}` | {' | '.join(cells)} |"


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    for line in times() if sys.argv[1] == "times" else rows(sys.argv[2], sys.argv[3:]):
        print(line, flush=True)


if __name__ == "__main__":
    main()
