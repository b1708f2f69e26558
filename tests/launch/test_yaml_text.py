"""The YAML of recipes: what is refused in one sentence, and what numbers, words and merged groups mean."""

import math

import pytest

from thinwire.launch.recipe.yaml_text import MOST_CHARACTERS, dump_yaml, load_yaml
from thinwire.pipeline.errors import OptionsError


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("&a [*a]", "line 1: found unconstructable recursive node"),
        ("model: &m {config: *m}", "line 1: found unconstructable recursive node"),
        ("[" * 20_000, "must not be nested so deep"),
        ("{a: " * 20_000, "must not be nested so deep"),
        ("x" * (MOST_CHARACTERS + 1), f"must have at most {MOST_CHARACTERS} characters, got {MOST_CHARACTERS + 1}"),
        ("a: !!binary aGk=", "is not valid YAML: line 1: could not determine a constructor for the tag"),
        ("a:\n\tb: 1", r"is not valid YAML: line 2: found character '\t' that cannot start any token"),
        ("a: *nowhere", "is not valid YAML: line 1: found undefined alias 'nowhere'"),
        ("b: 1\na: {c: 1, d: 2, c: 3}", "line 2: c must stand only once"),
        ("a: {<<: 3}", "line 1: << must be followed by groups of fields"),
        ("a: &a {b: 1}\nc: {<<: *a, <<: {d: 2}}", "line 2: << must stand only once"),
        ("a: !!python/object/apply:os.system [true]", "is not valid YAML"),
    ],
    ids=[
        "part of itself",
        "a field of itself",
        "deep",
        "deep fields",
        "long",
        "bytes",
        "tab",
        "alias",
        "twice",
        "merged",
        "merged twice",
        "tag",
    ],
)
def test_each_is_one_sentence(text, said):
    with pytest.raises(OptionsError) as caught:
        load_yaml(text, "mine.yaml")
    assert str(caught.value).startswith("mine.yaml ") and said in str(caught.value)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


def test_aliases_are_followed():
    assert load_yaml("a: &a [1, 2]\nb: [*a, *a]\nc: &s text\nd: *s", "mine.yaml") == {
        "a": [1, 2],
        "b": [[1, 2], [1, 2]],
        "c": "text",
        "d": "text",
    }


def test_what_is_merged_may_be_merged_again():
    text = "a: &a {x: 1, y: 1}\nb: &b {<<: *a, y: 2, z: 2}\nc: {<<: *b, z: 3}\nd: *b\ne: {<<: [{x: 4}, *b]}\n"
    text += "f: {<<: [{steps: 4}, {steps: 5}], x: 6}"
    assert load_yaml(text, "mine.yaml") == {
        "a": {"x": 1, "y": 1},
        "b": {"x": 1, "y": 2, "z": 2},
        "c": {"x": 1, "y": 2, "z": 3},
        "d": {"x": 1, "y": 2, "z": 2},
        "e": {"x": 4, "y": 2, "z": 2},
        "f": {"steps": 4, "x": 6},
    }


def test_numbers_with_an_exponent_alone_are_numbers():
    assert load_yaml("{a: 1e-3, b: 2E+4, c: 1e, d: e3}", "mine.yaml") == {"a": 1e-3, "b": 2e4, "c": "1e", "d": "e3"}


@pytest.mark.parametrize(
    "text",
    ["010", "1:30", "1:30.5", "2026-01-31", "1e5f2", "9" * 5000, "=", "1e3", "-.5E+1", "no", "NULL", "~", "", "<<"],
)
def test_text_stays_text_when_it_is_written_and_read(text):
    """A run with the name 1e3 could not be resumed."""
    assert load_yaml(dump_yaml({"a": text}), "mine.yaml") == {"a": text}


@pytest.mark.parametrize("text", ["010", "1:30", "1:30.5", "2026-01-31", "1e5f2", "9" * 5000, "="])
def test_what_looks_like_a_number_of_another_kind_is_text(text):
    """010 was 8, 1:30 was 90, and 1e5f2 no YAML."""
    assert load_yaml(f"a: {text}", "mine.yaml") == {"a": text}


def test_numbers_and_words_of_yaml():
    text = "[3, -4, +5, 1_000, 0x1f, .5, 2., -1.5e3, -.INF, yes, No, TRUE, on, Off, ~, null, ]"
    assert load_yaml(text, "mine.yaml") == [
        *(3, -4, 5, 1000, 31, 0.5, 2.0, -1500.0, -math.inf),
        *(True, False, True, "on", "Off", None, None),
    ]
    assert math.isnan(load_yaml(".nan", "mine.yaml"))
