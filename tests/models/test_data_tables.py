"""Tables: the file that was named, the columns that were meant, and one sentence for everything else."""

import json
import os

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from support.data_files import png, random_pixels, write_images, write_json, write_rows, write_tokenizer
from support.parts import read
from thinwire.compress.stores.marks import claim
from thinwire.models.data.load import load
from thinwire.models.data.options import DataOptions
from thinwire.models.data.parts import Columns, Part
from thinwire.models.errors import ModelError

pytestmark = pytest.mark.usefixtures("hub_cache")


@pytest.mark.parametrize("name", ["set[1].jsonl", "set?.jsonl", "s*.jsonl"])
def test_a_path_is_no_pattern(tmp_path, name):
    """`datasets` read set1.jsonl in place of set[1].jsonl, and both for set?.jsonl."""
    write_json(tmp_path / "set1.jsonl", [{"text": "another"}])
    write_json(tmp_path / name, [{"text": "named"}])
    assert read("text", Part(str(tmp_path / name))) == ["named"]


@pytest.mark.parametrize("named", ["$RUNX", "$RUNX/t.jsonl", "data"])
def test_a_path_in_which_the_library_would_replace_a_variable_is_refused(tmp_path, monkeypatch, named):
    """`datasets` read other/t.jsonl in place of $RUNX/t.jsonl, which was there."""
    monkeypatch.setenv("RUNX", "other")
    for folder in ("other", "$RUNX", "data/other", "data/$RUNX"):
        write_json(tmp_path / folder / "t.jsonl", [{"text": folder}])
    with pytest.raises(ModelError, match=r"replaces \$RUNX in a path by a variable of the environment"):
        read("text", Part(str(tmp_path / named)))
    monkeypatch.delenv("RUNX")
    assert read("text", Part(str(tmp_path / "$RUNX"))) == ["$RUNX"]


@pytest.mark.parametrize("inside", [False, True])
def test_a_file_that_was_replaced_is_read_again(tmp_path, inside):
    path = tmp_path / "folder" / "rows.jsonl"
    for text in ("old", "new"):
        write_json(path, [{"text": text}])
        assert read("text", Part(str(path.parent if inside else path))) == [text]


@pytest.mark.parametrize(
    ("row", "kind", "columns"),
    [
        ({"id": "a1", "text": "words", "label": 1}, "text", "text"),
        ({"sentence": "words", "idx": 3, "label": 1}, "text", "sentence"),
        ({"id": "a1", "sentence": "words", "label": 1}, "pairs", "sentence"),
        ({"question": "why", "url": "x", "sentence": "words", "label": 1}, "pairs", "question and sentence"),
    ],
)
def test_columns_that_tell_rows_apart_are_not_read_unless_named(tmp_path, row, kind, columns):
    path, said = write_json(tmp_path / "rows.jsonl", [row]), []
    asked = Columns(report=said.append)
    if kind == "text":
        assert read("text", Part(str(path)), asked) == ["words"]
        assert said == [f"of {path}, column {columns} is read"]
    else:
        names = columns.split(" and ")
        assert read("pairs", Part(str(path)), asked).examples == [tuple(row[name] for name in names)]
        assert said == [f"of {path}, column {columns} is read, and the class from label"]
    first = next(iter(row))
    assert read("text", Part(str(path)), Columns([first])) == [row[first]]


@pytest.mark.parametrize(
    "row",
    [
        {"id": "a1", "conversations": [{"from": "human", "value": "hello"}]},
        {"messages": [{"role": "user", "content": "hello"}], "source": "chat"},
        {"prompt": "hello", "messages": [{"role": "user", "content": "hello"}]},
    ],
)
def test_of_chats_no_other_column_is_taken_for_the_text(tmp_path, row):
    path = write_json(tmp_path / "rows.jsonl", [row])
    [lists] = [name for name in row if isinstance(row[name], list)]
    said = rf"got \[\]; it has .*; {lists} holds lists, which only data\.kind chat reads; set kind or"
    with pytest.raises(ModelError, match=said):
        read("text", Part(str(path)))


def test_a_run_says_which_columns_it_reads(tmp_path):
    path = write_json(tmp_path / "rows.jsonl", [{"sentence": "words " * 9, "label": n % 2} for n in range(9)])
    other = write_json(tmp_path / "other.jsonl", [{"text": "others " * 9, "label": n % 2} for n in range(9)])
    shared = {"name": str(path), "block_size": 8}
    assert load(DataOptions(**shared)).notes == (f"of {path}, column sentence is read",)
    both = (f"of {path}, column sentence is read", f"of {other}, column text is read")
    assert load(DataOptions(**shared, evaluation=str(other))).notes == both


