"""What a report says of cells that cannot be compared: other data, other code, options of another command line."""

from pathlib import Path

from thinwire.launch.study.cells import cells_of
from thinwire.launch.study.definition import Scale, parse_study
from thinwire.launch.study.report import circumstances

STUDY = parse_study(
    """
recipe: tiny.yaml
seeds: [0, 1]
rows:
  first: {options: {codec: none}}
  none: {options: {codec: none, optimizer.lr: 0.1}, starts_with: first}
  two bits: {options: {codec: q(2), training.steps: 5}, starts_with: first}
""",
    "study.yaml",
    "s",
)


def said(by_row, given=lambda cell: ()):
    """What is said of two cells of each row, whose origins have these values beside common ones, run with options."""
    made = {}
    for cell in cells_of(STUDY, Scale(), Path("f")):
        origin = {
            "code": "c",
            "data": ["a", None],
            "training.seed": cell.seed,
            "optimizer.lr": 0.2,
            "model.weights": "w",
        }
        origin |= by_row(cell)
        made[cell] = {"origin": origin, "torch": "2.14", "given": given(cell)}
    return circumstances(STUDY.rows, made, 3.0)


def same(cell):
    return {}


def test_what_rows_and_seeds_set_may_differ():
    """So may what changes no number, and the order in which it was typed."""

    def given(cell):
        limit, lr = ["--data.limit=9"], [] if cell.row == "none" else ["--optimizer.lr", "0.3"]
        return [*(limit + lr if cell.seed else lr + limit), "--save_every", str(cell.seed)]

    assert said(same, given) == ["The finished cells took 3.0 hours, on torch 2.14."]


def test_options_of_another_command_line_are_told():
    def given(cell):
        return ["--optimizer.lr", "0.3"] if (cell.row, cell.seed) == ("first", 1) else []

    assert said(same, given)[1:] == [
        "The cells were run with unlike options of the command line, so do not compare their scores: optimizer.lr "
        "(0.3, not given)."
    ]


def test_rows_with_the_same_data_are_named_together():
    assert said(lambda cell: {"data": ["b", None]} if cell.row == "first" else {})[1:] == [
        "There are 2 sets of data; compare only rows that have the same: first | none; two bits."
    ]


def test_versions_of_the_code_are_named():
    assert said(lambda cell: {"code": f"c{cell.seed}"})[1:] == ["They were made by 2 versions of the code: c0, c1."]
