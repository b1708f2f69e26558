"""Tests of `thinwire.errors.imports`: what is wrong with a module of the user's own."""

import pytest

from thinwire.errors import ThinwireError
from thinwire.errors.imports import find


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder of the user's own files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("steep", "\nspec = int(base=2)\n", "TypeError: int() missing string argument (line 2 of steep.py)"),
        (
            "needing",
            "import no_such_thing\n",
            "ModuleNotFoundError: No module named 'no_such_thing' (line 1 of needing.py)",
        ),
        ("unclosed", "spec = (\n", "SyntaxError: '(' was never closed (unclosed.py, line 1)"),
    ],
)
def test_a_module_that_fails_is_named_with_the_line_and_not_as_one_that_was_not_found(folder, name, text, said):
    (folder / f"{name}.py").write_text(text)
    with pytest.raises(ThinwireError) as error:
        find(f"{name}:spec", ThinwireError, "model.name")
    assert str(error.value) == f"model.name: module {name} of '{name}:spec' cannot be imported: {said}"


def test_a_module_that_is_not_found_is_answered_with_the_folder(folder):
    with pytest.raises(ThinwireError) as error:
        find("no_such_module.inner:spec", ThinwireError, "pipeline.schedule")
    assert str(error.value) == (
        "pipeline.schedule: module no_such_module.inner of 'no_such_module.inner:spec' cannot be imported, "
        f"from {folder} either: "
        "ModuleNotFoundError: No module named 'no_such_module'"
    )
