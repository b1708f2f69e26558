"""The report of runs that a user made, read as text and opened in Chromium."""

import json
import math
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from pandas import Series

from support.tiny_run import SMALL
from thinwire.launch import cli
from thinwire.launch.comparison.page import render
from thinwire.launch.comparison.plots import ROLES, STAND_INS, running_mean
from thinwire.launch.comparison.runs import read

RECIPE = f"""
description: As small as can be.
{SMALL}
compression: {{activations: q(4), gradients: "q(8, round='stochastic')"}}
training: {{steps: 4, evaluate_every: 2 steps}}
"""
OF_REPLICAS = {
    "timed": "replica 0",
    "replicas": [
        {
            **{"stage": 0, "channel": "parts", "codec": "ef(q(4))", "frames": 6, "bytes": 1_250_000},
            **{"uncompressed": 9_920_000, "bits_per_element": 4.03},
        }
    ],
}
CHROMIUM = next(filter(None, map(shutil.which, ("google-chrome", "chromium", "chromium-browser"))), None)
PROFILE_IN_USE = 21
"""Chromium's status when it takes its own start for another one's, as it does now and then on a busy machine."""
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on the PATH")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with two runs, `tiny` and `other`."""
    made = tmp_path_factory.mktemp("report")
    (made / "tiny.yaml").write_text(RECIPE)
    (made / "text").write_bytes(b"some words, many times; " * 83 + b"the end.")
    before = Path.cwd()
    os.chdir(made)
    try:
        assert cli.main(["simulate", "tiny.yaml", "--output", "tiny"]) == 0
        shutil.copytree("tiny", "other")
        summary = json.loads(Path("other/summary.json").read_text())
        other = {**summary, "name": "other & <co>", **OF_REPLICAS}
        for stage in other["stages"]:
            stage["exchange"] = {"encode": 1.5, "wire": 2.5, "other": 1.0}
        Path("other/summary.json").write_text(json.dumps(other))
        assert cli.main(["report", "tiny", "other"]) == 0
    finally:
        os.chdir(before)
    return made


@pytest.fixture(scope="module")
def source(folder):
    return (folder / "report.html").read_text()


