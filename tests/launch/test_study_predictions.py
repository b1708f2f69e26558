"""Studies whose cells are predictions: the published numbers, what is predicted beside them, and mistakes in a YAML."""

import json
import re
import runpy
from textwrap import dedent

import pytest

from support.pages import DOCS
from thinwire.launch import cli
from thinwire.launch.bench.links.results import THROUGHPUT
from thinwire.launch.study.definition import parse_study, read_study
from thinwire.launch.study.judge import judge
from thinwire.launch.study.predictions import predicted
from thinwire.launch.study.report import predictions_table
from thinwire.pipeline.errors import OptionsError

STUDY = """
prediction: {num_stages: 2, num_microbatches: 1, forward_ms: 10, backward_ms: 20, shape: [1, 1000]}
score: samples/s
rows:
  slow: {options: {codec: none/none, bandwidth: 1mbit}, published: {on: 5.0}}
  fast: {options: {codec: none/none, bandwidth: 10mbit}, published: {on: 20.0}}
claims:
  - {claim: A faster link helps., of: {row: fast}, over: {row: slow}, above: 1.5}
  - {claim: It helps ten times., of: {row: fast}, over: {row: slow}, above: 10}
"""


def scores(study):
    results = predicted(study, study.all_rows)
    return dict(zip(results["row"], results["on"], strict=True))


def test_one_micro_batch_over_one_link_is_what_a_hand_gives():
    """4 kB and a header of 64 bytes forth and back, and 60 ms of compute."""
    found = scores(parse_study(STUDY, "s", "s"))
    wire = 2 * 8 * (4 * 1000 + 64)
    assert found["slow"] == pytest.approx(1 / (0.06 + wire / 1e6))
    assert found["fast"] == pytest.approx(1 / (0.06 + wire / 1e7))


@pytest.mark.slow
def test_predictions_have_as_many_decimals_as_published_numbers_or_three_digits():
    """Rounded to three digits each, they were padded to three decimals: 131.000 beside 125.0."""

    def column(name):
        study = read_study(name)
        results = predicted(study, study.all_rows)
        return [row[3] for row in predictions_table(study, study.all_rows, results).texts]

    assert {len(text.partition(".")[2]) for text in column("aqsgd-throughput")} == {1}
    figure = column("aqsgd-replicas-throughput")
    assert {len(text.partition(".")[2]) for text in figure} == {1} and max(map(len, figure)) == len("17.8")


@pytest.mark.slow
def test_the_published_numbers_are_met_where_the_simulation_claims_to():
    """Frames to 7 %; no published speed is above the limit; the bench has the same published speeds."""
    study = read_study("aqsgd-throughput")
    found = scores(study)
    speeds = {name: row for name, row in study.all_rows.items() if not row.score.startswith("ms")}
    frames = {name: row for name, row in study.all_rows.items() if name not in speeds}
    assert len(frames) == 8 and all(abs(found[name] / row.published["on"] - 1) < 0.07 for name, row in frames.items())
    assert all(found[name] > row.published["on"] for name, row in speeds.items())
    table = [speed for row in THROUGHPUT.values() for speed in row.values()]
    assert [row.published["on"] for row in speeds.values()] == table


@pytest.mark.slow
def test_the_study_of_replicas_has_the_numbers_of_figure_5c():
    script = runpy.run_path(str(DOCS / "measured/figure5c.py"))
    names = {1e10: "10 Gbps", 1e9: "1 Gbps"}
    expected = {
        f"{name}, {names.get(bandwidth, f'{bandwidth / 1e6:g} Mbps')}": pytest.approx(one.samples_per_second)
        for (bandwidth, name), one in script["speeds"]().items()
    }
    assert scores(read_study("aqsgd-replicas-throughput")) == expected


@pytest.mark.slow
def test_the_report_among_the_docs_is_what_the_command_writes(tmp_path):
    name = "aqsgd-throughput"
    assert cli.main(["study", "report", name, "--out", str(tmp_path)]) == 0
    assert (DOCS / f"studies/{name}.md").read_text() == (tmp_path / "report.md").read_text()


def test_the_study_on_the_page_predicts():
    page = (DOCS / "how-to/studies.md").read_text()
    blocks = [dedent(block) for block in re.findall(r"(?:^    .*\n)+", page, re.MULTILINE)]
    [study] = (parse_study(block, "page", "page") for block in blocks if block.startswith("prediction: "))
    found = scores(study)
    assert 4 < found["fw4 bw8"] / found["fp32"] < 5
    assert found["a frame"] == pytest.approx(65.5, abs=0.5)


