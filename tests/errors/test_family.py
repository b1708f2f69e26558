"""One family of errors: one root, the mistakes of one message, and how several are gathered."""

import pickle
import pkgutil
import re
from importlib import import_module

import pytest

import thinwire.errors
from thinwire.compress import CodecError
from thinwire.errors import ThinwireError, attempt
from thinwire.models.errors import ModelError
from thinwire.pipeline.errors import OptionsError

PACKAGES = ["thinwire.compress", "thinwire.models", "thinwire.pipeline", "thinwire.launch"]


def classes():
    """Every class of an error in the packages, by name; a warning is no error."""
    for package in PACKAGES:
        for module in pkgutil.walk_packages(import_module(package).__path__, f"{package}."):
            import_module(module.name)
    found, todo = {}, [Exception]
    while todo:
        kind = todo.pop()
        found |= {kind.__name__: kind} if kind.__module__.startswith("thinwire.") else {}
        todo += [below for below in kind.__subclasses__() if below is not Warning]
    return found


def test_every_error_of_the_packages_is_drawn_under_the_root():
    found = classes()
    assert all(issubclass(kind, ThinwireError) for kind in found.values())
    rows = re.findall(r"^([│├└─ ]*)(\w+Error)\b", thinwire.errors.__doc__, re.MULTILINE)
    drawn = {name: indent for indent, name in rows}
    assert set(drawn) == set(found)
    for name, kind in found.items():
        depth = len([base for base in kind.__mro__ if issubclass(base, ThinwireError)]) - 1
        assert len(drawn[name]) == 4 * depth, f"{name} stands at another depth than it is drawn at"


def test_a_message_holds_every_mistake_once():
    error = OptionsError(["first", "second", "first"])
    assert error.mistakes == ("first", "second")
    assert str(error) == "first\nsecond"
    assert ThinwireError("only one").mistakes == ("only one",)
    assert pickle.loads(pickle.dumps(error)).mistakes == error.mistakes


def test_rules_that_do_not_hold_are_told_together():
    CodecError.require((True, "unsaid"))
    with pytest.raises(CodecError) as caught:
        CodecError.require((False, "first"), (True, "unsaid"), (False, "second"))
    assert caught.value.mistakes == ("first", "second")


def test_parts_that_fail_are_told_together():
    def fail(kind, *mistakes):
        raise kind(mistakes)

    assert attempt(lambda: 1, lambda: "two") == [1, "two"]
    with pytest.raises(ModelError) as caught:
        attempt(lambda: fail(ModelError, "a", "b"), lambda: 2, lambda: fail(OptionsError, "c", "a"))
    assert caught.value.mistakes == ("a", "b", "c")
    assert str(caught.value) == "a; b; c", "a line of its own is for options"


def test_an_error_of_ours_is_not_gathered():
    with pytest.raises(ZeroDivisionError):
        attempt(lambda: 1 / 0)
