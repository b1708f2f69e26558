import math
from dataclasses import replace

import pytest
import torch

from support.data_files import random_pixels, write_images, write_json, write_tokenizer
from support.own_code import add_module
from thinwire.models.data.load import load
from thinwire.models.data.options import DataOptions
from thinwire.models.errors import ModelError
from thinwire.models.tasks import Classification, LanguageModeling

PAIRS = [{"question": "why did it", "sentence": "the cat sat", "label": i % 2, "idx": i} for i in range(10)]


def text_file(tmp_path, size):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(size)))
    return str(path)


def test_pydoc_is_the_default():
    data = load(DataOptions())
    assert isinstance(data.task, LanguageModeling)
    assert (data.vocab_size, data.num_labels, data.notes) == (256, None, ())
    assert bytes(data.training.inputs(torch.tensor([0]))[0].tolist()).decode().startswith("The ")
    assert 8 < len(data.training) / len(data.held_out) < 10
    assert data.training.digest != data.held_out.digest


def test_the_end_of_a_text_is_held_out(tmp_path):
    options = DataOptions(name=text_file(tmp_path, 100), block_size=4, held_out=0.2)
    data = load(options)
    assert (len(data.training), len(data.held_out)) == (19, 4)
    assert data.held_out.inputs(torch.tensor([0])).tolist() == [[80, 81, 82, 83]]
    assert load(replace(options, held_out=0)).held_out is None


def test_a_limit_uses_the_start_of_the_text(tmp_path):
    data = load(DataOptions(name=text_file(tmp_path, 200), limit=100, block_size=9, held_out=0.2))
    assert data.training.tokens.tolist() == list(range(80))
    assert data.held_out.tokens.tolist() == list(range(80, 100))


def test_the_evaluation_data_have_a_limit_of_their_own(tmp_path):
    (tmp_path / "other").write_bytes(b"x" * 100)
    options = DataOptions(name=text_file(tmp_path, 100), evaluation=str(tmp_path / "other"), limit=90, block_size=3)
    assert len(load(replace(options, evaluation_limit=40)).held_out) == 13
    assert len(load(replace(options, evaluation_limit=40)).training) == len(load(options).training) == 29
    with pytest.raises(ModelError, match=r"data\.evaluation_limit, which is 3"):
        load(replace(options, evaluation_limit=3))
    with pytest.raises(ModelError, match="evaluation_limit must be at least 1, and needs evaluation, got 5 and None"):
        replace(options, evaluation=None, evaluation_limit=5)


def test_a_text_for_evaluation_leaves_all_others_to_training(tmp_path):
    (tmp_path / "other").write_bytes(b"evaluation")
    data = load(DataOptions(name=text_file(tmp_path, 100), evaluation=str(tmp_path / "other"), limit=90, block_size=3))
    assert data.training.tokens.tolist() == list(range(90))
    assert bytes(data.held_out.tokens.tolist()) == b"evaluation"


def test_a_source_without_text_is_named(monkeypatch):
    add_module(monkeypatch, "empty_data", "texts = lambda split: []")
    with pytest.raises(
        ModelError, match="text of empty_data:texts must have 10 tokens or more, got 0; take other data"
    ):
        load(DataOptions(name="empty_data:texts", block_size=9, held_out=0))


def test_an_evaluation_of_the_samples_to_train_on_is_told(tmp_path):
    """A loss of samples that the model had learned was reported as held out."""
    (tmp_path / "a.txt").write_text("0123456789")
    (tmp_path / "b.txt").write_text("9876543210")
    options = DataOptions(name=str(tmp_path / "a.txt"), block_size=4)
    said = (
        "the samples for evaluation are those to train on; name others by data.evaluation to see what a model learned"
    )
    for name, told in (("a.txt", (said,)), ("b.txt", ())):
        assert load(replace(options, evaluation=str(tmp_path / name))).notes == told


def test_both_parts_too_short_are_named_at_once(tmp_path):
    name = text_file(tmp_path, 10)
    with pytest.raises(ModelError) as caught:
        load(DataOptions(name=name, block_size=9, held_out=0.4))
    assert f"training text of {name} must have 10 tokens or more, got 6" in str(caught.value)
    assert "held-out text must have 10 tokens or more, got 4" in str(caught.value)


