"""Layers of one's own are timed before training, and a cut that is far from even is spoken of."""

from types import SimpleNamespace

import pytest

from support.tiny_run import write_recipe
from thinwire.launch import cli
from thinwire.launch.run.notes import advice
from thinwire.models import costs

MODEL = """
from time import sleep
from torch import nn

class Slow(nn.Module):
    "Takes time that no count of operations sees."
    def __init__(self, width, seconds):
        super().__init__()
        self.linear, self.seconds = nn.Linear(width, width), seconds
    def forward(self, x):
        sleep(self.seconds)
        return x + self.linear(x)

def uneven(width=16):
    seconds = [0.0, 0.02, 0.02, 0.0, 0.0, 0.0]
    return nn.Sequential(nn.Embedding(256, width), *(Slow(width, one) for one in seconds), nn.Linear(width, 256))
"""
LAYERS = ["--model.name", "uneven_model:uneven", "--model.config", "{}", "--training.steps", "1"]


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ([[0.05, 0.03], [0.03]], None),
        ([[0.03, 0.03, 0.03, 0.03], [0.001]], "'[2, 3]'"),
        ([[3e-4] * 3, [1e-6]], None),
        ([[], [0.9]], None),
    ],
)
def test_it_speaks_where_another_cut_would_be_much_faster(times, said):
    told = advice(times)
    assert told is None if said is None else told.endswith(f"to use the best cut: --pipeline.layers {said}")


@pytest.mark.slow
def test_the_user_gets_the_line_before_training_and_the_line_mends_it(tmp_path, monkeypatch, capsys):
    """An uneven cut of one's own layers showed only when the run had ended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    write_recipe(tmp_path)
    (tmp_path / "uneven_model.py").write_text(MODEL)
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(costs, "time", clock)
    monkeypatch.setattr("uneven_model.sleep", lambda seconds: setattr(clock, "now", clock.now + seconds))
    assert cli.main(["simulate", "tiny.yaml", *LAYERS, "--output", "counted"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "to use the best cut" in line]
    assert line.startswith("stage 0 (layers 0 to ")
    option, layers = line.partition("to use the best cut: ")[2].replace("'", "").split(maxsplit=1)
    assert cli.main(["simulate", "tiny.yaml", *LAYERS, option, layers, "--output", "even"]) == 0
    assert "to use the best cut" not in capsys.readouterr().out
