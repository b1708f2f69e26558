import hashlib
import logging
import pickle
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch

from support.data_files import png, random_pixels, write_images, write_json, write_rows
from support.parts import read
from support.small_disk import mounted
from thinwire.models.data import sources
from thinwire.models.data.parts import Columns, Labelled, Part, check_labels, evaluation_part, local_path
from thinwire.models.data.sources import Source
from thinwire.models.errors import ModelError

uses_datasets = pytest.mark.usefixtures("hub_cache")
ROWS = [{"sentence": f"the cat {i}", "label": i % 2, "idx": i} for i in range(4)]
TEXTS = [row["sentence"] for row in ROWS]


def test_pydoc_is_every_topic_in_order():
    texts = read("text", Part("pydoc"))
    assert texts == [topics[name] for name in sorted(topics)]
    assert 200_000 < len("".join(texts)) < 2_000_000


def test_a_text_file_is_lines_that_join_to_it(tmp_path):
    content = b"\r\none\x0b\ntwo\xff\x00"
    (tmp_path / "text").write_bytes(content)
    texts = read("text", Part(str(tmp_path / "text")))
    assert len(texts) == 3
    assert "".join(texts).encode(errors="surrogateescape") == content


@uses_datasets
def test_a_byte_order_mark_is_no_text(tmp_path):
    """It was trained on, as three tokens."""
    (tmp_path / "train.txt").write_bytes(b"\xef\xbb\xbfone\n\xef\xbb\xbftwo")
    for name in (tmp_path / "train.txt", tmp_path):
        assert read("text", Part(str(name))) == ["one\n", "\N{BYTE ORDER MARK}two"]


@uses_datasets
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".csv"])
def test_texts_of_tables(tmp_path, suffix):
    path = write_rows(tmp_path / f"rows{suffix}", ROWS)
    assert read("text", Part(str(path))) == TEXTS
    labelled = read("pairs", Part(str(path)))
    assert labelled.examples == [(text,) for text in TEXTS]
    assert labelled.labels.tolist() == [0, 1, 0, 1]
    assert labelled.num_labels == 2


@uses_datasets
def test_a_folder_of_text_keeps_the_ends_of_lines_and_names_its_splits(tmp_path):
    (tmp_path / "train.txt").write_text("one\n\ntwo")
    (tmp_path / "test.txt").write_text("three\n")
    assert read("text", Part(str(tmp_path))) == ["one\n", "\n", "two"]
    assert read("text", Part(str(tmp_path), "test")) == ["three\n"]
    with pytest.raises(ModelError, match="must be one of train, test, got 'dev'"):
        read("text", Part(str(tmp_path), "dev"))


@uses_datasets
def test_the_layout_of_the_hub(tmp_path):
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: cola\n  data_files:\n  - {split: train, path: cola/a.jsonl}\n"
        "  - {split: dev, path: cola/b.jsonl}\n"
        "- config_name: qnli\n  data_files: qnli/a.jsonl\n---\n"
    )
    write_json(tmp_path / "cola" / "a.jsonl", ROWS)
    write_json(tmp_path / "cola" / "b.jsonl", ROWS[:1])
    write_json(tmp_path / "qnli" / "a.jsonl", [{"question": "why", "sentence": "it", "label": 1}])
    assert read("text", Part(str(tmp_path), "dev", "cola")) == TEXTS[:1]
    assert read("pairs", Part(str(tmp_path), "train", "qnli")).examples == [("why", "it")]
    with pytest.raises(ModelError, match=r"pick one among the available configs: \['cola', 'qnli'\]"):
        read("text", Part(str(tmp_path)))


def test_a_hub_name_goes_to_the_hub(tmp_path, hub_cache, monkeypatch):
    asked, build = [], hub_cache.load_dataset_builder

    def load_dataset_builder(*arguments):
        asked.append(arguments)
        return build(str(tmp_path))

    write_json(tmp_path / "validation.jsonl", ROWS)
    monkeypatch.setattr(hub_cache, "load_dataset_builder", load_dataset_builder)
    assert read("text", Part("nyu-mll/glue", "validation", "cola")) == TEXTS
    assert asked == [("nyu-mll/glue", "cola")]