class Page(HTMLParser):
    """What a page consists of: text by element, and attributes by element."""

    def __init__(self, text):
        super().__init__()
        self.text, self.elements, self.rows, self._open = {}, [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag == "tr":
            self.rows.append([])
        if tag not in ("meta", "br", "link", "path", "use"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data):
        if data.strip():
            self.text.setdefault(self._open[-1] if self._open else "", []).append(data.strip())
            if self._open[-1:] in (["th"], ["td"]):
                self.rows[-1].append(data.strip())

    def count(self, tag):
        return sum(found == tag for found, _ in self.elements)


def chromium(*arguments, cwd):
    """What headless Chromium writes."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking"]
    for attempt in range(3):
        command = [CHROMIUM, *options, f"--user-data-dir={cwd / f'chromium-{attempt}'}", *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if ended.returncode != PROFILE_IN_USE:
            break
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def expect_content(page, folder):
    """What the page must say of the runs in `folder`."""
    summary = json.loads((folder / "tiny" / "summary.json").read_text())
    assert page.text["h1"] == ["tiny, other & <co>"]
    assert page.text["h2"] == ["What compression cost", "tiny", "other & <co>"]
    assert page.count("svg") == len(("over steps", "bytes", "time", "tiny", "other"))
    for mode in ("on", "off"):
        assert f"{summary['held_out'][mode]['loss']:,.4f}" in page.text["dd"]
    assert 'q(8, round="stochastic")' in page.text["td"]
    assert ["0", "to all replicas", "1.25", "9.92", "7.94", "4.03"] in page.rows
    assert ["0", "5.0 s", "1.5 s 30%", "0.0 s 0%", "2.5 s 50%", "1.0 s 20%"] in page.rows
    assert {"stage 0", "stage 1"} <= set(page.text["span"])
    assert any("num_microbatches: 2" in text for text in page.text["code"])
    assert summary["weights_digest"] in page.text["code"]


@pytest.mark.slow
def test_the_page_says_what_the_runs_were(source, folder):
    expect_content(Page(source), folder)


def test_nothing_leaves_the_page(source):
    page = Page(source)
    reaching_out = {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert not reaching_out & {tag for tag, _ in page.elements}
    links = [
        value
        for _, attributes in page.elements
        for name, value in attributes.items()
        if name in ("src", "srcset", "href", "xlink:href", "data", "action", "poster", "background")
    ]
    assert links and all(link.startswith("#") for link in links), links
    assert set(re.findall(r"url\((.)", source)) == {"#"}
    assert "@import" not in source and "//" not in re.sub(r"<pre>.*?</pre>", "", source, flags=re.DOTALL)
    (policy,) = [part["content"] for _, part in page.elements if part.get("http-equiv") == "Content-Security-Policy"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_every_link_and_reference_has_its_aim_and_no_two_things_one_name(source):
    page = Page(source)
    names = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(names) == len(set(names))
    aims = set(re.findall(r"url\(#([^)]*)\)", source)) | set(re.findall(r'href="#([^"]*)"', source))
    assert aims <= set(names)


def test_pictures_have_titles_and_only_colours_of_the_page(source):
    assert not [stand_in for stand_in in STAND_INS.values() if stand_in in source]
    assert set(re.findall(r"var\(--([a-z0-9-]+)\)", source)) <= set(re.findall(r"--([a-z0-9-]+):", source))
    for role in ROLES:
        assert source.count(f"--{role}:") == 2, f"{role} needs a colour in the light and one in the dark"
    assert [text for text in Page(source).text["title"] if text.startswith("Loss of tiny")]


@pytest.mark.slow
@needs_chromium
def test_chromium_shows_it(source, folder, tmp_path):
    dom = chromium("--dump-dom", (folder / "report.html").as_uri(), cwd=tmp_path)
    expect_content(Page(dom), folder)


@pytest.mark.slow
def test_runs_of_one_name_have_sections_of_their_own(folder, tmp_path):
    """All sections of a report on three runs of one recipe had the same heading."""
    places = [folder / "tiny", tmp_path / "again"]
    shutil.copytree(*places)
    assert Page(render(read(places))).text["h2"] == [str(place) for place in places]


def test_one_run_alone_is_compared_with_nothing(folder):
    page = Page(render(read([folder / "tiny"])))
    assert page.text["h1"] == page.text["h2"] == ["tiny"]
    assert page.count("nav") == 0


def test_drawing_is_told_on_a_terminal(folder, tmp_path, monkeypatch, capsys):
    """A page of several runs takes seconds."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert cli.main(["report", str(folder / "tiny"), "--out", str(tmp_path / "report.html")]) == 0
    assert capsys.readouterr().out.startswith("drawing the page ...\n")


def test_everything_that_cannot_be_read_is_told_at_once(folder, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "tables.json").write_text("{}")
    shutil.copytree(folder / "tiny", tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text("{\n{}\n")
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "recipe.yaml").touch()
    names = ["empty", "killed", "tables.json", "none", "run"]
    out = tmp_path / "report.html"
    assert cli.main(["report", *(str(tmp_path / name) for name in names), "--out", str(out)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.removeprefix(f"{tmp_path}/").split(":")[0] for line in lines] == [
        "empty must be the folder of a run, but has no summary.json",
        "killed must be a run with a summary, written at its first save or its end; if it has a checkpoint, thinwire "
        f"train --resume {tmp_path}/killed goes on",
        "tables.json must be the folder of a run, but has no summary.json",
        "none must be the folder of a run, but does not exist",
        "run/metrics.jsonl cannot be read",
    ]
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.parametrize("end", ['{"step": 4, "lo', "\0" * 40])
def test_a_log_that_a_power_cut_tore_is_read_as_far_as_it_is_whole(folder, tmp_path, capsys, end):
    """A run that goes on takes such a line away, and its report was refused."""
    run, out = shutil.copytree(folder / "tiny", tmp_path / "run"), tmp_path / "report.html"
    with (run / "metrics.jsonl").open("a") as file:
        file.write(end)
    [whole], [found] = read([folder / "tiny"]), read([run])
    assert found.steps == whole.steps
    assert cli.main(["report", str(run), "--out", str(out)]) == 0
    said = f"{run}/metrics.jsonl ends in a line that is not whole, as after a power cut; it is left out"
    assert capsys.readouterr().out.splitlines()[-2] == said
    assert said in out.read_text()


def test_a_summary_that_lacks_what_is_shown_is_no_run(folder, tmp_path):
    run = shutil.copytree(folder / "tiny", tmp_path / "run")
    (run / "summary.json").write_text('{"name": "x", "title": "t", "tables": []}')
    with pytest.raises(ValueError, match="is not the summary of a run: it has no steps, seconds, training_seconds"):
        read([run])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("summary.json", "[]", "summary.json cannot be read: it holds no JSON object but list; copy it again"),
        ("summary.json", "{", "summary.json cannot be read: "),
        ("recipe.yaml", "[1]", "recipe.yaml must hold the fields of a recipe"),
        ("recipe.yaml", "a: [", "recipe.yaml is not valid YAML: "),
        ("recipe.yaml", "a: 1", "recipe.yaml must hold the fields of a recipe"),
    ],
)
def test_a_damaged_file_of_a_run_is_a_sentence(folder, tmp_path, capsys, name, text, said):
    """Each was a traceback."""
    run = shutil.copytree(folder / "tiny", tmp_path / "run")
    (run / name).write_text(text)
    assert cli.main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 2
    assert capsys.readouterr().err.startswith(f"{run}/{said}")


@pytest.mark.slow
def test_a_loss_that_was_no_number_is_a_gap(folder, tmp_path):
    run = shutil.copytree(folder / "tiny", tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[1]["loss"] = None
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert "<svg" in render(read([run, folder / "other"]))


def test_a_running_mean_leaves_out_what_is_no_number():
    losses = Series([1.0, math.nan, 3.0, 5.0, math.inf])
    assert [*running_mean(losses, 2)] == [1.0, 1.0, 3.0, 4.0, 5.0]
    assert math.isnan(running_mean(Series([math.nan]), 3)[0])
