"""A network interface that is not there is answered by a sentence, and what needs no network does not care."""

import os

import pytest

from support.commands import THINWIRE, completed
from thinwire.launch.shared.interfaces import VARIABLE, alone, check_interface
from thinwire.pipeline.errors import OptionsError

TINY = ["gpt2-tiny", "--data.limit", "5000", "--training.steps", "1", "--output", "run"]


def test_what_runs_alone_needs_no_interface(monkeypatch):
    monkeypatch.setenv(VARIABLE, "nosuch0")
    with alone():
        assert os.environ[VARIABLE] == "lo"
    assert os.environ[VARIABLE] == "nosuch0"
    monkeypatch.delenv(VARIABLE)
    with alone():
        pass
    assert VARIABLE not in os.environ


def test_the_sentence_names_those_of_this_host(monkeypatch):
    for usable in ("lo", "lo,lo", "lo,", "lo:1", "x", ""):  # torch ignores a single letter
        monkeypatch.setenv(VARIABLE, usable)
        check_interface()
    monkeypatch.setenv(VARIABLE, "lo,nosuch0")
    with pytest.raises(OptionsError, match=r"of this host with an address, .*lo.*; got lo,nosuch0$"):
        check_interface()


@pytest.mark.processes
def test_a_training_on_an_interface_that_is_not_there_says_so_once(tmp_path):
    end = completed([*THINWIRE, "train", *TINY], tmp_path, **{VARIABLE: "nosuch0"})
    assert end.status == 2
    assert end.stderr.count("GLOO_SOCKET_IFNAME must name") == 1 and "Traceback" not in end.stderr
    assert not (tmp_path / "run").exists()
