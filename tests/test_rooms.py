"""The rooms of the house: imports go down, no command imports another, and no test imports another."""

import ast
import configparser
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
BELOW = {
    "launch": {"pipeline", "compress", "models", "errors"},
    "pipeline": {"compress", "models", "errors"},
    "compress": {"errors"},
    "models": {"errors"},
    "errors": set(),
}
SHARED = {"plan", "processes", "run", "hosts", "timing", "shared"}
"""The rooms of launch/ that several commands use; every other file or folder there is one command's."""
MODULES = [path for package in BELOW for path in sorted((ROOT / package).rglob("*.py"))]
TESTS = sorted((ROOT / "tests").rglob("*.py"))


@cache
def imported(path):
    """Every module that a file imports, wherever in it."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def own(path):
    """The parts of the names that a file imports from Thinwire."""
    return {tuple(name.split(".")[1:]) for name in imported(path) if name.startswith("thinwire.")}


def test_imports_go_down():
    for path in MODULES:
        package = path.relative_to(ROOT).parts[0]
        assert {parts[0] for parts in own(path)} <= BELOW[package] | {package}, path


def test_the_rooms_of_pipeline_are_those_of_the_picture_and_import_from_the_lines_below():
    text = (ROOT / "ARCHITECTURE.md").read_text().split("The rooms of `pipeline/`")[1].split("\n\n")[1]
    lines = [[name.strip(" ,/") for name in line[4:38].split(",")] for line in text.splitlines()]
    height = {name: len(lines) - index for index, names in enumerate(lines) for name in names}
    here = (path for path in (ROOT / "pipeline").iterdir() if path.suffix in ("", ".py") and path.name[0] != "_")
    assert set(height) == {path.stem for path in here}
    for path in MODULES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] == "pipeline" and parts[1] != "__init__":
            below = {name[1] for name in own(path) if name[0] == "pipeline" and name[1:] and name[1] in height}
            assert all(height[name] < height[parts[1]] for name in below - {parts[1]}), path


def room(parts):
    """Which room of launch/ a module is in; None for what no command is."""
    return None if len(parts) < 2 or parts[1] in SHARED | {"cli"} else parts[1]


def test_no_command_imports_another():
    commands = {path.stem if path.is_file() else path.name for path in (ROOT / "launch").iterdir()}
    for path in MODULES:
        if path.is_relative_to(ROOT / "launch"):
            theirs = [parts for parts in own(path) if parts[0] == "launch" and len(parts) > 1 and parts[1] in commands]
            mine = room(path.relative_to(ROOT).with_suffix("").parts)
            assert {room(parts) for parts in theirs} <= {mine, None}, path


def test_no_test_imports_another():
    for path in TESTS:
        assert not re.search(r"^\s*(import|from) .*\btest_", path.read_text(), re.MULTILINE), path


def test_no_two_test_files_share_a_name():
    """Pytest imports them by name, and refuses a session with two that are called the same."""
    names = [path.name for path in TESTS if path.name.startswith("test_")]
    assert len(names) == len(set(names))


def test_every_room_is_installed():
    """A room that is not listed works where the repository is installed in place, and is missing everywhere else."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    rooms = {path.parent.relative_to(ROOT) for path in MODULES if path.name == "__init__.py"} - {Path("launch/module")}
    assert set(config["options"]["packages"].split()) - {"thinwire"} == {
        ".".join(["thinwire", *r.parts]) for r in rooms
    }
