"""Text that is read while a run goes on: the blocks of an id, their order, and what is refused."""

import pytest
import torch

from support.data_files import write_json, write_rows
from thinwire.models.data import kinds
from thinwire.models.data.load import load
from thinwire.models.data.options import DataOptions
from thinwire.models.errors import ModelError

pytestmark = pytest.mark.usefixtures("hub_cache")
STREAM = {"shuffle": "never", "held_out": 0, "block_size": 2}


def folder(tmp_path, files=3, rows=4):
    """Rows of two bytes: "00", "01" and so on, in several files."""
    for index in range(files):
        texts = [{"text": f"{index * rows + row:02}"} for row in range(rows)]
        write_json(tmp_path / "files" / f"{index}.jsonl", texts)
    return str(tmp_path / "files")


def blocks(data, *ids):
    return [bytes(row.tolist()).decode() for row in data.training.inputs(torch.tensor(ids))]


def test_a_stream_has_the_blocks_of_the_text_and_begins_anew(tmp_path):
    data = load(DataOptions(name=folder(tmp_path), stream=1, limit=29, **STREAM))
    assert len(data.training) == 14
    assert blocks(data, 11, 12, 13) == ["11", "00", "01"]
    assert blocks(data, 1, 0) == ["01", "00"]
    assert bytes(data.training.targets(torch.tensor([4]))[0].tolist()) == b"40"
    assert data.training.example(3).shape == (3, 2)


@pytest.mark.slow
def test_a_buffer_shuffles_alike_each_time_and_by_the_seed(tmp_path):
    options = DataOptions(name=folder(tmp_path), stream=5, limit=25, **STREAM)
    data, again, other = load(options), load(options), load(options, seed=1)
    whole = blocks(data, *range(12))
    assert sorted(whole) == [f"{row:02}" for row in range(12)] != whole
    assert [blocks(again, at)[0] for at in (7, 8, 3)] == [whole[at] for at in (7, 8, 3)]  # as a resume does
    assert blocks(other, *range(12)) != whole
    assert data.training.digest == again.training.digest != other.training.digest


def test_rows_that_a_file_has_more_behind_the_first_block_make_another_stream(tmp_path):
    """A run went on with other samples, of which nobody was told."""
    options = DataOptions(name=folder(tmp_path), stream=1, limit=25, **STREAM)
    before = load(options)
    with (tmp_path / "files" / "2.jsonl").open("a") as file:
        file.write('{"text": "99"}\n')
    after = load(options)
    assert blocks(before, 0) == blocks(after, 0)
    assert before.training.digest != after.training.digest


@pytest.mark.parametrize("index", [0, 2])
def test_rows_that_are_others_of_the_same_size_make_another_stream(tmp_path, index):
    """Its files were known by their sizes alone."""
    options = DataOptions(name=folder(tmp_path), stream=1, limit=25, **STREAM)
    before, path = load(options), tmp_path / "files" / f"{index}.jsonl"
    path.write_text(path.read_text().replace(f"{index * 4 + 3:02}", "99"))
    after = load(options)
    assert blocks(before, 0) == blocks(after, 0)
    assert before.training.digest != after.training.digest


def test_a_large_file_is_known_by_parts_from_its_start_to_its_end(tmp_path):
    path = tmp_path / "rows.jsonl"
    told = set()
    for place in (None, 0, 2**20 + 2**16, 2**22 - 1):
        with path.open("wb") as file:
            file.truncate(2**22)
            if place is not None:
                file.seek(place)
                file.write(b"x")
        told.add(kinds._digest_of_parts(path))
    assert len(told) == 4