def test_text_with_a_tokenizer(tmp_path):
    (tmp_path / "text").write_text("the cat\nsat on\n" * 10)
    words = write_tokenizer(tmp_path / "words", pairs=False)
    data = load(DataOptions(name=str(tmp_path / "text"), tokenizer=words, block_size=6, held_out=0))
    assert len(data.training) == 9, "60 tokens, the last block has none behind it"
    assert data.training.inputs(torch.tensor([1])).tolist() == [[5, 6, 4, 7, 8, 4]]
    assert data.vocab_size == 19


@pytest.mark.usefixtures("hub_cache")
def test_pairs(tmp_path):
    words = write_tokenizer(tmp_path / "words")
    path = write_json(tmp_path / "qnli.jsonl", PAIRS)
    options = DataOptions(name=str(path), kind="pairs", tokenizer=words, block_size=12, held_out=0.3)
    data = load(options)
    assert isinstance(data.task, Classification)
    assert (data.num_labels, data.task.num_labels, data.vocab_size) == (2, 2, 19)
    assert (len(data.training), len(data.held_out)) == (7, 3)
    ids = torch.tensor([0])
    assert data.training.inputs(ids).tolist() == [[2, 16, 17, 18, 3, 5, 6, 7, 3, 0, 0, 0]]
    assert set(data.training.side(ids)) == set(data.training.side_example(1)) == {"attention_mask", "token_type_ids"}
    assert data.notes[0].startswith("25.0% of the 7 x 12 tokens are padding")
    assert "puts no token" not in str(data.notes)
    glues = replace(options, tokenizer=write_tokenizer(tmp_path / "alone", pairs=False))
    said = "data.tokenizer puts no token between the two texts of a pair, so no model sees where one ends"
    assert said in load(glues).notes and said not in load(replace(glues, columns=["sentence"])).notes
    one = load(replace(options, columns=["sentence"], limit=5, held_out=0))
    assert len(one.training) == 5
    assert one.training.inputs(ids)[0, :6].tolist() == [2, 5, 6, 7, 3, 0]


@pytest.mark.usefixtures("hub_cache")
def test_what_is_wrong_with_pairs_is_told_all_at_once(tmp_path):
    path = write_json(tmp_path / "rows.jsonl", PAIRS)
    nowhere = str(tmp_path / "nowhere")
    options = DataOptions(name=str(path), kind="pairs", tokenizer=nowhere, columns=["premise"], label="class")
    with pytest.raises(ModelError) as caught:
        load(replace(options, evaluation="validation"))
    for part in ("tokenizer must be", "got premise;", "label must be a column", "one of train, got 'validation'"):
        assert part in str(caught.value), str(caught.value)


@pytest.mark.usefixtures("hub_cache")
def test_fields_of_tables_do_something_where_one_source_is_a_table(tmp_path):
    """A subset of a file was ignored, without a word."""
    path = write_json(tmp_path / "rows.jsonl", [{"body": "0123456789"}])
    options = DataOptions(evaluation=str(path), columns=["body"], block_size=4)
    assert len(load(options).held_out) == 2
    with pytest.raises(ModelError, match=f"^subset must be null for {path}, because only folders and data sets"):
        load(replace(options, name=str(path), evaluation=None, subset="cola"))


@pytest.mark.usefixtures("hub_cache")
def test_a_class_that_training_has_not_is_told(tmp_path):
    words = write_tokenizer(tmp_path / "words")
    training = write_json(tmp_path / "a.jsonl", PAIRS)
    evaluation = write_json(tmp_path / "b.jsonl", [{**PAIRS[0], "label": 2}])
    options = DataOptions(name=str(training), kind="pairs", tokenizer=words, evaluation=str(evaluation))
    with pytest.raises(ModelError, match=r"labels must lie in 0..1, got 2 in row 0 of the evaluation data"):
        load(options)


