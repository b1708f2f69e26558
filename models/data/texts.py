"""Text as fixed blocks of tokens, numbered: a sample is a block, and its id means the same text in every epoch.

Feedback kept per sample (AQ-SGD) needs samples that come back. Random windows, the usual way to feed a language model,
never do. Blocks are packed as in Hugging Face's run_clm: all texts are tokenized, concatenated and cut, and what is
left over is dropped.

Tensor names end in their shape: B samples, T tokens.
"""

import torch
from torch import Tensor

from thinwire.models.digest import tensor_lines, weights_digest
from thinwire.models.errors import require


class TextBlocks:
    """Tokens in non-overlapping blocks of `block_size`; id i is the block from token i * block_size on.

    The target of a token is the one after it, also that of a block's last token: it is the first of the next block, so
    the last block must have a token behind it. (run_clm hands a block to the model as its own labels, which the model
    shifts inside: there the last token of a block has no target, and T - 1 of T positions count.)
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
        """The tokens [B, T] of blocks `ids` [B], as int64, the same in every epoch."""
        return self._blocks(ids, shift=0)

    def targets(self, ids: Tensor) -> Tensor:
        """The token after each of `inputs(ids)`, [B, T], as int64."""
        return self._blocks(ids, shift=1)

    def side(self, ids: Tensor) -> dict[str, Tensor]:
        """Nothing: blocks are full."""
        return {}

    def example(self, batch: int) -> Tensor:
        """The inputs of `batch` samples without data: int64 [batch, T] on the meta device."""
        return torch.empty(batch, self.block_size, dtype=torch.int64, device="meta")

    def side_example(self, batch: int) -> dict[str, Tensor]:
        """Nothing, as `side`."""
        return {}

    def _blocks(self, ids: Tensor, shift: int) -> Tensor:
        tokens = self.tokens[shift : shift + len(self) * self.block_size]
        return tokens.view(len(self), self.block_size)[ids].long()
