import hashlib
from pydoc_data.topics import topics

import pytest
import torch

from thinwire.models.data import DataOptions, TextBlocks, check_vocabulary, load_blocks, load_text, split
from thinwire.models.errors import ModelError


def test_blocks_and_targets():
    blocks = TextBlocks(b"abcdefghij", 3)
    assert len(blocks) == 3
    ids = torch.tensor([2, 0])
    assert blocks.inputs(ids).tolist() == [list(b"ghi"), list(b"abc")]
    assert blocks.targets(ids).tolist() == [list(b"hij"), list(b"bcd")]
    assert blocks.inputs(ids).dtype == blocks.targets(ids).dtype == torch.int64


@pytest.mark.parametrize(("length", "count"), [(4, 1), (6, 1), (7, 2), (9, 2), (10, 3)])
def test_the_last_block_must_have_a_target_for_each_token(length, count):
    blocks = TextBlocks(bytes(range(length)), 3)
    assert len(blocks) == count
    assert blocks.targets(torch.tensor([count - 1])).max() == 3 * count
    with pytest.raises(IndexError):
        blocks.inputs(torch.tensor([count]))


def test_a_str_is_read_as_utf8():
    blocks = TextBlocks("é!!", 1)
    assert blocks.inputs(torch.arange(3)).flatten().tolist() == [0xC3, 0xA9, ord("!")]
    assert blocks.digest == hashlib.sha256("é!!".encode()).hexdigest()
    assert blocks.digest != TextBlocks("é!?", 1).digest


@pytest.mark.parametrize(
    ("text", "block_size", "message"),
    [
        (b"abc", 3, "one byte longer than a block of 3, got 3 bytes"),
        (b"", 1, "got 0 bytes"),
        (b"abc", 0, "block_size must be at least 1, got 0"),
    ],
)
def test_impossible_blocks(text, block_size, message):
    with pytest.raises(ModelError, match=message):
        TextBlocks(text, block_size)


def test_pydoc_is_every_topic_in_order():
    text = load_text("pydoc")
    assert 200_000 < len(text) < 2_000_000, len(text)
    names = sorted(topics)
    assert text.startswith(topics[names[0]].encode())
    assert text.endswith(topics[names[-1]].encode())
    assert len(text) == sum(len(topic.encode()) for topic in topics.values())


def test_a_file_is_read_as_it_is(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"\r\n\xff\x00")
    assert load_text(str(path)) == b"\r\n\xff\x00"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"readable file, or be 'pydoc', got '.*nowhere': No such file"):
        load_text(str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match="readable file"):
        load_text(str(tmp_path))


@pytest.mark.parametrize(("held_out", "sizes"), [(0.0, (10, 0)), (0.1, (9, 1)), (0.25, (8, 2)), (0.5, (5, 5))])
def test_split_keeps_the_end(held_out, sizes):
    training, evaluation = split(b"0123456789", held_out)
    assert (len(training), len(evaluation)) == sizes
    assert training + evaluation == b"0123456789"


@pytest.mark.parametrize("held_out", [-0.1, 1.0, float("nan")])
def test_a_fraction_is_below_one(held_out):
    with pytest.raises(ModelError, match=r"held_out must lie in \[0, 1\)"):
        split(b"0123456789", held_out)


def test_load_blocks(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(100)))
    training, evaluation = load_blocks(DataOptions(text=str(path), block_size=4, held_out=0.2))
    assert (len(training), len(evaluation)) == (19, 4)
    assert evaluation.inputs(torch.tensor([0])).tolist() == [[80, 81, 82, 83]]
    assert load_blocks(DataOptions(text=str(path), block_size=4, held_out=0))[1] is None


def test_both_parts_too_short_are_named_at_once(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"0123456789")
    with pytest.raises(ModelError) as caught:
        load_blocks(DataOptions(text=str(path), block_size=9, held_out=0.4))
    assert "training text must have 10 bytes or more, got 6" in str(caught.value)
    assert "held-out text must have 10 bytes or more, got 4" in str(caught.value)


def test_bad_options_are_named_all_at_once():
    with pytest.raises(ModelError) as caught:
        DataOptions(text="", block_size=0, held_out=1.5)
    for part in ("text must name a file", "block_size must be at least 1, got 0", "[0, 1), got 1.5"):
        assert part in str(caught.value), str(caught.value)


def test_a_token_beyond_the_vocabulary_is_caught():
    blocks = TextBlocks(b"az", 1)
    check_vocabulary(blocks, ord("z") + 1)
    with pytest.raises(ModelError, match="above the text's largest token 122, got 122"):
        check_vocabulary(blocks, ord("z"))


def test_a_limit_uses_the_start_of_the_text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(200)))
    training, held_out = load_blocks(DataOptions(text=str(path), limit=100, block_size=9, held_out=0.2))
    assert training.tokens.tolist() == list(range(80))
    assert held_out.tokens.tolist() == list(range(80, 100))
    with pytest.raises(ModelError, match="limit must be at least 1 byte, got 0"):
        DataOptions(limit=0)
