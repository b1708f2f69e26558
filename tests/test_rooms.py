"""The rooms of the house: imports go down, no command imports another, and no test imports another."""

import ast
import configparser
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BELOW = {
    "launch": {"pipeline", "compress", "models", "errors"},
    "pipeline": {"compress", "models", "errors"},
    "compress": {"errors"},
    "models": {"errors"},
    "errors": set(),
}
MODULES = [path for package in BELOW for path in sorted((ROOT / package).rglob("*.py"))]
TESTS = sorted((ROOT / "tests").rglob("*.py"))


@cache
def imported(path, *, hints=True):
    """Every module that a file imports, wherever in it; or but for `hints`, which only type checkers read."""
    found, tree = [], ast.parse(path.read_text())
    checked = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    left_out = () if hints else {id(each) for node in checked for each in ast.walk(node)}
    for node in (node for node in ast.walk(tree) if id(node) not in left_out):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def own(path, *, hints=True):
    """The parts of the names that a file imports from Thinwire."""
    return {tuple(name.split(".")[1:]) for name in imported(path, hints=hints) if name.startswith("thinwire.")}


def test_imports_go_down():
    for path in MODULES:
        package = path.relative_to(ROOT).parts[0]
        assert {parts[0] for parts in own(path)} <= BELOW[package] | {package}, path


def lines_of(package):
    """The lines of rooms in ARCHITECTURE.md, from above, each a list of names."""
    text = (ROOT / "ARCHITECTURE.md").read_text().split(f"The rooms of `{package}/`")[1].split("\n\n")[1]
    return [[name.strip(" ,/") for name in line[4:38].split(",")] for line in text.splitlines()]


@pytest.mark.parametrize("package", ["pipeline", "launch"])
def test_rooms_are_those_of_the_picture_and_import_from_the_lines_below(package):
    """In launch/ the picture names what several commands use; what it does not name is a command's, and is above.

    A type hint may name what is above, and a program that starts a command imports `cli`.
    """
    lines = lines_of(package)
    height = {name: len(lines) - index for index, names in enumerate(lines) for name in names}
    here = {path.stem for path in (ROOT / package).iterdir() if path.suffix in ("", ".py") and path.name[0] != "_"}
    assert set(height) == here if package == "pipeline" else set(height) < here
    for path in MODULES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] == package and parts[1] in height:
            used = own(path, hints=False)
            rooms = {name[1] for name in used if name[0] == package and name[1:] and name[1] in here}
            assert all(height.get(name, 99) < height[parts[1]] for name in rooms - {parts[1], "cli"}), path


def test_no_files_import_each_other_in_a_circle():
    """A type hint may name what is above."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in MODULES}
    below = {
        name: {target for target in map(".".join, own(path, hints=False)) if target in names} - {name}
        for name, path in names.items()
    }
    ends = True
    while ends:  # take away what imports nothing that is left
        ends = {name for name, targets in below.items() if not targets}
        below = {name: targets - ends for name, targets in below.items() if name not in ends}
    assert not below, "; ".join(f"{name} imports {', '.join(sorted(targets))}" for name, targets in below.items())


def test_no_command_imports_another():
    shared = {name for names in lines_of("launch") for name in names}
    commands = {path.stem if path.is_file() else path.name for path in (ROOT / "launch").iterdir()} - shared
    for path in MODULES:
        if path.is_relative_to(ROOT / "launch"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            theirs = {name[1] for name in own(path) if name[0] == "launch" and len(name) > 1 and name[1] in commands}
            mine = {parts[1]} if len(parts) > 1 else set()
            assert theirs - {"cli"} <= mine or parts[1] == "cli", path


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