@pytest.mark.slow
def test_token_ids_stream_too_and_evaluation_is_read_at_once(tmp_path):
    write_rows(tmp_path / "a.parquet", [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}])
    given = {**STREAM, "name": str(tmp_path / "a.parquet"), "evaluation": str(tmp_path / "a.parquet")}
    data = load(DataOptions(stream=1, limit=9, **given))
    assert data.training.inputs(torch.arange(4)).tolist() == [[1, 2], [3, 4], [1, 2], [3, 4]]
    assert len(data.held_out) == 1
    write_rows(tmp_path / "a.parquet", [{"input_ids": [256]}])
    with pytest.raises(ModelError, match=r"token ids of a stream must be below the 256 of data\.tokenizer, got 256"):
        load(DataOptions(stream=1, limit=9, **given))


def test_a_thousand_empty_rows_have_the_type_of_the_others(tmp_path):
    write_json(tmp_path / "a.jsonl", [{"input_ids": [1, 2]}, *([{"input_ids": []}] * 2500), {"input_ids": [3]}])
    given = {**STREAM, "name": str(tmp_path / "a.jsonl"), "evaluation": str(tmp_path / "a.jsonl")}
    data = load(DataOptions(stream=1, limit=5, **given))
    assert data.training.inputs(torch.arange(2)).tolist() == [[1, 2], [3, 1]]


def test_a_row_without_a_text_is_named_by_its_place_in_the_whole_stream(tmp_path):
    write_json(tmp_path / "a.jsonl", [*([{"text": "ab"}] * 1500), {"text": None}])
    data = load(DataOptions(name=str(tmp_path / "a.jsonl"), stream=1, limit=3001, **STREAM))
    with pytest.raises(ModelError, match="column text must hold a text in every row, got none in row 1500"):
        data.training.inputs(torch.tensor([1400]))


def test_texts_with_commas_that_are_not_quoted_are_told_also_in_a_later_file(tmp_path):
    """A stream took what stood behind the comma for the text, without a word."""
    (tmp_path / "files").mkdir()
    for name, text in (("a", "Hello"), ("b", "Hello number 7, how are you")):
        (tmp_path / "files" / f"{name}.csv").write_text("text,label\n" + f"{text},1\n" * 3)
    with pytest.raises(ModelError, match=r"the rows of b\.csv must have as many fields as its header, and have more"):
        load(DataOptions(name=str(tmp_path / "files"), stream=1, limit=29, **STREAM))


def test_a_file_that_ends_in_the_middle_is_told(tmp_path):
    name = folder(tmp_path)
    (tmp_path / "files" / "2.jsonl").write_text('{"text": "08"}\n{"text": "0')
    with pytest.raises(ModelError, match=r"files cannot be read to its end: ArrowInvalid: JSON parse error"):
        load(DataOptions(name=name, stream=1, limit=29, **STREAM))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"limit": None}, "stream needs a limit, the tokens of a pass; set limit"),
        ({"shuffle": "epoch"}, "stream shuffles rows itself; set shuffle to never, got epoch"),
        ({"held_out": 0.1}, "name them by evaluation, or set held_out to 0, got 0.1"),
        ({"mixture": {"a": 0.5}}, "mixture and stream must not both be given"),
        ({"kind": "chat", "tokenizer": "x"}, "stream must be left out for kind chat, got 1: it is for text"),
        ({"stream": 0}, "stream must be at least 1 row, got 0"),
        ({"limit": 2}, r"a stream must have a limit of at least 3 tokens; raise data\.limit"),
        ({}, r"data\.stream needs a table, a folder or a data set on the hub, got pydoc"),
    ],
)
def test_what_cannot_be_streamed_is_told(options, told, tmp_path):
    name = folder(tmp_path) if options else "pydoc"
    with pytest.raises(ModelError, match=told):
        load(DataOptions(**{"name": name, "stream": 1, "limit": 9, **STREAM, **options}))


def test_a_first_row_that_cannot_be_read_is_a_sentence(tmp_path):
    """It was a traceback."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "0.jsonl").write_text('{"text": "one"\n{"text": \n')
    with pytest.raises(ModelError, match=r"got '.*files': .+"):
        load(DataOptions(name=str(tmp_path / "files"), stream=1, limit=25, **STREAM))
