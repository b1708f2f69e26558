from itertools import chain

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.data_files import WORDS, write_tokenizer
from thinwire.models.data.texts import TextBlocks
from thinwire.models.data.tokenizer import Bytes, Pretrained
from thinwire.models.errors import ModelError


def blocks_of(text: bytes, block_size: int) -> TextBlocks:
    return TextBlocks(torch.frombuffer(bytearray(text), dtype=torch.uint8), block_size)


def test_blocks_and_targets():
    blocks = blocks_of(b"abcdefghij", 3)
    assert len(blocks) == 3
    ids = torch.tensor([2, 0])
    assert blocks.inputs(ids).tolist() == blocks.inputs(ids, epoch=5).tolist() == [list(b"ghi"), list(b"abc")]
    assert blocks.targets(ids).tolist() == [list(b"hij"), list(b"bcd")]
    assert blocks.inputs(ids).dtype == blocks.targets(ids).dtype == torch.int64


@pytest.mark.parametrize(("length", "count"), [(4, 1), (6, 1), (7, 2), (9, 2), (10, 3)])
def test_the_last_block_must_have_a_target_for_each_token(length, count):
    blocks = blocks_of(bytes(range(length)), 3)
    assert len(blocks) == count
    assert blocks.targets(torch.tensor([count - 1])).max() == 3 * count
    with pytest.raises(IndexError):
        blocks.inputs(torch.tensor([count]))


def test_examples_are_the_inputs_without_data():
    blocks = blocks_of(b"abcdefghij", 3)
    example, inputs = blocks.example(2), blocks.inputs(torch.tensor([0, 1]))
    assert (example.shape, example.dtype, example.is_meta) == (inputs.shape, inputs.dtype, True)
    assert blocks.side(torch.tensor([0])) == blocks.side_example(1) == {}


def test_the_digest_is_that_of_the_tokens():
    assert blocks_of(b"abcde", 2).digest == blocks_of(b"abcde", 2).digest
    assert blocks_of(b"abcde", 2).digest != blocks_of(b"abcdf", 2).digest


@pytest.mark.parametrize(
    ("text", "block_size", "message"),
    [
        (b"abc", 3, "one token longer than a block of 3, got 3 tokens"),
        (b"a", 1, "got 1 tokens"),
    ],
)
def test_impossible_blocks(text, block_size, message):
    with pytest.raises(ModelError, match=message):
        blocks_of(text, block_size)


def run_clm(tokenize, texts: list[str], block_size: int) -> list[list[int]]:
    """transformers' run_clm.py, `tokenize_function` and `group_texts`, restated for all texts at once."""
    concatenated = list(chain(*[tokenize(text) for text in texts]))
    total_length = (len(concatenated) // block_size) * block_size
    return [concatenated[i : i + block_size] for i in range(0, total_length, block_size)]


LINES = ["", "\n", *WORDS, "the cat\n", "unknown words \n", " ".join(WORDS)]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    return Pretrained(write_tokenizer(tmp_path_factory.mktemp("words")))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    texts=st.lists(st.sampled_from(LINES), max_size=12),
    block_size=st.integers(1, 9),
    limit=st.none() | st.integers(1, 30),
)
def test_packing_is_that_of_run_clm(pretrained, texts, block_size, limit):
    for tokenizer, tokenize in (
        (pretrained, lambda text: pretrained._tokenizer(text)["input_ids"]),
        (Bytes(), lambda text: text.encode()),
    ):
        tokens = tokenizer.tokens(texts, limit)
        everything = list(chain(*map(tokenize, texts)))
        assert tokens.tolist() == everything[:limit]
        if limit is None and len(tokens) > block_size:
            blocks = TextBlocks(tokens, block_size)
            expected = run_clm(tokenize, texts, block_size)
            got = blocks.inputs(torch.arange(len(blocks))).tolist()
            # the last block is left out where no token is behind it: we have a target for every token
            assert got == expected[: (len(everything) - 1) // block_size]
            assert blocks.targets(torch.arange(len(blocks)))[:, :-1].tolist() == [block[1:] for block in got]
