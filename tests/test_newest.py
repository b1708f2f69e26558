"""What `make test-newest` says of the releases of torch that setup.cfg allows."""

import pytest

from support import newest as module
from support.newest import cap, check, listed, news, release, unseen
from support.pages import ROOT

ANSWER = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.14.1, 2.13.0+cpu, 1.13.1\n  INSTALLED: 2.14.1\n"


def test_the_cap_is_a_minor_release():
    """A cap such as <3 would allow releases that no test can have seen."""
    assert len(cap((ROOT / "setup.cfg").read_text())) == 2


def test_the_answer_of_pip_is_read():
    assert listed(ANSWER) == [(2, 15, 0), (2, 14, 1), (2, 13, 0), (1, 13, 1)]
    assert listed("") == []
    assert release("2.15.1+cu130") == (2, 15, 1)


@pytest.mark.parametrize(("below", "newest"), [((2, 16), (2, 15, 0)), ((2, 16), (2, 15, 3)), ((3, 1), (3, 0, 0))])
def test_a_cap_right_above_the_newest_is_well(below, newest):
    assert unseen(below, newest) == ""


@pytest.mark.parametrize("below", [(2, 17), (2, 15), (3,), (3, 0)])
def test_a_cap_further_up_is_a_mistake(below):
    said = unseen(below, (2, 15, 0))
    got = f"torch<{'.'.join(map(str, below))}"
    assert said == (
        f"setup.cfg may allow only releases of torch that tests ran on, got {got}, and the newest below it that pip "
        f"finds is 2.15.0; write torch<2.16, or let pip find a newer one"
    )


def test_a_newer_torch_is_only_news():
    assert news((2, 16), listed(ANSWER)) == ""
    said = "torch 2.15.0 is out, which setup.cfg does not allow: raise its cap and run make test-newest."
    assert news((2, 15), listed(ANSWER)) == said


def test_a_release_that_was_asked_for_may_be_an_older_one(monkeypatch, capsys):
    monkeypatch.setattr(module, "installed", lambda: (2, 11, 0))
    check("2.11.0+cpu")
    assert capsys.readouterr().out == "The tests run on torch 2.11.0.\n"
    with pytest.raises(SystemExit, match=r"the newest below it that pip finds is 2\.11\.0"):
        check()
    with pytest.raises(AssertionError, match=r"to install torch 2\.12\.1, and installed 2\.11\.0"):
        check("2.12.1")
