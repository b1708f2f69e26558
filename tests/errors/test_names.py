"""Hints for misspelt names."""

import pytest

from thinwire.errors.names import colon_hint, did_you_mean

FAMILIES = ("gpt2", "llama", "gpt_neox", "starcoder2", "Qwen")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("starcodr2", " (did you mean starcoder2?)"),
        ("GPT2", " (did you mean gpt2?)"),
        ("qwem", " (did you mean Qwen?)"),
        ("zebra", ""),
        ("mamba", ""),
        ("", ""),
    ],
)
def test_similar_names_are_named(name, hint):
    assert did_you_mean(name, FAMILIES) == hint


def test_there_are_at_most_so_many():
    assert did_you_mean("gpt", FAMILIES, most=1) == " (did you mean gpt2?)"


def test_no_name_is_meant_in_its_own_place():
    """A name that is known and cannot be had, as a model of the hub, was answered with itself."""
    assert did_you_mean("gpt2", ["gpt2"]) == ""


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("toy.sums", " (did you mean toy:sums?)"),
        ("toy.inner.sums", " (did you mean toy.inner:sums?)"),
        ("toy:sums", ""),
        ("toy", ""),
        ("other.sums", ""),
        ("json.loads", ""),
        ("folder.sums", ""),
        ("owner/toy.sums", ""),
    ],
)
def test_a_dot_in_place_of_a_colon_is_told(tmp_path, monkeypatch, name, hint):
    (tmp_path / "toy.py").write_text("raise AssertionError('a hint imports nothing')")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert colon_hint(name) == hint
