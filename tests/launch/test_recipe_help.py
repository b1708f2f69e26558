"""The help of a recipe: a sentence for every field, taken from the source."""

import ast
import inspect
import re
from dataclasses import is_dataclass
from functools import cache
from itertools import pairwise
from typing import get_type_hints

import pytest

from support.pages import DOCS
from thinwire.launch.recipe.recipe import Recipe, parse
from thinwire.pipeline.options import BoundaryOptions


@cache
def docstrings(group):
    """Field -> the string below it in the source of a dataclass."""
    body = ast.parse(inspect.getsource(group)).body[0].body
    return {
        field.target.id: " ".join(below.value.value.split())
        for field, below in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr)
    }


def sentences(group, prefix=""):
    """Option -> sentence, for every field of a dataclass and of those inside it; None where there is no sentence."""
    found = {}
    for name, kind in get_type_hints(group).items():
        if is_dataclass(kind):
            found |= sentences(kind, f"{prefix}{name}.")
        else:
            found[f"--{prefix}{name}"] = docstrings(group).get(name)
    return found


def help_text(capsys, monkeypatch, *argv):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 0
    return capsys.readouterr().out


def unexplained(text, meant):
    """The options whose paragraph of the help lacks their sentence."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"\n  (?=--)|\n\n", text)]
    by_option = {re.split(r"[ ,]", paragraph)[0]: paragraph for paragraph in paragraphs}
    return [option for option, sentence in meant.items() if not sentence or sentence not in by_option.get(option, "")]


@pytest.mark.slow
def test_help_has_a_sentence_for_every_field(capsys, monkeypatch):
    meant = sentences(Recipe)
    assert len(meant) > 30
    assert unexplained(help_text(capsys, monkeypatch, "--help"), meant) == []
    assert all(sentence.endswith(".") for sentence in meant.values()), meant


def test_help_of_a_boundary_has_a_sentence_for_every_field(capsys, monkeypatch):
    meant = sentences(BoundaryOptions, "compression.boundaries.")
    assert len(meant) == 2
    assert unexplained(help_text(capsys, monkeypatch, "quickstart", "--compression.boundaries.help"), meant) == []


def test_help_says_how_to_call(capsys, monkeypatch):
    text = help_text(capsys, monkeypatch, "quickstart", "--help")
    assert text.startswith("usage: thinwire train RECIPE [--option value ...]")
    assert "thinwire recipes" in text


def test_the_page_for_those_who_come_from_other_programs_names_our_fields(tmp_path):
    page = (DOCS / "how-to/from-trl.md").read_text()
    rows = [row.split("|")[1] for row in page.splitlines() if row.startswith("| `")]
    known = sentences(Recipe)
    named = [re.split("[: ]", name)[0] for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(named) > 40
    assert [name for name in named if f"--{name}" not in known] == []
    [recipe] = re.findall(r"(?:^    \w+: \{.*\n)+", page, re.MULTILINE)
    (tmp_path / "own.yaml").write_text(recipe)
    assert parse([str(tmp_path / "own.yaml")]).model.lora.rank == 16
