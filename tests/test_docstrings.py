"""One style of docstrings, beyond what ruff checks: what a thing is or does comes first; code in single backticks."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("compress", "errors", "models", "pipeline", "launch")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(path):
    nodes = ast.walk(ast.parse(path.read_text()))
    return [text for node in nodes if isinstance(node, DOCUMENTED) if (text := ast.get_docstring(node))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_say_what_it_is(path):
    for text in docstrings(path):
        assert not text.startswith(("Return ", "Returns ")), f"say what it is, not that it is returned: {text}"
        assert "``" not in text and ":class:" not in text, f"write code in single backticks: {text}"


def test_there_are_files_to_check():
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(PACKAGES)
