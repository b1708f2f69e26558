"""One or two texts and the class they belong to, as rows of one length: the shape of GLUE's tasks.

Every stage must know the shape of what it receives, so texts of varying length are padded to one, and the padding
crosses the wire like the rest. The masks that hide it from attention do not: stages read them by sample id.

Tensor names end in their shape: B samples, T tokens.
"""

import torch
from torch import Tensor

from thinwire.models.data.tokenizer import Padded
from thinwire.models.digest import tensor_lines, weights_digest


class PairSamples:
    """Tokenized texts, with a label each; the id of a sample is its place in the source."""

    def __init__(self, padded: Padded, labels: Tensor) -> None:
        self.padded = padded
        self.labels = labels
        tensors = {"input_ids": padded.tokens, **padded.side, "labels": labels}
        self.digest = weights_digest(tensor_lines(tensors))

    def __len__(self) -> int:
        return len(self.labels)

    def inputs(self, ids: Tensor, epoch: int = 0) -> Tensor:
        """The tokens [B, T] of samples `ids` [B], as int64, the same in every epoch."""
        return self.padded.tokens[ids].long()

    def targets(self, ids: Tensor) -> Tensor:
        """The labels [B], as int64."""
        return self.labels[ids]

    def side(self, ids: Tensor) -> dict[str, Tensor]:
        """What else models read of each token, int64 [B, T]: attention_mask, and maybe token_type_ids."""
        return {name: tensor[ids].long() for name, tensor in self.padded.side.items()}

    def example(self, batch: int) -> Tensor:
        """The inputs of `batch` samples without data: int64 [batch, T] on the meta device."""
        return torch.empty(batch, self.padded.tokens.shape[1], dtype=torch.int64, device="meta")

    def side_example(self, batch: int) -> dict[str, Tensor]:
        """`side` for `batch` samples without data."""
        return {name: self.example(batch) for name in self.padded.side}

    def notes(self) -> tuple[str, ...]:
        """What a person should know of the fit: how much padding there is, and how much was cut."""
        length = self.padded.tokens.shape[1]
        mask = self.padded.side.get("attention_mask")
        notes = []
        if mask is not None:
            share = 1 - int(mask.sum(dtype=torch.int64)) / mask.numel()
            longest = int(mask.sum(dim=1, dtype=torch.int64).max())
            notes.append(
                f"{share:.1%} of the {len(self)} x {length} tokens are padding, and cross the wire like the others; "
                f"the longest sample has {longest}"
            )
        if self.padded.num_truncated:
            notes.append(f"{self.padded.num_truncated} of {len(self)} samples are cut to {length} tokens")
        return tuple(notes)
