"""The README's example is run as written, on two processes."""

import re

import pytest

from support.pages import DOCS, ROOT, blocks, pages
from support.scripts import on_two_processes

README = ROOT / "README.md"


@pytest.mark.processes
def test_the_python_example_runs_as_written(tmp_path):
    (example,) = blocks(README, "python")
    script = tmp_path / "example.py"
    script.write_text(example)
    printed = on_two_processes(script, tmp_path)
    losses = [float(value) for value in re.findall(r"loss ([0-9.]+)", printed)]
    assert len(losses) == 20, printed
    assert losses[-1] < 0.5 * losses[0], losses
    sent = dict(re.findall(r"stage (\d) sent (\d+) bytes in 80 frames instead of 163840", printed))
    assert sorted(sent) == ["0", "1"], printed
    # of [8, 64]: header, length, a bf16 scale a row, and codes that the default codec makes shorter than a byte each
    assert all(80 * (64 + 4 + 16) < int(sent_bytes) < 80 * (64 + 4 + 16 + 512) for sent_bytes in sent.values()), sent


def test_every_command_the_readme_names_exists():
    from thinwire.launch.cli import COMMANDS

    code = [*blocks(README, "sh"), *re.findall(r"`[^`\n]+`", README.read_text())]
    named = set(re.findall(r"thinwire (\w+)", "\n".join(code)))
    assert named
    assert named <= set(COMMANDS)


PAGES = [*pages(), ROOT / "docker" / "README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_a_page_links_to_exists(page):
    links = [link for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()) if "://" not in link]
    assert links or page != README
    for link in links:
        assert (page.parent / link).exists(), link


def headings(page):
    """The anchors of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    said = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", re.sub(r"\(\S+\)", "", line)).strip().lower()) for line in said}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_heading_a_page_links_to_exists(page):
    """A page linked a section that had left with its feature."""
    for link, anchor in re.findall(r"\]\(([^):#]*\.md|)#([^)]+)\)", page.read_text()):
        assert anchor in headings(page.parent / link if link else page), f"{link}#{anchor}"


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/how-to/extending.md"])
def test_every_path_a_page_names_exists(page):
    named = re.findall(
        r"`((?:tests|docs|examples|launch|pipeline|compress|models|errors)/[\w./-]*)`", (ROOT / page).read_text()
    )
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_every_page_is_in_the_index_and_in_the_site(page):
    """Pages of measurements and studies stand behind one page, which links them all."""
    name = str(page.relative_to(DOCS))
    behind = name.startswith(("measured/", "studies/"))
    from_page = DOCS / ("what-to-expect.md" if behind else "index.md")
    assert name == "index.md" or f"({name})" in from_page.read_text(), f"add it to {from_page}"
    assert behind != (f"- {name}\n" in (ROOT / "mkdocs.yml").read_text()), "mkdocs.yml has all others in its nav"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "Makefile", "docs/start/first-run.md"])
def test_a_page_names_the_pythons_that_can_install_it(name):
    [(first, beyond)] = re.findall(r"^python_requires = >=3\.(\d+),<3\.(\d+)$", (ROOT / "setup.cfg").read_text(), re.M)
    assert f"Python 3.{first} to 3.{int(beyond) - 1}" in " ".join((ROOT / name).read_text().split())
