"""Whether samples go through a model as they would by themselves."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from thinwire.models.cut import require_one_way
from thinwire.models.errors import ModelError


@dataclass
class Given:
    lengths: Tensor | None
    side: dict[str, Tensor] = field(default_factory=dict)

    def example(self, batch: int) -> Tensor:
        return torch.empty(batch, 64, device="meta")

    def side_example(self, batch: int) -> dict[str, Tensor]:
        return self.side


PACKED = {"position_ids": torch.empty(1, 64, device="meta")}
PADDED = Given(torch.tensor([64, 33, 16]))


@pytest.mark.parametrize(
    ("switch", "samples"),
    [(None, PADDED), (64, PADDED), (15, PADDED), (16, Given(None)), (64, Given(torch.tensor([64]), PACKED))],
)
def test_where_all_texts_go_one_way_nothing_is_said(switch, samples):
    require_one_way(switch, samples)


@pytest.mark.parametrize(("samples", "beside"), [(PADDED, "padding"), (Given(torch.tensor([64]), PACKED), "another")])
def test_short_texts_in_blocks_beyond_the_switch_are_refused(samples, beside):
    """LongRoPE took its factors by the padded block, or by the longest document of a pack."""
    with pytest.raises(ModelError, match=rf"^data\.block_size must be at most 16, .* for long beside {beside}, "):
        require_one_way(16, samples)
