"""Samples of one or two texts and their class, or of words and their tags, as rows of one length.

Every stage must know the shape of each tensor that it receives. So texts are padded to one length, and the padding
crosses the wire too. The attention masks do not cross it: stages read them by sample id.

Tensor names end in their shape: B samples, T tokens.
"""

import torch
from torch import Tensor

from thinwire.models.data.samples import Samples, TokenRows
from thinwire.models.data.tokenizer import Padded
from thinwire.models.digest import tensor_lines, weights_digest
from thinwire.models.errors import ModelError


class PairSamples(TokenRows):
    """Tokenized texts, each with a label, or a label for each token. The id of a sample is its place in the source.

    The side inputs are attention_mask, and token_type_ids if the tokenizer has them.
    """

    def __init__(self, padded: Padded, labels: Tensor) -> None:
        super().__init__(padded.tokens, labels, padded.side)
        self.padded = padded
        tensors = {"input_ids": padded.tokens, **padded.side, "labels": labels}
        self.digest = weights_digest(tensor_lines(tensors))

    def notes(self) -> tuple[str, ...]:
        """Sentences for the user: the share of padding, and how many samples were cut."""
        length = self.padded.tokens.shape[1]
        mask = self.padded.side.get("attention_mask")
        notes = []
        if mask is not None:
            share = 1 - int(mask.sum(dtype=torch.int64)) / mask.numel()
            longest = int(mask.sum(dim=1, dtype=torch.int64).max())
            notes.append(
                f"{share:.1%} of the {len(self)} x {length} tokens are padding, which crosses the wire too; "
                f"the longest sample has {longest}"
            )
        if self.padded.num_truncated:
            notes.append(f"{self.padded.num_truncated} of {len(self)} samples are cut to {length} tokens")
        if not self.padded.apart:
            notes.append(
                "data.tokenizer puts no token between the two texts of a pair, so no model sees where one ends"
            )
        return tuple(notes)


def require_ends(padding: int | None, samples: Samples) -> None:
    """Check that texts end before their `padding`, where a classifier of the library looks for the end; not if None.

    Raises:
        ModelError: samples are filled up by another token, or a text ends with this one.
    """
    if padding is None or not isinstance(samples, PairSamples) or "attention_mask" not in samples.padded.side:
        return
    mask = samples.padded.side["attention_mask"]
    places = torch.arange(1, mask.shape[1] + 1)
    found, last = ((there * places).amax(1) for there in (samples.padded.tokens != padding, mask))
    if wrong := int((found != last).sum()):
        raise ModelError(
            f"pad_token_id in config must be the tokenizer's padding, and no text may end with it, got {padding}: "
            f"the exported classifier would take another token for the end of {wrong} of {len(samples)} texts"
        )
