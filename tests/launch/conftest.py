import pytest

from support import known_models
from support.forked import fork_interpreters, nursery
from support.tiny_run import write_recipe
from thinwire.launch.run.parts import results


@pytest.fixture(autouse=True, scope="session")
def no_pictures():
    """Runs within the tests' process draw no loss curve, which takes a third of a short run; new interpreters do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "save_picture", lambda path, *_: path.touch())
        yield


@pytest.fixture(autouse=True, scope="session")
def each_model_once():
    """Runs within the tests' process look once at each model before they start, as commands do in forks."""
    known_models.remember()


@pytest.fixture(autouse=True, scope="session")
def forked_interpreters():
    """What a command within the tests' process starts as a new interpreter is a fork, as in commands of their own."""
    fork_interpreters(nursery)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the recipe `tiny.yaml`, where the test is."""
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
