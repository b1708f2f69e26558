"""Data from a function of the user's own: what it may return, and one sentence for everything else."""

import pytest

from support.own_code import own_module
from support.parts import read
from thinwire.models.data.load import load
from thinwire.models.data.options import DataOptions
from thinwire.models.data.parts import Part, evaluation_part
from thinwire.models.errors import ModelError

OWN = """
import torch

from thinwire.models.data.parts import Labelled


def texts(split):
    return [f"{split} {number}" for number in range(3)]


def pictures(split):
    return Labelled([torch.zeros(2, 2, dtype=torch.uint8).numpy()] * 4, torch.tensor([0, 1, 0, 1]), 2)


def pairs(split):
    return Labelled([("a",), ("b",)], torch.tensor([0, 1]), 2)


def broken(split):
    raise KeyError(split)


def other_each_time(split):
    calls.append(split)
    return [f"{split} {len(calls)}"]


def other_labels_each_time(split):
    calls.append(split)
    return Labelled([("a",), ("b",)], torch.tensor([0, len(calls) % 2]), 2)


def takes_nothing():
    return []


def numbers(split):
    return [1, 2]


def few_labels(split):
    return Labelled([("a",), ("b",)], torch.tensor([0]), 2)


def listed_labels(split):
    return Labelled([("a",), ("b",)], [0, 1], 2)


def wide_labels(split):
    return Labelled([("a",), ("b",)], torch.tensor([0, 2]), 2)


def text_alone(split):
    return Labelled(["a", "b"], torch.tensor([0, 1]), 2)


def uneven(split):
    return Labelled([("a",), ("b", "c")], torch.tensor([0, 1]), 2)


def floats(split):
    return Labelled([torch.zeros(2, 2).numpy()] * 2, torch.tensor([0, 1]), 2)


def few_classes(split):
    return Labelled([("a",), ("b",)], torch.tensor([0, 1]), 2, ("good",))


def one_class_twice(split):
    return Labelled([("a",), ("b",)], torch.tensor([0, 1]), 2, ("good", "good"))


def two_channels(split):
    return Labelled([torch.zeros(2, 2, 2, dtype=torch.uint8).numpy()] * 2, torch.tensor([0, 1]), 2)


calls = []
constant = 3
"""
KINDS = """
from thinwire.models.data.kinds import Kind


class Unread(Kind):
    pass


class Unmade(Kind):
    def check(self, name, returned):
        return returned


class Broken(Unmade):
    def check(self, name, returned):
        return returned[9]


class Short(Unmade):
    def samples(self, examples):
        return examples


class Late(Kind):
    def __init__(self, size):
        self.size = size


class Other:
    pass
"""
OBJECTIVES = """
from thinwire.models.data.kinds import Images, Pairs, Text
from thinwire.models.tasks import LanguageModeling


class Mine(LanguageModeling):
    pass


def objective(self, num_labels=0):
    return Mine()


MineOfText, MineOfPairs, MineOfImages = (
    type(f"MineOf{kind.__name__}", (kind,), {"objective": objective}) for kind in (Text, Pairs, Images)
)
"""


@pytest.fixture
def own_sources(tmp_path, monkeypatch):
    """A module `own_sources` in the current directory."""
    with own_module("own_sources", OWN, tmp_path, monkeypatch):
        yield


@pytest.mark.usefixtures("own_sources")
def test_a_function_of_ones_own_is_asked_for_its_split():
    assert read("text", Part("own_sources:texts", "test")) == ["test 0", "test 1", "test 2"]
    assert read("images", Part("own_sources:pictures")).num_labels == 2
    training = Part("own_sources:pictures")
    # the texts to train on were what was evaluated
    assert read("text", evaluation_part(training, "own_sources:texts")) == ["test 0", "test 1", "test 2"]
    assert read("text", evaluation_part(Part("own_sources:texts"), "held")) == ["held 0", "held 1", "held 2"]


@pytest.mark.usefixtures("own_sources")
def test_a_function_written_with_a_dot_is_answered_with_a_colon():
    """It was looked for on the hub."""
    with pytest.raises(ModelError, match=r"got 'own_sources\.texts' \(did you mean own_sources:texts\?\)"):
        read("text", Part("own_sources.texts"))


