"""Text that is read while a run goes on, because it is more than a machine holds. Rows are shuffled within a buffer.

A sample is a block of the stream, and its id is its place there: the same in every process, and in every pass, which
begins the stream anew. A run that goes on in the middle reads the stream from its start up to there.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from thinwire.models.data.texts import TextBlocks
from thinwire.models.digest import tensor_lines
from thinwire.models.errors import require


class TextStream(TextBlocks):
    """`count` blocks of the tokens of rows, as in `TextBlocks`. Those of a batch stay in memory until a later one.

    Args:
        rows: begins the rows: parts of them, the same each time.
        tokens: makes tokens [N] of a part of the rows.
        told: what the rows depend on, for the digest.
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
        self.tokens, self._first = torch.empty(0, dtype=torch.int32), 0
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
            tokens = torch.cat([self.tokens, next(self._parts).int()])
            # the batch before may be asked for again
            dropped = min(max(0, 2 * start - stop - self._first), len(tokens))
            self.tokens, self._first = tokens[dropped:], self._first + dropped
        places = ids[:, None] * size + torch.arange(size) + shift - self._first
        return self.tokens[places].long()
