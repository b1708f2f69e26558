"""The pages of the documentation, and the blocks of code in them: what a page shows is run as it stands."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    """Every page of the documentation, and those at the top of the repository."""
    return [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of one language on a page, in order."""
    return [code for found, _, code in _FENCE.findall(page.read_text()) if found == language]


def files(page: Path) -> dict[str, str]:
    """The blocks of a page that have a title: name of the file -> its text."""
    return {title: code for _, title, code in _FENCE.findall(page.read_text()) if title}


def defined(*functions: str) -> dict:
    """What the blocks of the documentation that define these functions, one block each, define together, by name."""
    known = {}
    for function in functions:
        (block,) = (block for page in pages() for block in blocks(page, "python") if f"def {function}(" in block)
        exec(block, known)
    return known
