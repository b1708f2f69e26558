import pytest

from support.tiny_run import write_recipe


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the recipe `tiny.yaml`, where the test is."""
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
