import pytest
import torch

from thinwire.models.data.pairs import PairSamples, require_ends
from thinwire.models.data.tokenizer import Padded
from thinwire.models.errors import ModelError

TOKENS = torch.tensor([[7, 8, 9], [5, 0, 0]], dtype=torch.int32)
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]], dtype=torch.uint8)


@pytest.fixture
def samples():
    return PairSamples(Padded(TOKENS, {"attention_mask": MASK}, num_truncated=1), torch.tensor([1, 0]))


def test_samples_by_id(samples):
    ids = torch.tensor([1, 0, 1])
    assert len(samples) == 2
    assert samples.inputs(ids, epoch=3).tolist() == [[5, 0, 0], [7, 8, 9], [5, 0, 0]]
    assert samples.targets(ids).tolist() == [0, 1, 0]
    assert {name: side.tolist() for name, side in samples.side(ids).items()} == {
        "attention_mask": [[1, 0, 0], [1, 1, 1], [1, 0, 0]]
    }


def test_examples_are_the_inputs_without_data(samples):
    ids = torch.tensor([0, 1])
    pairs = [(samples.example(2), samples.inputs(ids))]
    pairs += [(samples.side_example(2)[name], side) for name, side in samples.side(ids).items()]
    assert len(pairs) == 2
    for example, real in pairs:
        assert (example.shape, example.dtype, example.is_meta) == (real.shape, torch.int64, True)


def test_the_cost_of_padding_is_told(samples):
    assert samples.notes() == (
        "33.3% of the 2 x 3 tokens are padding, which crosses the wire too; the longest sample has 3",
        "1 of 2 samples are cut to 3 tokens",
    )


def test_the_digest_covers_tokens_masks_and_labels(samples):
    padded = samples.padded
    others = [
        PairSamples(padded, torch.tensor([1, 1])),
        PairSamples(Padded(TOKENS + 1, padded.side, 0), samples.labels),
        PairSamples(Padded(TOKENS, {"attention_mask": MASK.flip(0)}, 0), samples.labels),
    ]
    assert len({samples.digest, *(other.digest for other in others)}) == 4
    assert PairSamples(padded, samples.labels.clone()).digest == samples.digest


@pytest.mark.parametrize(("padding", "count"), [(3, 1), (9, 2)])
def test_a_classifier_of_the_library_finds_the_end_of_each_text(samples, padding, count):
    """Stages find it by the mask. The library looked for the padding, and read other tokens of the exported model."""
    require_ends(0, samples)
    require_ends(None, samples)
    left = PairSamples(Padded(TOKENS.flip(1), {"attention_mask": MASK.flip(1)}, 0), samples.labels)
    require_ends(0, left)
    with pytest.raises(
        ModelError,
        match=f"got {padding}: the exported classifier would take another token for the end of {count} of 2 ",
    ):
        require_ends(padding, samples)
