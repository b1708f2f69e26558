"""The chat templates that TRL ships, by the script of a page of the reference: right, or refused by a sentence."""

import runpy
from importlib.metadata import PackageNotFoundError, version

import pytest

from support.pages import DOCS, ROOT

SCRIPT = runpy.run_path(str(ROOT / "docs/measured/chat_templates.py"))
PAGE = (DOCS / "reference" / "chat-templates.md").read_text()
try:
    TEMPLATES = SCRIPT["templates"]()
except PackageNotFoundError:
    TEMPLATES = {}

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not TEMPLATES, reason="needs the chat templates of TRL")]


@pytest.mark.parametrize("name", TEMPLATES or ["all"])
def test_conversations_are_right_or_refused_in_a_sentence(name, monkeypatch):
    for module in ("templates", "tokenizer"):  # the trial of what others wrote takes most of the time
        monkeypatch.setattr(f"thinwire.models.data.{module}.tried", lambda given, rule: None)
    found = {said: told for said, told, _ in SCRIPT["outcomes"](TEMPLATES[name])}
    told = {said: outcome for said, outcome in found.items() if outcome != "right"}
    must, lines = "the chat template of tokenizer T must ", [*filter(None, told.values())]
    assert all(line.startswith(must) and "; " in line for line in lines), told
    if f"TRL {version('trl')} " in PAGE:
        [row] = [line for line in PAGE.splitlines() if line.startswith(f"| {name} |")]
        cells = [cell.strip(" \\*") for cell in row.split("|")[2:-1]]
        assert [cell == "right" for cell in cells] == [outcome == "right" for outcome in found.values()], row
