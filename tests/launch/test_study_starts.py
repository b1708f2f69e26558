"""Rows that start with the weights of another row."""

import json
from pathlib import Path

import pytest

from support.commands import THINWIRE, completed
from support.tiny_run import write_recipe
from thinwire.launch import cli
from thinwire.launch.study.cells import asked_of, cells_of, find, is_finished
from thinwire.launch.study.command import _chosen
from thinwire.launch.study.definition import Scale, parse_study
from thinwire.launch.study.engine import Job, ready, run_jobs
from thinwire.launch.study.report import missing_cells
from thinwire.pipeline.errors import OptionsError

STUDY = """
recipe: tiny.yaml
options: {training.steps: 2, training.evaluate_every: 2 steps}
rows:
  first: {options: {codec: none/none}}
  second: {options: {codec: topk(0.1)/none, optimizer.lr: 0}, starts_with: first}
claims:
  - claim: TopK takes something.
    of: {row: second}
    minus: {row: second, mode: off}
    above: 0
"""


def mistakes(text):
    with pytest.raises(OptionsError) as caught:
        parse_study(text, "mine.yaml", "mine")
    return "\n".join(caught.value.mistakes)


def test_a_row_starts_with_one_that_stands_above_it():
    told = mistakes(STUDY.replace("starts_with: first", "starts_with: second"))
    assert "rows.second.starts_with must name a row above it, got 'second'; known: first" in told
    told = mistakes(STUDY + "scales: {short: {rows: [second]}}")
    assert "scales.short.rows must hold 'first' too, because 'second' starts with its weights" in told


def cells():
    return cells_of(parse_study(STUDY, "s", "s"), Scale(), Path("f"))


def job(cell, status):
    return Job(cell, {}, 2, 1, "begins", status=status)


def test_a_row_waits_for_the_weights_that_it_starts_with():
    first, second = (job(cell, "waits") for cell in cells())
    assert second.cell.base == first.cell.folder
    assert second.cell.starting("w")[-2:] == ("--model.weights", "w")
    assert ready([second, first], [first, second]) == [first]
    first.status = "runs"
    assert ready([second], [first, second]) == []
    first.status = "finished"
    assert ready([second], [first, second]) == [second]
    first.status = "failed"
    assert ready([second], [first, second]) == []
    assert second.status == "failed" and "which failed" in second.trouble


def test_a_cell_whose_folder_cannot_be_written_fails_and_those_that_need_it_too(tmp_path, capsys):
    study = parse_study(STUDY, "s", "s")
    first, second = (job(cell, "waits") for cell in cells_of(study, Scale(), tmp_path))
    (tmp_path / "cells").write_text("a file where a folder should be")
    run_jobs([first, second], 1, study, came=[])
    told = capsys.readouterr().out
    assert "first, seed 0 failed after 0.0 s: " in told and "cannot be written: " in told
    assert f"it starts with the weights of {first.cell.folder}, which failed" in told


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"steps": 2}', '{"running": false}'])
def test_a_damaged_summary_is_that_of_an_unfinished_cell(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    study = parse_study(STUDY, "s", "s")
    first, second = cells_of(study, Scale(), tmp_path)
    for name in ("cell.json", "summary.json"):
        first.folder.mkdir(parents=True, exist_ok=True)
        (first.folder / name).write_text(text)
    assert not is_finished(first.folder)
    assert [*missing_cells([first, second])] == [first, second]


def test_a_chosen_row_brings_the_row_that_it_starts_with():
    assert [cell.row for cell in _chosen(cells(), ["second"])] == ["first", "second"]
    assert [cell.row for cell in _chosen(cells(), ["first"])] == ["first"]


def test_a_report_takes_no_cell_whose_first_weights_are_others_now_and_the_study_runs_it_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    study = parse_study(STUDY, "s", "s")
    first, second = cells_of(study, Scale(), tmp_path)
    origins = asked_of([first, second])
    for cell, origin in zip((first, second), origins, strict=True):
        cell.folder.mkdir(parents=True)
        made = {"origin": origin, "base": "old" if cell.base else None}
        (cell.folder / "cell.json").write_text(json.dumps(made))
    (first.folder / "summary.json").write_text('{"running": true, "planned_steps": 2, "weights_digest": "new"}')
    missing = missing_cells([first, second])
    now = "these have changed: the weights that it starts with; run it again"
    assert missing[second] == now
    found = find(second, origins[1])
    assert found == ("begins anew", ["the weights that it starts with"])


def test_an_option_of_the_command_line_is_for_all_rows_but_those_that_set_it_themselves():
    given = ["--optimizer.lr", "0.5", "--data.limit=7"]
    first, second = cells_of(parse_study(STUDY, "s", "s"), Scale(), Path("f"), given)

    def last(cell, name):
        return [value for word, value in zip(cell.arguments, cell.arguments[1:], strict=False) if word == name][-1]

    assert last(first, "--optimizer.lr") == "0.5" and last(second, "--optimizer.lr") == "0"
    assert "--data.limit=7" in first.arguments and "--data.limit=7" in second.arguments


@pytest.mark.slow
@pytest.mark.processes
def test_a_study_starts_a_row_with_the_weights_of_another(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    (tmp_path / "mine.yaml").write_text(STUDY)
    ran = completed([*THINWIRE, "study", "mine.yaml", "--jobs", "2"], tmp_path, timeout=600)
    assert ran.status == 0, ran.stderr
    folder = tmp_path / "studies/mine/all"
    first, second = (
        json.loads((folder / f"cells/{row}/seed-0/summary.json").read_text()) for row in ("first", "second")
    )
    # the second does not learn, so it ends with the weights of the first
    assert first["weights_digest"] == second["weights_digest"]
    report = json.loads((folder / "report.json").read_text())
    assert report["claims"][0]["difference"] is not None
    # another first row makes the second another one, too
    capsys.readouterr()
    (tmp_path / "mine.yaml").write_text(STUDY.replace("first: {options: {", "first: {options: {optimizer.lr: 0.1, "))
    assert cli.main(["study", "mine.yaml", "--check"]) == 0
    told = capsys.readouterr().out
    assert "second, seed 0 begins anew, because these have changed: the weights that it starts with" in told
    for name in ("--codec", "--compression.activations"):
        assert cli.main(["study", "mine.yaml", "--check", name, "none"]) == 2
        assert f"{name} must be left out: every row to train sets it itself" in capsys.readouterr().err
