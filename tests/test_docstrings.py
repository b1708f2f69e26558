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


@pytest.mark.slow
def test_docstrings_say_what_it_is():
    for path in FILES:
        for text in docstrings(path):
            said = f"{path}: {text}"
            assert not text.startswith(("Return ", "Returns ")), f"say what it is, not that it is returned: {said}"
            assert "``" not in text and ":class:" not in text, f"write code in single backticks: {said}"


def test_there_are_files_to_check():
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(PACKAGES)