@pytest.mark.slow
def test_classes_of_a_source_without_names_are_told_to_be_taken_by_number(tmp_path):
    """Those of a folder are sorted by name, 10 before 2, and a wrong score was reported without a word."""
    evaluation = write_images(tmp_path / "b.parquet", random_pixels(2), [0, 1], names=["1", "10"])
    options = DataOptions(name="digits", image_size=8, channels=3, evaluation=str(evaluation))
    said = f"{evaluation} names its classes and digits does not, so they are taken by number: 0 is 1, 1 is 10"
    assert load(options).notes[-1] == said


@pytest.mark.slow
def test_classes_are_those_of_the_same_name(tmp_path):
    training = write_images(tmp_path / "a.parquet", random_pixels(3), [0, 1, 2], names=["cat", "dog", "fox"])
    evaluation = write_images(tmp_path / "b.parquet", random_pixels(2), [0, 1], names=["cat", "fox"])
    options = {"name": str(training), "kind": "images", "evaluation": str(evaluation)}
    data = load(DataOptions(**options))
    assert data.held_out.targets(torch.arange(2)).tolist() == [0, 2]
    assert data.classes == ("cat", "dog", "fox")
    write_images(evaluation, random_pixels(2), [0, 1], names=["cat", "owl"])
    with pytest.raises(ModelError, match=r"must have classes of the training data, got owl; .* are cat, dog, fox"):
        load(DataOptions(**options))
    write_images(evaluation, random_pixels(2), [1, 1], names=["owl", "dog"])
    assert load(DataOptions(**options)).held_out.targets(torch.arange(2)).tolist() == [1, 1], "no owl occurs"


@pytest.mark.parametrize("labels", [[90_000_000, 90_000_001], [0, 4_000_000_000], [0, 2**63], [0, 1000]])
def test_labels_that_number_too_many_classes_are_refused(tmp_path, labels):
    import numpy as np
    import pyarrow.parquet as pq

    table = pa.table({"text": ["a", "b"], "label": np.array(labels, np.uint64)})
    pq.write_table(table, tmp_path / "rows.parquet")
    told = rf"must number the classes from 0, got {labels[1]} in row 1 of column label of .*, which has 2 rows"
    with pytest.raises(ModelError, match=told):
        read("pairs", Part(str(tmp_path / "rows.parquet")))


def test_a_run_names_labels_that_no_sample_has(tmp_path):
    """Labels 1 to 3 gave four classes without a word."""
    path = write_json(tmp_path / "rows.jsonl", [{"text": f"{row} words", "label": 1 + row % 3} for row in range(6)])
    options = DataOptions(name=str(path), kind="pairs", block_size=4, held_out=0.5)
    assert load(options).notes[-1] == f"no sample of {path} has label 0, and there are 4 classes, numbered from 0"


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
def test_digits_of_csv_are_text_where_other_rows_have_letters(tmp_path, inside):
    """pandas reads 10,000 rows at a time, and made 7 of the "007" in a part that had no letters."""
    path = tmp_path / "rows.csv"
    path.write_text("text,label\n" + "abc,1\n" * 10_000 + "007,02\n" * 3)
    (tmp_path / "rows2.csv").write_text("text,label\n001,3\n" if inside else "")
    place = str(tmp_path if inside else path)
    texts = ["abc"] * 10_000 + ["007"] * 3 + ["001"] * inside
    assert read("text", Part(place)) == texts
    size = 3 * len(texts)
    data = load(DataOptions(name=place, stream=1, limit=size + 1, shuffle="never", held_out=0, block_size=3))
    assert bytes(data.training.inputs(torch.tensor([10_000, len(texts) - 1])).flatten().tolist()) == (
        b"007001" if inside else b"007007"
    )


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("rows.jsonl", b"", "it is empty: it has no rows"),
        ("rows.jsonl", b"\n", "it has no rows"),
        ("rows.csv", "text,label\nüml,1\n".encode("latin-1"), "'utf-8' codec can't decode"),
        (
            "rows.jsonl",
            '{"text": "ä"}\n{"text": "ü"}\n'.encode("latin-1"),
            "must hold text in UTF-8, got other bytes: c",
        ),
        ("rows.csv", b"version https://git-lfs.github.com/spec/v1\n", "it is a pointer of Git LFS: git lfs pull"),
        ("rows.parquet", b"version https://git-lfs.github.com/spec/v1\n", "it is a pointer of Git LFS: git lfs pull"),
        ("rows.jsonl", b'{"a": 1}\n' + b'{"a": ' * 9999 + b"1" + b"}" * 9999, "must be nested at most 64 levels deep"),
        ("rows.jsonl", b"null\n", "rows.jsonl must hold one JSON object per line, and begins otherwise"),
        ("rows.csv", b"\x1f\x8b\x08\x00", "it is packed by gzip: unpack it"),
    ],
)
def test_tables_that_are_something_else_are_named(tmp_path, name, content, told):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=told):
        read("text", Part(str(tmp_path / name)))


