import pytest

from support.data_files import CHAT, write_tokenizer
from thinwire.models.data.tokenizer import Bytes, Pretrained, make_tokenizer
from thinwire.models.errors import ModelError

PAIR = [("the cat", "sat on a mat"), ("why", "it")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("words"))


def test_bytes_come_back_whole():
    content = bytes(range(256)) + "é\r\n".encode()
    assert bytes(Bytes().tokens([content.decode(errors="surrogateescape")]).tolist()) == content
    assert bytes(Bytes().tokens(["é", "b"], limit=2).tolist()) == "é".encode()
    assert len(Bytes().tokens([])) == 0


def test_a_tokenizer_is_bytes_or_a_folder(folder):
    assert make_tokenizer("bytes").vocab_size == 256
    assert make_tokenizer(folder).vocab_size == 19


def test_pairs_are_padded_and_told_apart(folder):
    padded = Pretrained(folder).padded(PAIR, 10)
    assert padded.tokens.tolist() == [[2, 5, 6, 3, 7, 8, 9, 10, 3, 0], [2, 16, 3, 18, 3, 0, 0, 0, 0, 0]]
    assert padded.side["attention_mask"].tolist() == [[1] * 9 + [0], [1] * 5 + [0] * 5]
    assert padded.side["token_type_ids"].tolist() == [[0] * 4 + [1] * 5 + [0], [0, 0, 0, 1, 1] + [0] * 5]
    assert padded.num_truncated == 0


def test_what_is_too_long_is_cut_and_counted(folder):
    padded = Pretrained(folder).padded(PAIR, 7)
    assert padded.tokens.tolist() == [[2, 5, 6, 3, 7, 8, 3], [2, 16, 3, 18, 3, 0, 0]]
    assert padded.num_truncated == 1


def test_single_texts_have_one_separator(folder):
    assert Pretrained(folder).padded([("the cat",)], 5).tokens.tolist() == [[2, 5, 6, 3, 0]]


def test_padding_needs_a_token_and_room(tmp_path, folder):
    with pytest.raises(ModelError, match="must have a padding token") as caught:
        Pretrained(write_tokenizer(tmp_path / "bare", pad=None)).padded(PAIR, 3)
    assert "above the 3 special tokens of a sample, got 3" in str(caught.value)


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer must be 'bytes', or .*nowhere': no such file or folder"):
        make_tokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match=r"tokenizer must be 'bytes', or .*, got"):
        make_tokenizer(str(tmp_path))


def test_a_folder_without_the_files_of_a_tokenizer_is_told(tmp_path):
    """transformers makes an empty one, and the text had no token."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ModelError, match="no token is there, as in a folder without the tokenizer's files"):
        make_tokenizer(str(tmp_path))


def test_what_is_no_text_is_refused(folder):
    with pytest.raises(ModelError, match="must be UTF-8 for tokenizer"):
        Pretrained(folder).tokens([b"the \xff".decode(errors="surrogateescape")])


@pytest.mark.parametrize(
    ("texts", "length", "row"),
    [
        (("ab", "c"), 8, [256, 97, 98, 257, 99, 257, 258, 258]),
        (("ab",), 5, [256, 97, 98, 257, 258]),
        (("abcd", "e"), 6, [256, 97, 98, 257, 101, 257]),
        (("a", "bcde"), 6, [256, 97, 257, 98, 99, 257]),
        (("abcd", "efgh"), 8, [256, 97, 98, 99, 257, 101, 102, 257]),
        (("abcd",), 4, [256, 97, 98, 257]),
        (("", "é"), 6, [256, 257, 0xC3, 0xA9, 257, 258]),
    ],
)
def test_bytes_are_padded_and_cut_to_one_length(texts, length, row):
    padded = Bytes().padded([texts], length)
    assert padded.tokens.tolist() == [row]
    assert padded.side["attention_mask"].tolist() == [[int(token != 258) for token in row]]
    ends = [place for place, token in enumerate(row) if token == 257]
    second = range(ends[0] + 1, ends[-1] + 1)
    assert padded.side["token_type_ids"].tolist() == [[int(place in second) for place in range(length)]]
    assert padded.num_truncated == (len("".join(texts).encode()) + 1 + len(texts) > length)


def test_bytes_need_room_for_text():
    with pytest.raises(ModelError, match="block_size must be above the 3 special tokens of a sample, got 3"):
        Bytes().padded([("a", "b")], 3)


def test_what_ends_a_text_does_not_stand_behind_a_prompt(folder):
    """A model went on behind an end of text."""
    words = Pretrained(folder)
    assert words.tokens(["the cat"]).tolist() == [2, 5, 6, 3]
    assert words.prompt("the cat", chat=False).tolist() == [2, 5, 6]
    assert words.prompt("", chat=False).tolist() == [2]


def test_a_prompt_is_a_text_or_the_first_message_of_a_chat(tmp_path, folder):
    words = Pretrained(write_tokenizer(tmp_path / "chat", pairs=False, chat=CHAT))
    asked = words.prompt("the cat", chat=True)
    assert words.decode(asked.tolist()) == "user the cat [SEP] assistant"
    assert words.decode(asked.tolist(), special=False) == words.decode(asked.tolist()), "none is special there"
    assert words.prompt("the cat", chat=False).tolist() == [5, 6]
    with pytest.raises(ModelError, match="must have a chat template, got none"):
        Pretrained(folder).prompt("the cat", chat=True)
    assert Bytes().prompt("é", chat=False).tolist() == [0xC3, 0xA9]
    assert Bytes().decode([0x41, 0xC3, 300]) == "A\N{REPLACEMENT CHARACTER}"
