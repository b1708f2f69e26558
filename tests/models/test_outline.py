"""Outlines: what they tell of the data, what they keep, and which data and files have none."""

import json

import pytest
import torch

from thinwire.models.data.load import load
from thinwire.models.data.options import DataOptions
from thinwire.models.data.outline import outline_text, read_outline, signed
from thinwire.models.errors import ModelError

DIGITS = DataOptions(name="digits", limit=50)
TEXT = DataOptions(name="pydoc", limit=2000, block_size=32)


@pytest.mark.parametrize("options", [DIGITS, TEXT], ids=["images", "text"])
def test_an_outline_is_like_the_data_but_for_the_samples(options, tmp_path):
    data, path = load(options), tmp_path / "outline.json"
    path.write_text(outline_text(data, labels=False))
    outlined = read_outline(str(path), labels=False)
    for ours, theirs in ((outlined.training, data.training), (outlined.held_out, data.held_out)):
        assert len(ours) == len(theirs) and ours.digest == theirs.digest
        assert ours.example(3).shape == theirs.example(3).shape and ours.example(3).dtype == theirs.example(3).dtype
        assert ours.side(torch.arange(3)) == ours.side_example(3) == {}
    assert type(outlined.task) is type(data.task)
    assert (outlined.num_labels, outlined.vocab_size) == (data.num_labels, data.vocab_size)


def test_it_has_labels_only_on_demand_and_never_an_input(tmp_path):
    data, path = load(DIGITS), tmp_path / "outline.json"
    path.write_text(outline_text(data, labels=False))
    assert json.loads(path.read_text())["training"]["labels"] is None
    assert path.stat().st_size < 600, "45 images of 64 pixels would be more"
    with pytest.raises(ModelError, match=r"data\.outline must have labels for the process of the last stage"):
        read_outline(str(path), labels=True)
    path.write_text(outline_text(data, labels=True))
    ids = torch.tensor([3, 1, 4])
    assert read_outline(str(path), labels=True).training.targets(ids).equal(data.training.targets(ids))


def test_text_has_no_labels_apart_from_itself(tmp_path):
    (tmp_path / "text.json").write_text(outline_text(load(TEXT), labels=False))
    with pytest.raises(ModelError, match=r"has none; take a schedule that brings the last stage back"):
        read_outline(str(tmp_path / "text.json"), labels=True)
    with pytest.raises(ModelError, match="of text, the targets are the text itself"):
        outline_text(load(TEXT), labels=True)


def test_an_outline_of_conversations_says_where_padding_begins(tmp_path):
    data = load(TEXT)
    data.training.lengths = torch.arange(len(data.training))
    (tmp_path / "chat.json").write_text(outline_text(data, labels=False))
    assert torch.equal(read_outline(str(tmp_path / "chat.json"), labels=False).training.lengths, data.training.lengths)


def test_pairs_have_no_outline(tmp_path):
    data = load(DataOptions(name="pydoc", kind="pairs", limit=50, block_size=32))
    with pytest.raises(ModelError, match="every stage reads masks or positions that come with the texts"):
        outline_text(data, labels=False)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"count": "45"}, "count, shape and labels must be whole numbers, and digest a text"),
        ({"shape": [-1, 8, 8]}, "count, shape and labels must be whole numbers"),
        ({"labels": [1, 2]}, "there are 2 labels for 45 samples"),
        ({"lengths": [1, 2]}, "there are 2 lengths for 45 samples"),
        ({"labels": [10] * 45}, "a label must be below 10, got 10"),
        ({"count": 10**12, "labels": None}, "count and the elements of a sample must be at most 134217728"),
        ({"shape": [2**20, 2**20]}, "count and the elements of a sample must be at most 134217728"),
    ],
    ids=["count", "shape", "number of labels", "number of lengths", "label", "very many", "very large"],
)
def test_an_outline_that_somebody_changed_is_refused_before_training(wrong, sentence, tmp_path):
    refused(tmp_path, sentence, training=wrong)


def test_an_outline_names_each_class_once(tmp_path):
    refused(tmp_path, "there are names of 2 classes for 10", classes=["a", "b"])


def test_a_label_that_changed_on_the_way_trains_nowhere(tmp_path):
    """It was taken: a flipped digit is another label, and no process has both the outline and the samples."""
    path = tmp_path / "outline.json"
    values = json.loads(outline_text(load(DIGITS), labels=True))
    values["training"]["labels"][3] = (values["training"]["labels"][3] + 1) % 10
    path.write_text(json.dumps(values))
    with pytest.raises(ModelError, match=r"it is damaged .its fields have another SHA-256"):
        read_outline(str(path), labels=True)


def refused(tmp_path, sentence, training=(), **wrong):
    path = tmp_path / "outline.json"
    path.write_text(outline_text(load(DIGITS), labels=True))
    values = json.loads(path.read_text()) | wrong
    values["training"] |= training
    path.write_text(json.dumps(signed(values)))
    with pytest.raises(ModelError, match=f"it is damaged .{sentence}"):
        read_outline(str(path), labels=True)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "No such file"),
        ("no JSON", "Expecting value"),
        ("[1]", "it holds no JSON object but list"),
        ("[" * 9999, "it is nested too deep"),
        ('{"format": "thinwire outline 1"}', "its format is not 'thinwire outline 2'"),
        ('{"format": "thinwire outline 2", "training": {"size": 3}}', "it is damaged"),
        (
            '{"format": "thinwire outline 2", "num_labels": 2, "vocab_size": null, "held_out": null, '
            '"training": {"count": 3, "digest": "", "shape": [1], "dtype": "float31"}}',
            "it is damaged",
        ),
        *(
            (
                '{"format": "thinwire outline 2", "held_out": null, "training": {"count": 3, "digest": "", "shape": '
                f'[1], "dtype": "float32"}}, "num_labels": {num_labels}, "vocab_size": {vocab_size}}}',
                "it is damaged",
            )
            for num_labels, vocab_size in [(10**12, "null"), ('"9"', "null"), ("null", '"9"')]
        ),
    ],
)
def test_another_file_is_refused_in_a_sentence(text, sentence, tmp_path):
    path = tmp_path / "outline.json"
    if text is not None:
        path.write_text(json.dumps(signed(json.loads(text))) if text.startswith("{") else text)
    with pytest.raises(ModelError, match=r"data\.outline must be a file that thinwire outline wrote") as caught:
        read_outline(str(path), labels=False)
    assert sentence in str(caught.value)


def test_a_device_is_no_outline():
    """It was read until memory was full."""
    with pytest.raises(ModelError, match="it is no regular file"):
        read_outline("/dev/zero", labels=False)
