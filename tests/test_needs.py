"""The closing lines of a run of the tests: what was not run, and what to install for it."""

import ast
import sys

import pytest

from support.commands import completed
from support.needs import left_out, need
from support.pages import ROOT

WAYS = {"skip", "skipif", "importorskip"}


def reasons(path):
    """The texts of all skips in a file; the parts in braces of an f-string are left out."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text if any(way in text for way in WAYS) else "")):
        name = getattr(node.func, "attr", "") if isinstance(node, ast.Call) else ""
        if name not in WAYS:
            continue
        given = [keyword.value for keyword in node.keywords if keyword.arg == "reason"] or node.args[:1]
        yield "".join(part.value for part in ast.walk(given[0]) if isinstance(part, ast.Constant))


def test_every_reason_to_skip_has_a_cure():
    found = {(reason.strip(), path.name) for path in (ROOT / "tests").rglob("*.py") for reason in reasons(path)}
    assert ("needs a CUDA device", "conftest.py") in found
    unknown = [(reason, name) for reason, name in sorted(found) if reason not in ("", "needs") and not need(reason)]
    assert unknown == [], "say in tests/support/needs.py what helps"


def test_needs_are_counted_and_a_reason_without_a_cure_speaks_for_itself():
    assert left_out(["needs a CUDA device", "no chromium on the PATH", "needs a CUDA device", "the moon is full"]) == [
        "2 tests did not run. Needed: a CUDA device; run them on a machine with an NVIDIA GPU.",
        "1 test did not run. Needed: a browser; install chromium.",
        "1 test did not run. Needed: the moon is full.",
    ]


@pytest.mark.slow
def test_a_run_closes_with_them(tmp_path):
    (tmp_path / "test_skipped.py").write_text(
        "import pytest\n\n\n@pytest.mark.skipif(True, reason='needs a CUDA device')\ndef test_gpu():\n    pass\n"
    )
    where = ["-p", "no:cacheprovider", "-c", ROOT / "setup.cfg", "--rootdir", ROOT, "-p", "conftest", tmp_path]
    run = completed([sys.executable, "-m", "pytest", *where], tmp_path)
    wanted = "1 test did not run. Needed: a CUDA device; run them on a machine with an NVIDIA GPU."
    assert wanted in run.stdout, run.stderr