def test_parquet_that_declares_very_many_classes_is_refused_before_they_take_memory(tmp_path):
    """`datasets` makes a name for each: a file of a kilobyte took all memory."""
    told = {"info": {"features": {"label": {"num_classes": 10**10, "_type": "ClassLabel"}}}}
    rows = pa.table({"label": [0]}).replace_schema_metadata({"huggingface": json.dumps(told)})
    pyarrow.parquet.write_table(rows, tmp_path / "rows.parquet")
    for name in (tmp_path / "rows.parquet", tmp_path):
        with pytest.raises(ModelError, match=r"rows\.parquet must have at most 1000000 classes, and declares 10"):
            read("pairs", Part(str(name)))


@pytest.mark.parametrize("suffix", [".md", ".text"])
def test_a_folder_of_text_may_have_other_names(tmp_path, suffix):
    (tmp_path / f"a{suffix}").write_text("# One\n\ntwo")
    assert read("text", Part(str(tmp_path))) == ["# One\n", "\n", "two"]


def test_a_folder_of_text_holds_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 9)
    with pytest.raises(ModelError, match=r"a\.txt must hold text, and is no text: \d+ of its first 2304 bytes are"):
        read("text", Part(str(tmp_path)))


@pytest.mark.parametrize(
    ("taken", "unread", "texts"),
    [
        (["train_to_busan.txt"], ["dracula.txt", "emma.md"], ["a\n"]),
        (["train.jsonl"], ["extra.jsonl", "more/old.csv"], ["a"]),
        (["train.jsonl"], ["extra.jsonl.gz"], ["a"]),
        (["a.jsonl", "b/a.jsonl"], ["c.csv"], ["a", "a"]),
        (["a.txt", "b/a.md"], [], ["a\n", "a\n"]),
    ],
)
def test_files_of_a_folder_that_are_not_read_are_named(tmp_path, taken, unread, texts):
    """A name that begins with train hid all other files, and only the most frequent format is read."""
    content = {".jsonl": '{"text": "a"}\n', ".csv": "text\na\n"}
    of_the_hub = ["README.md", ".cache/a.jsonl"] if taken[0].endswith(".jsonl") else []
    for path in map(tmp_path.joinpath, (*taken, *unread, *of_the_hub)):
        path.parent.mkdir(exist_ok=True)
        path.write_text(content.get(path.suffix, "a\n"))
    notes = []
    assert read("text", Part(str(tmp_path)), Columns(report=notes.append)) == texts
    assert notes[:-1] == [f"files of {tmp_path} that are not read: {', '.join(unread)}"] * bool(unread)


def test_a_folder_holds_files_alone(tmp_path):
    write_json(tmp_path / "a.jsonl", [{"text": "a"}])
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    assert read("text", Part(str(tmp_path))) == ["a"]
    os.mkfifo(tmp_path / "b.jsonl")
    assert read("text", Part(str(tmp_path))) == ["a"], "nobody waits for a pipe"


def write_run(folder):
    """What a run leaves in a folder, as far as it may be taken for data."""
    claim(folder, "0af3", ("metrics.jsonl",))
    claim(folder / "model", "0af3")
    write_json(folder / "metrics.jsonl", [{"step": 0}])
    (folder / "summary.json").write_text("{}")
    (folder / "loss.png").write_bytes(png(random_pixels(1)[0]))


