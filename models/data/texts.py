"""Text as numbered blocks of tokens. A sample is a block, and its id is the same text in every epoch.

Feedback per sample (AQ-SGD) needs samples that come back in every epoch. Random windows, the usual samples of a
language model, never come back. Blocks are made as in Hugging Face's run_clm: all texts are tokenized, concatenated and
cut, and the rest is dropped. Of a text that is more than a machine holds, they are read while a run goes on.

Tensor names end in their shape: B samples, T tokens.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from thinwire.models.data.samples import Samples
from thinwire.models.digest import tensor_lines, weights_digest
from thinwire.models.errors import ModelError, require


class TextBlocks(Samples):
    """Blocks of `block_size` tokens that do not overlap; block i begins at token i * block_size.

    The target of a token is the next token. For the last token of a block it is the first token of the next block, so
    one token must follow the last block. (run_clm differs: there the last token of a block has no target, and T - 1 of
    T tokens count.) Blocks have no padding, so they need no side inputs.
    """

    def __init__(self, tokens: Tensor, block_size: int) -> None:
        if len(tokens) <= block_size:
            raise ModelError(
                f"a text must be at least one token longer than a block of {block_size}, got {len(tokens)} tokens"
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


class TextStream(TextBlocks):
    """`count` blocks of the tokens of rows, as in `TextBlocks`. Those of a batch stay in memory until a later one.

    The id of a block is its place in the stream: the same in every process, and in every pass, which begins the stream
    anew. A run that goes on in the middle reads the stream from its start up to there. `rows` begins the rows, parts of
    them, the same each time; `tokens` makes tokens [N] of a part. `told` is what the rows depend on, for the digest.
    """

    def __init__(
        self,
        rows: Callable[[], Iterator[Sequence[str] | Tensor]],
        tokens: Callable[[Sequence[str] | Tensor], Tensor],
        count: int,
        block_size: int,
        told: str,
    ) -> None:
        require((count >= 1, f"a stream must have a limit of at least {block_size + 1} tokens; raise data.limit"))
        self._rows, self._made, self._count, self.block_size = rows, tokens, count, block_size
        self._begin()
        first = tensor_lines({"first block": self._blocks(torch.tensor([0]), shift=0)})
        self.digest = hashlib.sha256("\n".join([told, *first]).encode()).hexdigest()

    def __len__(self) -> int:
        return self._count

    def _begin(self) -> None:
        self.tokens, self._first = torch.empty(0, dtype=torch.uint8), 0
        self._parts = self._endless()

    def _endless(self) -> Iterator[Tensor]:
        """The tokens of all parts, again and again."""
        while True:
            some = False
            for part in self._rows():
                tokens = self._made(part)
                some |= len(tokens) > 0
                yield tokens
            require((some, "a stream must have at least one token, got none"))

    def _blocks(self, ids: Tensor, shift: int) -> Tensor:
        size = self.block_size
        start, stop = int(ids.min()) * size, (int(ids.max()) + 1) * size + 1
        if start < self._first:
            self._begin()
        while self._first + len(self.tokens) < stop:
            tokens = torch.cat([self.tokens, next(self._parts)])
            # the batch before may be asked for again
            dropped = min(max(0, 2 * start - stop - self._first), len(tokens))
            self.tokens, self._first = tokens[dropped:], self._first + dropped
        places = ids[:, None] * size + torch.arange(size) + shift - self._first
        return self.tokens[places].long()