def test_what_cannot_be_a_name_on_the_hub_is_a_wrong_path(tmp_path):
    assert local_path("gpt2", "name") is local_path("Qwen/Qwen3-0.6B", "name") is None
    assert local_path(str(tmp_path), "name") == tmp_path
    for wrong in (str(tmp_path / "nowhere"), "no/such/file", "text.txt", "data/rows.parquet", "./data"):
        with pytest.raises(ModelError, match="no such file or folder"):
            local_path(wrong, "name must be a file")


@uses_datasets
@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"", "rows.csv", "must be 'pydoc'"),
        (b"{no", "rows.json", "JSON parse error"),
        (b"x" * 9, "rows.parquet", "magic"),
    ],
)
def test_a_table_that_cannot_be_read_is_named(tmp_path, monkeypatch, capsys, content, name, message):
    (tmp_path / name).write_bytes(content)
    logged = []
    monkeypatch.setattr(logging.Logger, "callHandlers", lambda _, record: logged.append(record.getMessage()))
    with pytest.raises(ModelError, match=message) as caught:
        read("text", Part(str(tmp_path / name)))
    assert f"got '{tmp_path / name}': " in str(caught.value)
    assert logged == [] and capsys.readouterr().err == "", "told twice"


@pytest.mark.parametrize("size", ["4k", "300k"])
def test_a_full_cache_of_tables_is_named(tmp_path, hub_cache, monkeypatch, size):
    """It was told as a wrong data.name: "got 'rows.csv': [Errno 28] No space left on device"."""
    write_json(tmp_path / "rows.jsonl", ROWS * 20_000)
    with mounted(tmp_path / "cache", f"size={size}") as cache:
        monkeypatch.setattr(hub_cache.config, "HF_DATASETS_CACHE", cache)
        with pytest.raises(ModelError, match=f"no room is left in {cache}, where a library keeps what it reads; free"):
            read("text", Part(str(tmp_path / "rows.jsonl")))


@uses_datasets
@pytest.mark.parametrize("inside", [False, True])
def test_texts_with_commas_that_are_not_quoted_are_told(tmp_path, inside):
    """`datasets` took what stood behind the comma for the text."""
    (tmp_path / "rows.csv").write_text("text,label\n" + "Hello number 7, how are you,1\n" * 3)
    with pytest.raises(ModelError, match="must have as many fields as its header, and have more"):
        read("text", Part(str(tmp_path if inside else tmp_path / "rows.csv")))


@uses_datasets
def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(ModelError, match="doesn't contain any data files"):
        read("text", Part(str(tmp_path)))


@uses_datasets
def test_wrong_columns_are_told_all_at_once_with_those_there_are(tmp_path):
    path = str(write_rows(tmp_path / "rows.parquet", ROWS))
    with pytest.raises(ModelError) as caught:
        read("pairs", Part(path), Columns(["question", "idx"], "class"))
    for part in (
        "got question; it has sentence, label, idx",
        "got idx of another type",
        "label must be a column of ",
        "got 'class'; it has sentence, label, idx",
    ):
        assert part in str(caught.value), str(caught.value)
    with pytest.raises(ModelError, match=r"one column of images of .*, got \[\]; it has sentence, label, idx"):
        read("images", Part(path))


@uses_datasets
@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("yes", "must hold integers as labels, got string; number the classes from 0"),
        (0.5, "must hold integers as labels, got float64"),
        (True, "must hold integers as labels, got bool"),
        (-1, r"labels must lie in 0..0, got -1 in row 1 of column label"),
        (None, "must hold a label in every row, got none in row 1"),
    ],
)
def test_labels_are_integers_in_range(tmp_path, label, message):
    first = type(label)() if label is not None else 0
    rows = [{"text": "a", "label": first}, {"text": "b", "label": label}]
    path = write_rows(tmp_path / "rows.parquet", rows)
    with pytest.raises(ModelError, match=message):
        read("pairs", Part(str(path)))


