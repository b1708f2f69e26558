"""docs/measured/families.py, whose counts are on the page of models: it says when it has compared nothing."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import logging

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "docs/measured/families.py"))
QUIET = ("set_verbosity_error", "disable_progress_bar")


@pytest.mark.parametrize("words", [["--saved", "nosuch"], ["nosuch", "gpt2"], ["--rotary", "gpt2"]], ids=" ".join)
def test_where_nothing_was_compared_it_ends_with_a_sentence(words, monkeypatch, capsys):
    """A type with a typing error was counted as refused, and the status was 0."""
    monkeypatch.setattr(sys, "argv", ["families.py", *words])
    for owner, name in ((torch, "set_num_threads"), *((logging, name) for name in QUIET)):
        monkeypatch.setattr(owner, name, lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        SCRIPT["main"]()
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert ("nosuch" if "nosuch" in words else "nothing was compared") in said
