"""Entry points of installed packages, with and without `importlib.metadata`."""

import subprocess
import sys
import zipfile

import pytest

from thinwire.launch.shared.installed import entry_points

GROUP = "thinwire.commands"
FILES = {
    "own-1.0.dist-info/METADATA": "Name: own\nVersion: 1.0\n",
    "own-1.0.dist-info/entry_points.txt": f"[{GROUP}]\nsize = own:main\n",
    "other-2.0.dist-info/METADATA": "Name: other\nVersion: 2.0\n",
    "other-2.0.dist-info/entry_points.txt": "[console_scripts]\nother = other:main\n",
    "plain-3.0.dist-info/METADATA": "Name: plain\nVersion: 3.0\n",
}


@pytest.fixture(params=["folder", "archive"])
def place(request, tmp_path):
    """A folder or an archive of installed packages."""
    if request.param == "archive":
        with zipfile.ZipFile(tmp_path / "packages.zip", "w") as archive:
            for name, text in FILES.items():
                archive.writestr(name, text)
        return tmp_path / "packages.zip"
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_an_entry_point_of_an_installed_package_is_found(place, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(place)])
    found = entry_points(GROUP)
    assert [(entry.name, entry.value, entry.dist.name) for entry in found] == [("size", "own:main", "own")]


def test_a_finder_that_finds_packages_elsewhere_is_asked(monkeypatch):
    class Finder:
        asked = False

        def find_distributions(self, context=None):
            Finder.asked = True
            return []

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    assert entry_points(GROUP) == () and Finder.asked


def test_help_without_such_packages_imports_little():
    """`thinwire --help` once took twice as long, for the import and the search of `importlib.metadata`."""
    slow = {"importlib.metadata", "inspect", "traceback", "argparse", "jsonargparse", "yaml", "torch", "numpy", "rich"}
    code = (
        "import sys; before = set(sys.modules); from thinwire.launch.cli import main; main(['--help']); "
        f"sys.exit(str({slow!r} & (set(sys.modules) - before)) if {slow!r} & (set(sys.modules) - before) else 0)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
