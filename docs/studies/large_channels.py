"""A GPT-2 whose residual stream has a few channels that are larger, and that computes nearly the same.

All that writes the channels is multiplied by a factor, and the gains that read them are divided by it. Only the means
and deviations of the layer norms change, so train it a little before you use it.

python docs/studies/large_channels.py EXPORTED FOLDER FACTOR
"""

import sys

import torch
from transformers import GPT2LMHeadModel

CHANNELS = [23, 63, 75]  # pretrained GPT-2 has such ones, too: 3 of its 768


@torch.no_grad()
def enlarge(model: GPT2LMHeadModel, factor: float) -> None:
    """Multiply what writes the channels, and divide what reads them; in place. The head must not be tied."""
    body = model.transformer
    writers = [body.wte.weight, body.wpe.weight]
    readers = [body.ln_f.weight]
    for block in body.h:
        for last in (block.attn.c_proj, block.mlp.c_proj):
            writers += [last.weight, last.bias]
        readers += [block.ln_1.weight, block.ln_2.weight]
    for writer in writers:
        writer[..., CHANNELS] *= factor
    for reader in readers:
        reader[CHANNELS] /= factor


def main() -> None:
    """Read an exported model, enlarge its channels, and write it."""
    exported, folder, factor = sys.argv[1:]
    model = GPT2LMHeadModel.from_pretrained(exported)
    assert not model.config.tie_word_embeddings, "a tied head reads what the embedding writes: both cannot be scaled"
    enlarge(model, float(factor))
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