@pytest.mark.usefixtures("hub_cache")
def test_images(tmp_path):
    pixels = random_pixels(30)
    path = write_images(tmp_path / "images.parquet", pixels, [i // 15 for i in range(30)])
    options = DataOptions(name=str(path), kind="images", held_out=0.2, crop=1, flip=True)
    data = load(options, seed=3)
    assert (len(data.training), len(data.held_out), data.num_labels, data.vocab_size) == (24, 6, 2, None)
    assert data.training.inputs(torch.arange(4)).shape == (4, 3, 8, 8)
    assert set(data.held_out.targets(torch.arange(6)).tolist()) == {0, 1}, "not the end, which is one class"
    assert "measured" in data.notes[0]
    everything = torch.arange(6)
    assert torch.equal(data.held_out.inputs(everything, 0), data.held_out.inputs(everything, 1)), "never augmented"
    first = data.training.inputs(torch.arange(24), 1)
    assert torch.equal(load(options, seed=3).training.inputs(torch.arange(24), 1), first)
    assert not torch.equal(load(options, seed=4).training.inputs(torch.arange(24), 1), first)
    given = load(replace(options, mean=[0.0] * 3, std=[1.0] * 3, crop=0, flip=False))
    assert given.notes == (f"of {path}, column img is read, and the class from label",)
    values = {image.tobytes() for image in pixels}
    back = given.training.inputs(torch.arange(24)).mul(255).round().byte().permute(0, 2, 3, 1).contiguous().numpy()
    assert len({image.tobytes() for image in back} & values) == 24, "each one a different image of the source"
    with pytest.raises(ModelError, match="a value for each of 3 channels, got 1"):
        load(replace(options, mean=[0.0], std=[1.0]))


@pytest.mark.slow
def test_digits():
    pytest.importorskip("sklearn")
    data = load(DataOptions(name="digits", held_out=0.25))
    assert (len(data.training), len(data.held_out), data.num_labels) == (1348, 449, 10)
    assert data.training.inputs(torch.arange(3)).shape == (3, 1, 8, 8)
    large = load(DataOptions(name="digits", image_size=32, channels=3, limit=20))
    assert large.training.inputs(torch.arange(3)).shape == (3, 3, 32, 32)
    with pytest.raises(ModelError, match=r"held_out must leave at least one sample to train on .* got 0\.1 of 4"):
        load(DataOptions(name="digits", limit=4))


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ({"name": "", "block_size": 0, "held_out": 1.5}, ["must be 'pydoc'", "at least 1, got 0", "[0, 1), got 1.5"]),
        ({"held_out": float("nan"), "limit": 0}, ["[0, 1), got nan", "limit must be at least 1, got 0"]),
        (
            {"crop": 2, "flip": True},
            ["crop must be left out for kind text, got 2: it is for images", "flip must be left out"],
        ),
        ({"name": "digits", "kind": "text"}, ["the kind of digits must be images, got 'text'"]),
        ({"name": "x", "columns": ["a", "b"]}, ["columns must be at most 1 for kind text, got ['a', 'b']"]),
        (
            {"name": "digits", "mean": [0.5], "crop": -1},
            ["mean and std must have a finite value", "crop must be at least 0"],
        ),
        ({"name": "digits", "mean": [0.5], "std": [0.0]}, ["std must be above 0, got [0.5] and [0.0]"]),
        ({"name": "digits", "mean": [0.5], "std": [math.inf]}, ["std must be above 0, got [0.5] and [inf]"]),
        ({"name": "digits", "mean": [math.nan], "std": [0.5]}, ["have a finite value for each channel", "got [nan]"]),
        ({"name": "digits", "channels": 4, "image_size": -1}, ["must be 1 or 3, got 4", "at least 1, got -1"]),
        ({"evaluation": ""}, ["evaluation must be a split, a path or null"]),
        (
            {"name": "digits", "tokenizer": "x"},
            ["tokenizer must be left out for kind images, got x: it is for text or chat or pairs or tags"],
        ),
        ({"label": "class"}, ["label must be left out for kind text, got class: it is for pairs or tags or images"]),
    ],
)
def test_bad_options_are_named_all_at_once(options, messages):
    with pytest.raises(ModelError) as caught:
        DataOptions(**options)
    for message in messages:
        assert message in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "no/such/file"}, "got 'no/such/file': no such file or folder"),
        ({"evaluation": "test"}, "pydoc has no splits, got 'test'"),
        ({"evaluation": "nowhere.txt"}, "got 'nowhere.txt': no such file or folder"),
        ({"columns": ["body"]}, r"^columns must be \[\] for pydoc, because only tables have columns, got \['body'\]$"),
        ({"name": "digits", "label": "class"}, "^label must be label for digits, because only tables .*, got class$"),
        (
            {"subset": "cola", "evaluation": "own:texts"},
            "^subset must be null for pydoc, .* the hub have subsets, got cola",
        ),
    ],
)
def test_what_cannot_be_read_is_named(options, message):
    with pytest.raises(ModelError, match=message):
        load(DataOptions(**options))