@pytest.mark.slow
def test_a_report_has_deviations_and_judges_without_a_spread(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(STUDY)
    assert cli.main(["study", "mine.yaml"]) == 0
    assert "report.md and report.json are in studies/mine/all" in capsys.readouterr().out
    report = json.loads((tmp_path / "studies/mine/all/report.json").read_text())
    assert report["tables"][0]["rows"][0] == ["slow", "samples/s", 5.0, 8.0, 60.0]
    assert report["verdicts"] == {"holds": 1, "does not hold": 1}
    assert [claim["published"] for claim in report["claims"]] == [4.0, 4.0]
    before = (tmp_path / "studies/mine/all/report.md").read_text()
    assert "Nothing was trained or measured here" in before
    assert cli.main(["study", "report", "mine.yaml", "--out", "again"]) == 0
    assert (tmp_path / "again/report.md").read_text() == before


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("codec: none/none, bandwidth: 1mbit", "codec: none/none", "rows.slow: options: bandwidth is missing"),
        ("bandwidth: 1mbit", "bandwidth: 0", "rows.slow: options: bandwidth must be text, got 0"),
        ("bandwidth: 1mbit", "bandwidth: fast", "bandwidth must be "),
        ("codec: none/none, bandwidth: 1mbit", "codec: q(11)/none, bandwidth: 1mbit", "rows.slow: --codec q(11)/none"),
        ("score: samples/s", "score: accuracy", "score must be one of samples/s, ms an activation, ms a gradient"),
        ("shape: [1, 1000]", "shape: [1, 1000], replicas: 2", "prediction.weights must have the number of weights of"),
        ("num_stages: 2", "num_stages: 1", "prediction.num_stages must be at least 2"),
        ("shape: [1, 1000]", "shape: [1, 1000], schedule: never", "pipeline.schedule must be one of gpipe"),
        (
            "forward_ms: 10",
            "forward_ms: -1",
            "prediction.forward_ms and backward_ms must be above 0 and finite, got -1.0 and 20.0",
        ),
        ("forward_ms: 10", "forward_ms: .inf", "backward_ms must be above 0 and finite, got inf and 20.0"),
        ("microbatches: 1,", "microbatches: 9000000,", "num_stages times num_microbatches must be at most 100,000"),
        (
            "shape: [1, 1000]",
            "shape: [99999999999, 99999999999]",
            "samples first, of at most 1,000,000,000,000 elements",
        ),
        ("shape: [1, 1000]", "shape: [0, 1000]", "prediction.shape must be that of a stage's output"),
        ("shape: [1, 1000]", "shape: [1, 1000], replicas: 0", "prediction.replicas must be at least 1, got 0"),
        ("claims:", "scales: {small: {options: {latency: 9ms}}}\nclaims:", "scales.small.options must be left out"),
        ("of: {row: fast}", "of: {row: fast, mode: off}", "claims.0.of.mode off must be left out of predictions"),
        ("published: {on: 5.0}", "published: {off: 5.0}", "rows.slow.published.off must be left out of predictions"),
    ],
)
def test_a_mistake_is_a_sentence(old, new, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(STUDY.replace(old, new, 1))
    assert cli.main(["study", "mine.yaml"]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_a_study_either_trains_or_predicts(tmp_path, monkeypatch, capsys):
    with pytest.raises(OptionsError, match="one of recipe and prediction must say what the cells are"):
        parse_study(f"{STUDY}\nrecipe: quickstart", "mine.yaml", "mine")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(STUDY)
    for options in (["--training.steps", "3"], ["--row", "fast"], ["--jobs", "2"]):
        assert cli.main(["study", "mine.yaml", *options]) == 2
        assert f"predicts and trains nothing; leave out {options[0]}" in capsys.readouterr().err
    with pytest.raises(OptionsError, match=r"rows\.one\.score must be left out, because trained cells have all scores"):
        parse_study("recipe: quickstart\nrows: {one: {score: samples/s}}", "mine.yaml", "mine")


@pytest.mark.slow
def test_nothing_is_divided_by_a_published_0(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(STUDY.replace("on: 5.0", "on: 0"))
    assert cli.main(["study", "mine.yaml"]) == 0
    report = json.loads((tmp_path / "studies/mine/all/report.json").read_text())
    assert report["tables"][0]["rows"][0] == ["slow", "samples/s", 0.0, 8.0, None]
    assert [claim["published"] for claim in report["claims"]] == [None, None]


def test_a_ratio_to_0_is_no_score():
    study = parse_study(STUDY, "s", "s")
    results = predicted(study, study.all_rows)
    results.loc[results["row"] == "slow", "on"] = 0.0
    judged = judge(study.claims[0], results, study.all_rows, exact=True)
    assert (judged.verdict, judged.seeds, judged.mean) == ("cannot tell", (), None)
