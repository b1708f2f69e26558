"""Text as numbered blocks of tokens. A sample is a block, and its id is the same text in every epoch.

Feedback per sample (AQ-SGD) needs samples that come back in every epoch. Random windows, the usual samples of a
language model, never come back. Blocks are made as in Hugging Face's run_clm: all texts are tokenized, concatenated and
cut, and the rest is dropped.

Tensor names end in their shape: B samples, T tokens.
"""

import torch
from torch import Tensor

from thinwire.models.data.samples import Samples
from thinwire.models.digest import tensor_lines, weights_digest
from thinwire.models.errors import require


class TextBlocks(Samples):
    """Blocks of `block_size` tokens that do not overlap; block i begins at token i * block_size.

    The target of a token is the next token. For the last token of a block it is the first token of the next block, so
    one token must follow the last block. (run_clm differs: there the last token of a block has no target, and T - 1 of
    T tokens count.) Blocks have no padding, so they need no side inputs.
    """

    def __init__(self, tokens: Tensor, block_size: int) -> None:
        require(
            (block_size >= 1, f"block_size must be at least 1, got {block_size}"),
            (
                len(tokens) > block_size,
                f"a text must be at least one token longer than a block of {block_size}, got {len(tokens)} tokens",
            ),
        )
        self.block_size = block_size
        self.tokens = tokens
        self.digest = weights_digest(tensor_lines({"tokens": tokens}))

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.block_size

    def inputs(self, ids: Tensor, epoch: int = 0) -> Tensor:
        """The tokens of blocks `ids` [B]: int64 [B, T], the same in every epoch."""
        return self._blocks(ids, shift=0)

    def targets(self, ids: Tensor) -> Tensor:
        """The token after each token of `inputs(ids)`, int64 [B, T]."""
        return self._blocks(ids, shift=1)

    def example(self, batch: int) -> Tensor:
        """The inputs of `batch` samples without data: int64 [batch, T] on the meta device."""
        return torch.empty(batch, self.block_size, dtype=torch.int64, device="meta")

    def _blocks(self, ids: Tensor, shift: int) -> Tensor:
        tokens = self.tokens[shift : shift + len(self) * self.block_size]
        return tokens.view(len(self), self.block_size)[ids].long()
