"""The commands on the pages: each can be typed as it stands, and Thinwire knows its words."""

import re
import shlex
import subprocess
from importlib import import_module

import pytest

from support.pages import ROOT, pages
from thinwire.launch import cli
from thinwire.launch.recipe import recipe

pytestmark = pytest.mark.slow

OWN = {"size", "sent"}
"""Commands that the page on extending defines, and a test of its own runs."""
WITHOUT_RECIPE = {"report", "export", "recipes", "keys"}
"""Commands that options of a recipe may not follow."""
CALL = re.compile(r"(?:\$ )?(?:\S*/)?(thinwire [a-z-].*|torchrun .*-m thinwire\.launch\.train.*|python -m thinwire .*)")
PAGES = [*(page for page in pages() if page.name != "CHANGELOG.md"), ROOT / "docker" / "README.md"]


def commands(page):
    """The commands in the blocks of a page, each in one line, and those with options within its text."""
    text = page.read_text()
    fenced = "\n".join(re.findall(r"^```(?:sh|console)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    indented = "\n".join(line.strip() for line in re.findall(r"^ {4}.*$", text, re.MULTILINE))
    lines = re.sub(r"\s*\\\n\s*", " ", f"{fenced}\n{indented}").splitlines()
    inline = re.findall(r"`(thinwire [a-z]+ [^`]*--[^`]*)`", " ".join(text.split()))
    return [found[1] for line in (*lines, *inline) if (found := CALL.fullmatch(line.strip()))]


def check(words):
    """Parse the words of a command as the command does, without its work."""
    words = words[: next((index for index, word in enumerate(words) if word in (">", "|", "&&")), None)]
    program, *words = words
    if program != "thinwire":
        words = ["train", *words[words.index("thinwire.launch.train") + 1 :]]
    command, *words = words
    if command.startswith("-") or command in OWN | {"NAME"} or "--help" in words:
        return
    assert command in cli.COMMANDS, command
    if words or command != "study":  # `thinwire study` alone lists them
        module, rest = cli.COMMANDS[command][0], words
        if command not in ("train", "simulate"):  # they have the options of a recipe alone
            rest = import_module(f"thinwire.launch.{module}").make_parser().parse_known_args(rest)[1]
        if command in WITHOUT_RECIPE:
            assert not rest, rest
        else:
            recipe.read_options(rest if named(rest) else ["quickstart", *rest], f"thinwire {command}")


def named(words):
    """Whether words name a recipe: one stands before the options, or after them without an option in front."""
    return bool(words) and (not words[0].startswith("--") or "--resume" in words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_can_be_typed(page, monkeypatch):
    monkeypatch.setattr(recipe, "_recipe_of", lambda run: "quickstart")
    for line in commands(page):
        shell = subprocess.run(["bash", "-n"], input=line, capture_output=True, text=True, timeout=60, check=False)
        assert shell.returncode == 0, (line, shell.stderr)
        try:
            check(shlex.split(line, comments=True))
        except Exception as error:
            raise AssertionError(f"{line}: {error}") from error


def test_the_pages_have_commands():
    assert sum(len(commands(page)) for page in PAGES) > 50
