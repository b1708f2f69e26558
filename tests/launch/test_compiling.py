"""While a process compiles, no other waits for it longer than for a word."""

import pytest

from thinwire.launch.run import compile as module
from thinwire.launch.run.compile import compile_stages
from thinwire.pipeline.errors import PeerError


class Others:
    """Says for three words that somebody else compiles."""

    def __init__(self):
        self.said = []

    def anyone(self, mine):
        self.said.append(mine)
        return mine or len(self.said) < 4


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "EVERY", 0.001)
    monkeypatch.setattr(module.collectives, "anyone", lambda where, mine: where.anyone(mine))


def test_words_go_on_until_the_last_process_has_compiled(monkeypatch):
    others, compiled = Others(), []

    def compile_one(stage, prepared):
        while len(others.said) < 2:  # words are exchanged while this process compiles
            pass
        compiled.append(stage)

    monkeypatch.setattr(module, "_compile", compile_one)
    compile_stages(["a", "b"], None, others)
    assert compiled == ["a", "b"]
    assert others.said[:2] == [True, True] and others.said[-1] is False and len(others.said) >= 4


def test_a_failure_is_told_at_once_and_a_lost_peer_by_the_next_wait(monkeypatch):
    def fail(stage, prepared):
        raise ValueError("no program")

    class Gone:
        def anyone(self, mine):
            raise PeerError("gone")

    monkeypatch.setattr(module, "_compile", fail)
    with pytest.raises(ValueError, match="no program"):
        compile_stages(["a"], None, Gone())
    monkeypatch.setattr(module, "_compile", lambda *_: None)
    compile_stages(["a"], None, Gone())