@pytest.mark.parametrize("place", [".", "runs/tiny"])
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_what_a_run_wrote_is_not_read_as_data(tmp_path, monkeypatch, name, place):
    monkeypatch.chdir(tmp_path)
    content = {"a.csv": "text\none\n", "a.jsonl": '{"text": "one"}\n'}[name]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_text(content)
    assert read("text", Part("data")) == ["one"]
    write_run(tmp_path / "data" / place)
    with pytest.raises(ModelError, match=r"data must hold data alone, but .* would be read as data too, and a run of"):
        read("text", Part("data"))
    write_run(tmp_path / "other" / place)
    (tmp_path / "other" / name.replace("a.", "train.")).write_text(content)
    if place != ".":
        assert read("text", Part("other")) == ["one"], "a name that says what it is for is enough"


def test_the_folder_of_the_data_may_be_the_current_one(tmp_path, monkeypatch):
    write_json(tmp_path / "a.jsonl", [{"text": "a"}])
    monkeypatch.chdir(tmp_path)
    assert read("text", Part(".")) == ["a"]


def image_rows(path, *names):
    import pyarrow.parquet as pq
    from datasets import Dataset, Features, Image, Value

    rows = {"image": [{"bytes": None, "path": str(name)} for name in names], "label": [0] * len(names)}
    table = Dataset.from_dict(rows, features=Features({"image": Image(), "label": Value("int64")}))
    pq.write_table(table.data.table, path)  # to_parquet would put the files into the table
    return Part(str(path))


def test_a_row_may_name_an_image_in_the_folder_of_its_table(tmp_path):
    picture = png(random_pixels(1)[0])
    (tmp_path / "a.png").write_bytes(picture)
    labelled = read("images", image_rows(tmp_path / "rows.parquet", tmp_path / "a.png", "a.png"))
    assert labelled.examples == [picture, picture]
    assert labelled.place(1) == str(tmp_path / "a.png")


@pytest.mark.parametrize("name", ["/dev/zero", "a.fifo", "no.png", "a\0b"])
def test_a_row_names_a_file(tmp_path, name):
    (tmp_path / "table").mkdir()
    os.mkfifo(tmp_path / "table" / "a.fifo")
    with pytest.raises(ModelError, match=r"an image must .*, got .* in row 0"):
        read("images", image_rows(tmp_path / "table" / "rows.parquet", name))


def test_a_link_to_a_device_is_no_image(tmp_path):
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    with pytest.raises(ModelError, match=r"an image must be a file of at most \d+ bytes, got .*zero\.png in row 0"):
        read("images", image_rows(tmp_path / "rows.parquet", "zero.png"))


def test_an_image_that_cannot_be_read_is_told_by_its_own_row(tmp_path):
    """It was told by its place among the samples, after some were held out."""
    pixels = [png(image) for image in random_pixels(30)]
    for bad in (4, 17):
        pictures = [*pixels[:bad], b"no image", *pixels[bad + 1 :]]
        path = write_rows(tmp_path / f"{bad}.parquet", [{"image": p, "label": i % 2} for i, p in enumerate(pictures)])
        with pytest.raises(ModelError, match=rf"cannot read row {bad} of {path}: cannot identify"):
            load(DataOptions(name=str(path), kind="images", held_out=0.3))


def test_an_image_that_ends_too_soon_is_told_by_its_row_when_it_is_decoded(tmp_path):
    pixels = [png(image) for image in random_pixels(30)]
    rows = [{"image": p[:60] if i == 4 else p, "label": i % 2} for i, p in enumerate(pixels)]
    path = write_rows(tmp_path / "rows.parquet", rows)
    data = load(DataOptions(name=str(path), kind="images", held_out=0, mean=[0.5] * 3, std=[0.5] * 3))
    with pytest.raises(ModelError, match=rf"cannot decode row 4 of {path}: "):
        data.training.inputs(torch.arange(8))


def test_token_ids_are_read_as_they_are(tmp_path):
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "attention_mask": [1, 1, 1]}, {"input_ids": [8, 9]}]
    for name in ("a.jsonl", "a.parquet"):
        path = str(write_rows(tmp_path / name, rows[:1]) if name == "a.parquet" else write_json(tmp_path / name, rows))
        tokens = read("text", Part(path))
        assert (tokens.tolist(), tokens.dtype) == ([5, 6, 7] if name == "a.parquet" else [5, 6, 7, 8, 9], torch.int32)
    data = load(DataOptions(name=str(tmp_path / "a.jsonl"), block_size=2, held_out=0))
    assert (data.training.inputs(torch.arange(2)).tolist(), data.vocab_size) == ([[5, 6], [7, 8]], 10)