def test_the_first_label_out_of_range_is_told():
    check_labels(torch.tensor([0, 2]), 3, "here")
    with pytest.raises(ModelError, match=r"labels must lie in 0..1, got 2 in row 1 of here"):
        check_labels(torch.tensor([0, 2, -1]), 2, "here")


@uses_datasets
def test_a_row_without_text_is_told(tmp_path):
    path = write_json(tmp_path / "rows.jsonl", [{"text": "a"}, {"text": None}])
    with pytest.raises(ModelError, match="column text must hold a text in every row, got none in row 1"):
        read("text", Part(str(path)))


@uses_datasets
def test_images_of_a_table_stay_encoded(tmp_path):
    pixels = random_pixels(3)
    path = write_images(tmp_path / "images.parquet", pixels, [1, 1, 0], names=["cat", "dog", "eel"])
    labelled = read("images", Part(str(path)))
    assert labelled.examples == [png(image) for image in pixels]
    assert labelled.labels.tolist() == [1, 1, 0]
    assert labelled.num_labels == 3, "the classes that are declared, not those that occur"


@uses_datasets
def test_images_as_plain_bytes(tmp_path):
    path = write_rows(tmp_path / "images.parquet", [{"picture": png(random_pixels(1)[0]), "y": 1}])
    labelled = read("images", Part(str(path)), Columns(["picture"], "y"))
    assert labelled.examples == [png(random_pixels(1)[0])]


@uses_datasets
def test_a_folder_of_images_has_its_folders_as_classes(tmp_path):
    for split in ("train", "test"):
        for seed, name in enumerate(("cat", "dog")):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            (folder / "1.png").write_bytes(png(random_pixels(1, seed=seed)[0]))
    for split in ("train", "test"):
        labelled = read("images", Part(str(tmp_path), split))
        assert labelled.examples == [png(random_pixels(1, seed=seed)[0]) for seed in range(2)]
        assert labelled.labels.tolist() == [0, 1]


def test_digits():
    sklearn_datasets = pytest.importorskip("sklearn.datasets")
    labelled = read("images", Part("digits"))
    assert (len(labelled), labelled.num_labels) == (1797, 10)
    expected = sklearn_datasets.load_digits()
    assert labelled.labels.tolist() == expected.target.tolist()
    assert labelled.examples[5].dtype == np.uint8
    assert np.abs(labelled.examples[5] - expected.images[5] * 255 / 16).max() <= 0.5
    with pytest.raises(ModelError, match="digits has no splits, got 'test'"):
        read("images", Part("digits", "test"))