@pytest.mark.usefixtures("own_sources")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own_sources:text", "data: module own_sources has no 'text' (did you mean texts"),
        ("own_sources:constant", "own_sources:constant must be a function that takes a split, got int"),
        ("own_sources:broken", "own_sources:broken failed for the split 'train': KeyError: 'train'"),
        (
            "own_sources:pictures",
            "own_sources:pictures must return a list of texts, got Labelled; set data.kind to pairs or images for that",
        ),
        ("no_sources:texts", "data: module no_sources of 'no_sources:texts' cannot be imported, from "),
    ],
)
def test_a_function_that_gives_no_texts_is_one_sentence(name, said):
    with pytest.raises(ModelError) as error:
        read("text", Part(name))
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


PICTURES = "must return images that are uint8 arrays [H, W] or [H, W, C] with 1 or 3 channels, or the bytes of a file"


@pytest.mark.usefixtures("own_sources")
@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("takes_nothing", "text", "must take one argument, the split: too many positional arguments"),
        ("numbers", "text", "must return texts that are str, got int 1 at index 0"),
        ("texts", "pairs", "must return Labelled examples, got list"),
        ("few_labels", "pairs", "must return a label for each example, got 1 for 2"),
        ("listed_labels", "pairs", "must return labels as an int64 tensor [N], got list [0, 1]; write torch.tensor("),
        ("text_alone", "pairs", "must return examples that are tuples of one or two texts, got str 'a' at index 0"),
        ("uneven", "pairs", "must return as many texts in each tuple, got one in some and two in others"),
        (
            "few_classes",
            "pairs",
            "must return classes as a tuple of 2 names that differ, or leave them out, got tuple ('",
        ),
        ("one_class_twice", "pairs", "must return classes as a tuple of 2 names that differ, or leave them out, got "),
        ("floats", "images", f"{PICTURES}, got a "),
        ("two_channels", "images", f"{PICTURES}, got a "),
    ],
)
def test_examples_of_the_wrong_kind_are_one_sentence(name, kind, said):
    with pytest.raises(ModelError) as error:
        part = Part(f"own_sources:{name}")
        read("text", part) if kind == "text" else read(kind, part)
    assert str(error.value).startswith(f"own_sources:{name} {said}")
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("own_sources")
def test_a_label_beyond_the_classes_is_told():
    with pytest.raises(ModelError, match=r"labels must lie in 0\.\.1, got 2 in row 1 of own_sources:wide_labels"):
        read("pairs", Part("own_sources:wide_labels"))


@pytest.mark.usefixtures("own_sources")
@pytest.mark.parametrize(("name", "kind"), [("other_each_time", "text"), ("other_labels_each_time", "pairs")])
def test_a_function_that_gives_other_examples_at_each_call_is_refused(name, kind):
    """One process reads for all, so nobody else could notice; a resume would train on other samples."""
    said = f"own_sources:{name} must return the same for split 'test' at each call"
    with pytest.raises(ModelError, match=said):
        part = Part(f"own_sources:{name}", "test")
        read("text", part) if kind == "text" else read(kind, part)


@pytest.mark.usefixtures("own_sources")
@pytest.mark.parametrize(("kind", "source"), [("Text", "texts"), ("Pairs", "pairs"), ("Images", "pictures")])
def test_a_kind_that_extends_one_of_ours_has_its_own_objective(tmp_path, monkeypatch, kind, source):
    """It was never asked for, without a word."""
    with own_module("own_objectives", OBJECTIVES, tmp_path, monkeypatch):
        given = DataOptions(name=f"own_sources:{source}", kind=f"own_objectives:MineOf{kind}", held_out=0, block_size=4)
        assert type(load(given).task).__name__ == "Mine"


@pytest.mark.usefixtures("own_sources")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Unread", "kind own_kinds:Unread must have a method check, for functions, or rows, for tables; add one"),
        ("Unmade", "kind own_kinds:Unmade must have a method samples, which makes Samples of examples; add it"),
        ("Broken", "own_kinds:Broken.check failed: IndexError: list index out of range (line 16 of own_kinds.py)"),
        ("Short", "own_kinds:Short.samples must take examples, a tokenizer and the options: too many positional"),
        ("Late", "own_kinds:Late must take no arguments: missing a required argument: 'size'"),
        ("Other", "kind must be a class that extends thinwire.models.data.kinds.Kind, got own_kinds:Other"),
    ],
)
def test_a_mistake_in_a_kind_of_ones_own_is_one_sentence(tmp_path, monkeypatch, name, said):
    with own_module("own_kinds", KINDS, tmp_path, monkeypatch), pytest.raises(ModelError) as error:
        load(DataOptions(name="own_sources:texts", kind=f"own_kinds:{name}", held_out=0))
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)