def test_the_vocabulary_is_that_of_texts_and_token_ids(tmp_path):
    """A model with too few rows for some of them failed in its embedding, when the first one came."""
    words = write_tokenizer(tmp_path / "words", pairs=False)
    texts = str(write_json(tmp_path / "texts.jsonl", [{"text": "why did it"}]))
    few, many = (str(write_json(tmp_path / f"{top}.jsonl", [{"input_ids": [1, 2, top]}])) for top in (3, 99))
    for name, evaluation, size in ((texts, few, 19), (few, texts, 19), (texts, many, 100), (few, few, 4)):
        data = load(DataOptions(name=name, evaluation=evaluation, tokenizer=words, block_size=2))
        assert data.vocab_size == size
    for name, evaluation, size in ((few, few, 19), (few, many, 100), (many, few, 100)):
        data = load(DataOptions(name=name, evaluation=evaluation, kind="chat", tokenizer=words, block_size=2))
        assert data.vocab_size == size


@pytest.mark.parametrize(
    "options",
    [
        {"name": "texts", "evaluation": "ids"},
        {"name": "ids", "evaluation": "texts"},
        {"name": "ids", "mixture": {"texts": 0.5}, "held_out": 0},
        {"name": "texts", "evaluation": "ids", "stream": 1, "limit": 5, "shuffle": "never"},
        {"name": "ids", "evaluation": "texts", "stream": 1, "limit": 5, "shuffle": "never"},
    ],
)
def test_token_ids_beside_texts_need_the_tokenizer_that_made_them(tmp_path, monkeypatch, options):
    """Texts of bytes trained with them, and alike tokens meant other text."""
    monkeypatch.chdir(tmp_path)
    for folder, row in (("ids", {"input_ids": [1, 2, 3, 4]}), ("texts", {"text": "why the cat sat"})):
        write_json(tmp_path / folder / "rows.jsonl", [row])
    options = {name: f"./{value}" if name == "evaluation" else value for name, value in options.items()}
    told = r"data\.tokenizer must be that of the token ids of (\./)?ids, because (\./)?texts is text, got 'bytes'"
    with pytest.raises(ModelError, match=f"^{told}$"):
        load(DataOptions(block_size=2, **options))
    words = write_tokenizer(tmp_path / "words", pairs=False)
    load(DataOptions(block_size=2, tokenizer=words, **options))


def test_token_ids_with_labels_are_conversations(tmp_path):
    path = Part(str(write_rows(tmp_path / "a.parquet", [{"input_ids": [5, 6, 7], "labels": [-100, 6, -100]}])))
    [chat] = read("chat", path)
    assert (chat.tokens.tolist(), chat.counted.tolist()) == ([5, 6, 7], [False, True, False])
    [chat] = read("chat", path, Columns(["input_ids"]))
    assert chat.counted.tolist() == [True] * 3
    write_json(tmp_path / "b.jsonl", [{"input_ids": [5, 6], "labels": [6, -100]}])
    with pytest.raises(ModelError, match=r"labels must be -100 or the token itself, .* got others in row 0 of"):
        read("chat", Part(str(tmp_path / "b.jsonl")))
    words = write_tokenizer(tmp_path / "words", pairs=False)
    data = load(DataOptions(name=path.name, kind="chat", tokenizer=words, block_size=4, held_out=0))
    assert data.training.targets(torch.tensor([0])).tolist() == [[6, -100, -100, -100]]
    assert data.notes[-1].endswith("\nthe[[cat]]sat") and data.training.lengths.tolist() == [3]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([[1, -2]], r"column input_ids must hold integers from 0 on, got \[-2\]"),
        ([[1], None], "column input_ids must hold a list of integers in every row, got null in some"),
        ([[1, None]], "column input_ids must hold a list of integers in every row, got null in some"),
    ],
)
def test_what_are_no_token_ids_is_told(tmp_path, rows, told):
    path = write_json(tmp_path / "a.jsonl", [{"input_ids": row} for row in rows])
    with pytest.raises(ModelError, match=told):
        read("text", Part(str(path)))


@pytest.mark.parametrize("name", ["/dev/zero", "../a.png", "a.fifo", "no.png", "/etc/passwd", "a\0b"])
def test_a_row_names_no_other_file(tmp_path, name):
    (tmp_path / "a.png").write_bytes(png(random_pixels(1)[0]))
    (tmp_path / "table").mkdir()
    os.mkfifo(tmp_path / "table" / "a.fifo")
    with pytest.raises(ModelError, match=r"an image must .*, got .* in row 0"):
        read("images", image_rows(tmp_path / "table" / "rows.parquet", name))
