"""JSON that any program reads, also of a run whose numbers are none."""

import json
import math

import pytest

from support.recipe_runs import simulate
from support.tiny_run import write_recipe
from thinwire.launch import cli
from thinwire.launch.shared.strict_json import dumps


def read(text):
    """The values of strict JSON; AssertionError where there is NaN or infinity."""

    def refuse(name):
        raise AssertionError(f"JSON has no {name}")

    return json.loads(text, parse_constant=refuse)


def test_what_json_lacks_is_null():
    value = {"norm": math.inf, "losses": [math.nan, 1.5, -math.inf], "inside": {"of": (math.nan, "nan", 2)}}
    assert read(dumps(value)) == {"norm": None, "losses": [None, 1.5, None], "inside": {"of": [None, "nan", 2]}}


@pytest.mark.slow
def test_a_run_that_diverges_leaves_and_answers_strict_json(tmp_path, monkeypatch, capsys):
    """`thinwire eval --json` printed NaN."""
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    diverging = ["--optimizer.lr", "1e30", "--optimizer.max_grad_norm", "1", "--wire.nonfinite", "send"]
    run = simulate("tiny.yaml", tmp_path / "run", *diverging)
    lines = [read(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] is None and lines[-1]["grad_norm"] is None
    for path in [run / "summary.json", *run.glob("evaluations.jsonl")]:
        read(path.read_text())
    # after its first step the weights are numbers still, and the loss is none
    once = simulate("tiny.yaml", tmp_path / "once", *diverging, "--training.steps", "1")
    capsys.readouterr()
    assert cli.main(["eval", str(once), "--json"]) == 0
    [table] = read(capsys.readouterr().out)["tables"]
    assert None in table["rows"][0]
