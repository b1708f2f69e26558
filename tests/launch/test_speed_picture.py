"""The picture of docs/measured/bench-links.md is drawn from measured numbers: those of the page, through its script."""

import json
import runpy

import pytest
from matplotlib.axes import Axes

from support.pages import DOCS

MEASURED = DOCS / "measured"
SCRIPT = runpy.run_path(str(MEASURED / "speed.py"))
BENCH, STUDY = ((MEASURED / name).read_text() for name in ("bench-links.json", "codecs.json"))


def draw(bench: str) -> tuple[Axes, Axes]:
    """The two halves of the picture: speed and loss."""
    speeds, losses = SCRIPT["draw"](bench, STUDY).axes
    return speeds, losses


@pytest.mark.parametrize(("name", "rows"), [("bench-links", 6 * 8), ("bench-smollm2", 3 * 5)])
def test_the_table_of_the_page_is_that_of_the_picture(name, rows):
    bench = (MEASURED / f"{name}.json").read_text()
    assert len(json.loads(bench)["tables"][0]["rows"]) == rows
    assert SCRIPT["speed_table"](bench) in (MEASURED / "bench-links.md").read_text()


def test_the_bars_of_the_real_model_are_those_of_its_table(monkeypatch):
    monkeypatch.syspath_prepend(MEASURED)
    bench = (MEASURED / "bench-smollm2.json").read_text()
    figure = runpy.run_path(str(MEASURED / "real_speed.py"))["draw"](bench)
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert sorted(heights) == sorted(row[2] for row in json.loads(bench)["tables"][0]["rows"])


def test_the_picture_has_a_line_for_each_contender():
    axes, _ = draw(BENCH)
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines) == [
        *("plain torch, fp32", "Thinwire, uncompressed", "Thinwire, q(4)/q(8)", "Thinwire, q(3)/q(6)"),
        "uncompressed, unshaped link",
    ]
    assert list(lines["Thinwire, q(4)/q(8)"].get_xdata()) == [6.25, 18.51, 31.36, 62.35, 495]
    assert list(lines["Thinwire, q(4)/q(8)"].get_ydata()) == [4.45, 6.17, 5.89, 6.67, 6.28]
    assert list(lines["uncompressed, unshaped link"].get_ydata()) == [7.08, 7.08]


def test_a_bench_without_a_contender_draws_the_others():
    document = json.loads(BENCH)
    speeds = document["tables"][0]
    speeds["rows"] = [row for row in speeds["rows"] if row[1] in ("none", "torch fp32")]
    axes, _ = draw(json.dumps(document))
    assert len(axes.get_lines()) == 2 + 1


@pytest.mark.slow
def test_the_loss_beside_it_is_that_of_the_study():
    _, axes = draw(BENCH)
    scores = json.loads(STUDY)["tables"][0]
    rows = [dict(zip(scores["columns"], row, strict=True)) for row in scores["rows"]]
    points = [line for line in axes.get_lines() if line.get_marker() in ("o", "x") and len(line.get_ydata())]
    drawn = sorted(float(point.get_ydata()[0]) for point in points)
    assert drawn == sorted(row[f"loss {mode}, mean"] for row in rows for mode in ("on", "off"))
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["none", "q(4)/\nq(8)", "q(3)/\nq(6)"]