def test_cifar10_as_torchvision_keeps_it(tmp_path, monkeypatch):
    cifar = pytest.importorskip("torchvision.datasets").CIFAR10
    folder = tmp_path / cifar.base_folder
    folder.mkdir()
    pixels = random_pixels(2, (3, 32, 32))
    files = {
        "batch": {"data": pixels.reshape(2, -1), "labels": [3, 9]},
        "meta": {"label_names": [str(i) for i in range(10)]},
    }
    sums = {}
    for name, content in files.items():
        (folder / name).write_bytes(pickle.dumps(content))
        sums[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()
    monkeypatch.setattr(cifar, "train_list", [["batch", sums["batch"]]])
    monkeypatch.setattr(cifar, "test_list", [])
    monkeypatch.setattr(cifar, "meta", {"filename": "meta", "key": "label_names", "md5": sums["meta"]})
    labelled = read("images", Part(str(tmp_path)))
    assert np.array_equal(np.stack(labelled.examples), pixels.transpose(0, 2, 3, 1))
    assert (labelled.labels.tolist(), labelled.num_labels) == ([3, 9], 10)
    (folder / "batch").write_bytes(b"")
    with pytest.raises(ModelError, match="not found or corrupted"):
        read("images", Part(str(tmp_path)))


def test_evaluation_is_a_split_or_a_path(tmp_path, monkeypatch):
    (tmp_path / "validation").mkdir()
    monkeypatch.chdir(tmp_path)
    training = Part("nyu-mll/glue", "train", "cola")
    assert evaluation_part(training, "validation") == Part("nyu-mll/glue", "validation", "cola")
    for path in (str(tmp_path), "./validation", "nowhere.txt"):
        assert evaluation_part(training, path) == Part(path, None)


@uses_datasets
def test_of_a_folder_for_evaluation_the_split_that_is_not_to_train_on_is_read(tmp_path):
    """Its training part was evaluated, without a word."""
    for split in ("train", "test"):
        write_json(tmp_path / "two" / f"{split}.jsonl", [{"text": split}])
        write_json(tmp_path / "three" / f"{split}.jsonl", [{"text": split}])
        write_json(tmp_path / split / f"{split}.jsonl", [{"text": split}])
        assert read("text", Part(str(tmp_path / split), None)) == [split]
    write_json(tmp_path / "three" / "validation.jsonl", [{"text": "it"}])
    assert read("text", Part(str(tmp_path / "two"), None)) == ["test"]
    assert read("text", Part(str(tmp_path / "three"))) == ["train"]
    with pytest.raises(ModelError, match=r"^evaluation must name data of one split, got .*three, which has train, "):
        read("text", Part(str(tmp_path / "three"), None))


@pytest.mark.parametrize(
    ("kind", "name", "given"),
    [("tags", "mine:rows", "text, chat, pairs, images"), ("images", "pydoc", "text, chat, pairs")],
)
def test_a_kind_that_a_source_does_not_give_is_refused_with_those_that_do(kind, name, given):
    """It was looked for as a file, or on the hub."""
    rule = f"data of kind {kind} must come from .*a file of examples or a folder or a data set on the hub, got "
    with pytest.raises(ModelError, match=f"{rule}'{name}', which gives {given}; take other data"):
        read(kind, Part(name))


def test_selecting_keeps_labels_with_their_examples():
    labelled = Labelled(["a", "b", "c"], torch.tensor([0, 1, 2]), 3)
    chosen = labelled.select([2, 0])
    assert (chosen.examples, chosen.labels.tolist(), chosen.num_labels) == (["c", "a"], [2, 0], 3)


def test_the_halves_of_pydocs_paragraphs_are_every_other_time_the_wrong_way_round():
    found = read("pairs", Part("pydoc", "train", None))
    text = " ".join(" ".join(read("text", Part("pydoc", "train", None))).split())
    assert found.labels[:4].tolist() == [0, 1, 0, 1] and found.num_labels == 2
    for (first, second), label in zip(found.examples[:50], found.labels[:50].tolist(), strict=True):
        assert (f"{first} {second}" in text) == bool(label)
        assert label or f"{second} {first}" in text


def test_a_source_is_a_row_and_a_function(monkeypatch):
    def read_numbers(part, columns):
        return Labelled([(str(number), part.split) for number in range(int(part.name[1:]))], torch.zeros(2), 2)

    row = Source(
        name="numbers",
        fits=lambda name: name.startswith("#"),
        reader=lambda kind: read_numbers if kind.name == "pairs" else None,
        gives="pairs",
    )
    monkeypatch.setattr(sources, "SOURCES", (row, *sources.SOURCES))
    assert read("pairs", Part("#2")).examples == [("0", "train"), ("1", "train")]
    with pytest.raises(ModelError, match="got '#2', which gives pairs; take other data"):
        read("text", Part("#2"))


def test_what_is_neither_a_file_nor_a_folder_is_named():
    with pytest.raises(ModelError, match="got '/dev/null': neither a file nor a folder"):
        read("text", Part("/dev/null"))
