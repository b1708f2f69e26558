"""Studies: what a YAML may say, which cells it has, how claims are judged, and two cells from start to report."""

import json
import math
import re
import signal
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest
from pandas import DataFrame

from support.commands import THINWIRE, completed, started
from support.run_files import digest
from support.small_disk import mounted
from support.tiny_run import write_recipe
from thinwire.compress.stores.marks import claim
from thinwire.launch import cli
from thinwire.launch.comparison.runs import RunFiles
from thinwire.launch.folder import policy
from thinwire.launch.folder.policy import mark
from thinwire.launch.recipe.yaml_text import packaged_names
from thinwire.launch.shared.exit_codes import ended
from thinwire.launch.study import engine
from thinwire.launch.study.cells import asked_of, cells_of, find, weights_digest
from thinwire.launch.study.definition import PACKAGED, Claim, Row, Scale, Side, parse_study, read_study
from thinwire.launch.study.engine import Job, progress, run_jobs
from thinwire.launch.study.judge import judge
from thinwire.launch.study.report import claims_table, missing_cells, scores_table
from thinwire.pipeline.errors import OptionsError

STUDY = """
recipe: tiny.yaml
options: {training.steps: 6, training.evaluate_every: 3 steps, checkpoint.every: 2 steps}
rows:
  none: {options: {codec: none/none}, published: {on: 3.0}}
  two bits: {options: {codec: q(2)/q(8)}, published: {on: 3.5}}
claims:
  - {claim: 2 bits cost something., of: {row: two bits}, minus: {row: none}, above: 0}
"""


def results(**scores):
    """Results of rows, a seed for each score."""
    lines = [{"row": row, "seed": seed, "on": on} for row, own in scores.items() for seed, on in enumerate(own)]
    return DataFrame(lines, columns=["row", "seed", "on"])


def run_of(row, seed, on):
    """A finished run, as far as a table reads it."""
    scores = {mode: {"loss": None if math.isnan(on) else on} for mode in ("on", "off")}
    codec = {"none": "none", "two bits": "q(2)"}[row]
    channels = [
        {"channel": channel, "codec": codec, "bytes": 10, "uncompressed": 20, "elements": 10, "rows": 1, "full_rows": 0}
        for channel in ("activations", "gradients")
    ]
    summary = {"held_out": scores, "channels": channels, "steps": 6}
    return RunFiles(Path(row), summary, f"training: {{seed: {int(seed)}}}", [{"samples": 1, "seconds": 1.0}], [])


def made(cell, origin=None, **beside):
    """Write what a cell was made from, as a study does before it starts."""
    cell.folder.mkdir(parents=True, exist_ok=True)
    (cell.folder / "cell.json").write_text(json.dumps({"origin": origin or {}, **beside}))


def test_every_mistake_in_a_study_is_told_at_once():
    text = """
recipes: x
seeds: [0, one]
rows: {a: {options: [], published: {on: high}}}
claims: [{claim: c, minus: {row: a}}]
"""
    with pytest.raises(OptionsError) as caught:
        parse_study(text, "mine.yaml", "mine")
    told = caught.value.mistakes
    assert all(mistake.startswith("mine.yaml: ") for mistake in told)
    expected = (
        "no field recipes",
        "seeds.1 must be a whole number, got one",
        "rows.a.options must be fields with values, such as {name: 4}, got []",
        "rows.a.published.on must be a number, got high",
        "claims.0.of is missing",
    )
    for part in expected:
        assert any(part in mistake for mistake in told), part
    assert len(told) == len(expected)


def test_parts_of_a_study_must_fit_together():
    text = STUDY.replace("minus: {row: none}, above: 0", "minus: {row: nobody}")
    text = text.replace("recipe: tiny.yaml", "") + "seeds: [1, 1]\n"
    text += "scales: {small: {rows: [three bits]}}\n"
    with pytest.raises(OptionsError) as caught:
        parse_study(text, "mine.yaml", "mine")
    told = "\n".join(caught.value.mistakes)
    assert "claims.0.minus must name rows of the study, got 'nobody'; known: none, two bits" in told
    assert "claims.0 must have above or below, but not both" in told
    assert "recipe must name the recipe of all cells; it is missing" in told
    assert "seeds must hold each seed once, got [1, 1]" in told
    assert "scales.small.rows must name rows of the study, got 'three bits'" in told


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "s.yaml must hold the fields of a study, got nothing"),
        ("recipe: t\nseeds: []\nrows: {one: {}}", "s.yaml: seeds must hold at least one seed, got none"),
        ("recipe: t\nrows: {' ': {}}", "s.yaml: rows must have names of some letters, got ' '"),
        (
            "recipe: t\nrows: {one: {options: {--codec: none}}}",
            "s.yaml: rows.one.options must name options without dashes, got --codec; write codec",
        ),
    ],
)
def test_a_likely_mistake_is_one_sentence(text, said):
    with pytest.raises(OptionsError) as caught:
        parse_study(text, "s.yaml", "s")
    assert list(caught.value.mistakes) == [said]


def test_an_option_in_the_place_of_a_field_is_told_where_it_belongs():
    said = r"no field rows.one.codec; options of a recipe stand below rows.one.options"
    with pytest.raises(OptionsError, match=said):
        parse_study("recipe: t\nrows: {one: {codec: none}}", "s.yaml", "s")


def test_a_grid_has_a_row_for_every_combination():
    text = "recipe: tiny.yaml\ngrid: {codec: [none, q(4)], optimizer.lr: [0.1, 0.2]}\nseeds: [3, 4]"
    cells = cells_of(parse_study(text, "g.yaml", "g"), Scale(), Path("out"), ["--training.steps", "1"])
    assert [(cell.row, cell.seed) for cell in cells] == [
        (f"codec {codec}, lr {lr}", seed) for seed in (3, 4) for codec in ("none", "q(4)") for lr in (0.1, 0.2)
    ]
    assert len({cell.folder for cell in cells}) == 8
    arguments = cells[3].arguments
    assert arguments[0] == "tiny.yaml"
    options = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    assert options["--codec"] == "q(4)" and options["--optimizer.lr"] == "0.2" and options["--training.steps"] == "1"
    assert options["--training.seed"] == "3"


def test_what_a_row_sets_itself_holds_however_a_command_line_spells_it():
    study = parse_study("recipe: t\nrows: {exact: {options: {codec: none}}, other: {}}", "g.yaml", "g")
    exact, other = cells_of(study, Scale(), Path("out"), ["--compression.activations", "q(8)"])
    options = [word for word in exact.arguments if word in ("--codec", "--compression.activations")]
    assert options[-1] == "--codec"
    assert "--compression.activations" in other.arguments and "--codec" not in other.arguments


def test_rows_whose_names_differ_in_signs_alone_have_folders_of_their_own():
    text = "recipe: t\ngrid: {codec: ['q(4)/q(8)', 'q(4)-q(8)']}"
    first, second = cells_of(parse_study(text, "g.yaml", "g"), Scale(), Path("out"))
    assert first.folder != second.folder


@pytest.mark.parametrize(("one", "other"), [("Two bits", "two bits"), ("two bits", "two-bits")])
def test_two_rows_in_one_folder_are_refused(one, other):
    """They trained over each other: each found the cell of the other there, and began it anew."""
    study = parse_study(f"recipe: t\nrows: {{{one}: {{}}, {other}: {{}}}}", "g.yaml", "g")
    with pytest.raises(OptionsError, match=f"rows '{one}' and '{other}' would have one folder, two-bits; rename one"):
        cells_of(study, Scale(), Path("out"))


def test_two_rows_of_one_name_are_refused():
    """One of them was trained, without a word of the other."""
    with pytest.raises(OptionsError, match="give each row a name of its own, got 2 names for 3 rows"):
        parse_study("recipe: t\nrows: {lr 1: {}}\ngrid: {optimizer.lr: [1, 2]}", "g.yaml", "g")


@pytest.mark.parametrize(
    ("two_bits", "none", "verdict"),
    [
        ([3.5, 3.4, 3.6], [3.0, 2.9, 3.1], "holds"),  # 0.5 each time: no spread at all
        ([3.0, 2.9, 3.1], [3.5, 3.4, 3.6], "does not hold"),
        ([3.5, 2.5, 3.6], [3.0, 2.9, 3.1], "cannot tell"),  # 0.5, -0.4, 0.5
        ([3.5], [3.0], "cannot tell"),  # one seed
        ([], [3.0, 3.0], "cannot tell"),
        # mean 0.5, error 0.1: above 0 by five errors; t is 6.31 for two seeds, 2.92 for three
        ([3.6, 3.4], [3.0, 3.0], "cannot tell"),
        ([3.5 + 0.1 * 3**0.5, 3.5, 3.5 - 0.1 * 3**0.5], [3.0] * 3, "holds"),
    ],
)
def test_a_claim_is_judged_by_paired_differences(two_bits, none, verdict):
    claim = Claim(claim="c", of=Side(row="two"), minus=Side(row="none"), above=0.0)
    rows = {"none": Row(published={"on": 3.0}), "two": Row(published={"on": 3.5})}
    judged = judge(claim, results(two=two_bits, none=none), rows)
    assert judged.verdict == verdict
    assert judged.published == 0.5


def test_a_seed_that_diverged_or_is_missing_is_not_left_out_of_a_verdict():
    """The claim held by the seeds that were left, and the table counted all of them."""
    study = parse_study(STUDY, "s", "s")
    found = results(**{"none": [3.0] * 4, "two bits": [3.5, 3.5, math.nan, math.nan]})
    found["off"] = found["on"]
    runs = {
        row: [run_of(row, *line) for line in found[found["row"] == row][["seed", "on"]].values] for row in study.rows
    }
    table = scores_table(study, study.all_rows, runs)
    none, two = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert (none["seeds"], none["diverged"], two["seeds"], two["diverged"]) == (4, 0, 2, 2)
    assert (two["published on"], two["loss on, mean"], two["loss on, mean difference"]) == (3.5, 3.5, 0.5)
    judged = judge(study.claims[0], found, study.all_rows)
    assert (judged.verdict, judged.seeds, judged.difference) == ("cannot tell", (0, 1), 0.5)
    whole = found[found["seed"] < 2]
    assert judge(study.claims[0], whole, study.all_rows).verdict == "holds"
    assert judge(study.claims[0], whole, study.all_rows, missing={"two bits"}).verdict == "cannot tell"
    assert judge(study.claims[0], whole, study.all_rows, missing={"another"}).verdict == "holds"


def test_a_small_difference_has_digits_in_the_table():
    """It held by 0.0, with an error of 0.0."""
    study = parse_study(STUDY, "s", "s")
    found = results(**{"none": [3.0, 3.0, 3.0], "two bits": [3.00041, 3.00042, 3.00043]})
    [row] = claims_table(study, [judge(study.claims[0], found, study.all_rows)]).rows
    assert (row[4], row[5], row[-1]) == (0.00042, 5.8e-06, "holds")


def test_a_claim_below_a_number_is_the_mirror():
    claim = Claim(claim="c", of=Side(row="two"), minus=Side(row="none"), below=1.0)
    rows = {"none": Row(), "two": Row()}
    assert judge(claim, results(two=[3.5, 3.4], none=[3.0, 2.9]), rows).verdict == "holds"
    assert judge(claim, results(), rows).published is None


def test_the_studies_on_the_page_can_be_read():
    page = (Path(__file__).parents[2] / "docs/how-to/studies.md").read_text()
    blocks = [dedent(block) for block in re.findall(r"(?:^    .*\n)+", page, re.MULTILINE)]
    studies = [parse_study(block, "page", "page") for block in blocks if block.startswith("recipe: ")]
    grid, rows, pretrained = studies
    assert len(cells_of(grid, Scale(), Path("f"))) == 18
    assert list(rows.scales) == ["long", "short"] and rows.claims[0].below == 0.05
    assert pretrained.rows["TopK"].starts_with == "pretrained" and pretrained.claims[1].minus.row == "none from scratch"


def job(cell, status, seconds=0.0):
    return Job(cell, {}, 100, 1, "begins", status=status, seconds=seconds)


def test_a_cell_is_kept_while_what_it_depends_on_is_the_same(tmp_path):
    cell = cells_of(parse_study(STUDY, "s", "s"), Scale(), tmp_path)[0]

    def found(*, any_code=False, **origin):
        return find(cell, origin, any_code=any_code)

    assert found(code="a", lr=1) == ("begins", [])
    made(cell, {"code": "a", "lr": 1})
    assert found(code="a", lr=1) == ("begins", []), "without a checkpoint"
    (cell.folder / "checkpoints/step-1").mkdir(parents=True)
    (cell.folder / "checkpoints/step-1/manifest.json").touch()
    assert found(code="a", lr=1) == ("goes on", [])
    (cell.folder / "summary.json").write_text('{"running": false, "steps": 100, "planned_steps": 100}')
    assert found(code="a", lr=1) == ("finished", [])
    assert found(code="b", lr=2) == ("begins anew", ["code", "lr"])
    assert found(code="b", lr=1, new=0) == ("begins anew", ["code", "new"])
    assert found(any_code=True, code="b", lr=1, new=0) == ("finished", []), "a later version may know more fields"
    assert found(any_code=True, code="b", lr=2) == ("begins anew", ["lr"])
    (cell.folder / "cell.json").write_text("{")
    assert found(code="a", lr=1) == ("begins anew", ["cell.json, which is damaged"])


@pytest.mark.parametrize("summary", ['{"running": false, "steps": 100, "planned_steps": 100}', '{"running": true}'])
def test_a_cell_whose_new_run_did_not_begin_is_not_taken_for_the_old_one(here, monkeypatch, summary):
    """The old scores were reported as those of the new options, or the old run went on with them."""
    study = parse_study(STUDY, "s", "s")
    cell = cells_of(study, Scale(), here)[0]
    made(cell, {"lr": 1})
    mark(cell.folder, "run")
    (cell.folder / "summary.json").write_text(summary)
    checkpoint = cell.folder / "checkpoints/step-00000001"
    claim(checkpoint, "run")
    (checkpoint / "manifest.json").touch()
    state, _ = find(cell, {"lr": 2})
    assert state == "begins anew"
    popen = engine.subprocess.Popen
    monkeypatch.setattr(engine.subprocess, "Popen", lambda _, **given: popen(["false"], **given))
    begun = Job(cell, {"lr": 2}, 100, 1, state)
    run_jobs([begun], 1, study, came=[])
    assert begun.status == "failed"
    assert find(cell, {"lr": 2}) == ("begins", [])
    assert cell in missing_cells([cell])


def test_a_cell_in_whose_folder_a_run_still_writes_is_left_as_it_is(here, monkeypatch):
    """A process of a killed study ended there, and its scores were reported as those of the new options."""
    study = parse_study(STUDY, "s", "s")
    cell = cells_of(study, Scale(), here)[0]
    made(cell, {"lr": 1})
    popen = engine.subprocess.Popen
    monkeypatch.setattr(engine.subprocess, "Popen", lambda _, **given: popen(["false"], **given))
    monkeypatch.setattr(policy, "_PATIENCE", 0.0)
    begun = Job(cell, {"lr": 2}, 100, 1, "begins anew")
    with policy.held(cell.folder):
        run_jobs([begun], 1, study, came=[])
    assert begun.status == "failed"
    assert f"a run writes to {cell.folder} now" in begun.trouble
    assert find(cell, {"lr": 2}) == ("begins anew", ["lr"])


def test_a_report_takes_no_cell_of_other_options(here):
    study = parse_study(STUDY, "s", "s")
    cells = cells_of(study, Scale(), here, ["--data.name", "elsewhere"])
    for cell, origin in zip(cells, asked_of(cells), strict=True):
        made(cell, origin, given=cell.given)
    changed = parse_study(STUDY.replace("q(2)/q(8)", "q(3)/q(8)"), "s", "s")
    missing = missing_cells(cells_of(changed, Scale(), here))
    assert {cell.row: why for cell, why in missing.items()} == {
        "none": "not finished",
        "two bits": "these have changed: compression.activations; run it again",
    }


def finished(cell, origin):
    """Write the files of a cell that has taken all its steps, as far as a study reads them."""
    made(cell, origin, given=cell.given, base=weights_digest(cell.base))
    both = {mode: {"loss": 3.0} for mode in ("on", "off")}
    channels = [
        {"channel": channel, "bytes": 10, "elements": 10, "rows": 1, "full_rows": 0}
        for channel in ("activations", "gradients")
    ]
    summary = {"held_out": both, "channels": channels, "seconds": 1, "weights_digest": "w" * 16}
    summary |= {"running": False, "steps": 6, "planned_steps": 6}
    (cell.folder / "summary.json").write_text(json.dumps(summary))


@pytest.mark.parametrize("given", [[], ["--optimizer.lr", "0.5", "--data.limit", "9"]])
@pytest.mark.parametrize(
    ("file", "old", "new", "kept"),
    [
        ("mine.yaml", "", "", ["none", "two bits"]),
        (
            "mine.yaml",
            "training.steps: 6, training.evaluate_every: 3 steps",
            "training.evaluate_every: 3 steps, training.steps: 6",
            ["none", "two bits"],
        ),
        ("mine.yaml", "options: {t", "options: {save_every: 100, t", ["none", "two bits"]),  # no effect on numbers
        ("mine.yaml", "every: 2 steps", "every: 3 steps", ["none", "two bits"]),
        ("mine.yaml", "training.steps: 6", "training.steps: '6'", ["none", "two bits"]),
        ("mine.yaml", "none/none}", "none/none, training.threads: 1}", ["none", "two bits"]),  # the default
        ("mine.yaml", "q(2)/q(8)", "q(3)/q(8)", ["none"]),
        ("mine.yaml", ", optimizer.lr: 0.25", "", ["none"]),  # the last words of its command line
        ("mine.yaml", "optimizer.lr: 0.25}", "optimizer.lr: 0.25}, starts_with: none", ["none"]),
        ("tiny.yaml", "microbatch_size: 2", "microbatch_size: 1", []),
    ],
)
def test_a_report_takes_a_cell_exactly_if_the_study_keeps_it(here, given, file, old, new, kept):
    """Options in another order were others for the report alone, and what had lost its last option was the same."""

    def cells(**beside):
        study = read_study("mine.yaml")
        found = cells_of(study, Scale(), here, **beside)
        return study, found, asked_of(found)

    (here / "mine.yaml").write_text(STUDY.replace("q(2)/q(8)", "q(2)/q(8), optimizer.lr: 0.25"))
    for cell, origin in zip(*cells(given=given)[1:], strict=True):
        finished(cell, origin)
    (here / file).write_text((here / file).read_text().replace(old, new, 1))
    study, found, origins = cells(given=given)
    for any_code in (False, True):
        states = [find(cell, origin, any_code=any_code)[0] for cell, origin in zip(found, origins, strict=True)]
        assert [cell.row for cell, state in zip(found, states, strict=True) if state == "finished"] == kept
    missing = missing_cells(cells_of(study, Scale(), here))
    assert {cell.row for cell in missing} == {"none", "two bits"} - {*kept}


def test_progress_has_the_last_line_of_each_running_cell(tmp_path):
    cells = cells_of(parse_study(STUDY, "s", "s"), Scale(seeds=[0, 1]), tmp_path)
    jobs = [job(cells[0], "finished", seconds=50.0), job(cells[1], "runs"), *(job(cell, "waits") for cell in cells[2:])]
    cells[1].folder.mkdir(parents=True)
    (cells[1].folder / "log.txt").write_text("step 3\nstep 4\n")
    assert progress(jobs) == "1 of 4 cells are finished; two bits, seed 0: step 4"


def test_a_cell_that_was_killed_says_so(tmp_path):
    """It failed with its last line of progress, and nobody learnt that the machine had too little memory."""
    one = job(cells_of(parse_study(STUDY, "s", "s"), Scale(), tmp_path)[0], "runs")
    one.cell.folder.mkdir(parents=True)
    (one.cell.folder / "log.txt").write_text("step 3: loss 2.5\n")
    one.process = SimpleNamespace(poll=lambda: -signal.SIGKILL)
    one.look()
    assert (one.status, one.trouble) == ("failed", ended(-signal.SIGKILL))


@pytest.mark.parametrize("logged", ["", "step 3: loss 2.5\n"])
def test_a_cell_that_had_no_room_for_its_last_words_says_so(tmp_path, logged):
    """It exited with status 1, and its log was empty."""
    with mounted(tmp_path / "disk", "size=32k") as disk:
        one = job(cells_of(parse_study(STUDY, "s", "s"), Scale(), disk)[0], "runs")
        one.process = SimpleNamespace(poll=lambda: 1)
        folder = one.cell.folder
        folder.mkdir(parents=True)
        (folder / "log.txt").write_text(logged)
        one.look()
        assert one.trouble == (logged.strip() or ended(1))
        (folder / "weights").write_bytes(bytes(20 << 10))
        one.look()
        assert one.trouble.endswith(f"{folder} cannot be written: No space left on device")
        assert one.trouble.startswith(logged.strip())


def test_a_study_prints_every_half_minute_how_far_it_is(capsys, monkeypatch):
    study = parse_study(STUDY, "s", "s")
    first, second = (job(cell, "waits") for cell in cells_of(study, Scale(), Path("f")))
    ends = iter([False, False, False, True, True])
    for one in (first, second):
        monkeypatch.setattr(one, "start", lambda one=one: setattr(one, "status", "runs"))
        monkeypatch.setattr(one, "look", lambda one=one: next(ends) and setattr(one, "status", "failed"))
    monkeypatch.setattr(engine, "_POLL", 0)
    time = iter([0.0, 0.0, 0.0, 10.0, 31.0, 31.0, 40.0])
    run_jobs([first, second], 1, study, came=[], clock=lambda: next(time))
    assert capsys.readouterr().out.splitlines() == [
        "0 of 2 cells are finished; none, seed 0: ",
        "0 of 2 cells are finished; none, seed 0: ",
        "none, seed 0 failed after 0.0 s: ",
        "two bits, seed 0 failed after 0.0 s: ",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", packaged_names(PACKAGED))
def test_a_packaged_study_names_recipes_that_can_be_read(name):
    from thinwire.launch.recipe import recipe

    study = read_study(name)
    scales = list(study.scales)
    assert scales[:2] == ["small", "full"] and scales[-1] == "smoke"  # the first is the default, and runs on a laptop
    for scale in study.scales.values():
        assert scale.about
        cells = cells_of(study, scale, Path("f"))
        assert {cell.row for cell in cells} == set(study.rows_at(scale))
        for cell in cells[: len(study.rows_at(scale))]:  # those of the first seed
            assert recipe.parse(list(cell.arguments)).training.seed == cell.seed


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the tiny recipe and its study, as the current one."""
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    (tmp_path / "mine.yaml").write_text(STUDY)
    return tmp_path


def test_mistakes_of_all_cells_are_told_before_any_runs(here, capsys):
    text = STUDY.replace("q(2)/q(8)", "q(11)/q(8)").replace("training.steps: 6", "optimizer.lr: -1")
    (here / "mine.yaml").write_text(text)
    assert cli.main(["study", "mine.yaml"]) == 2
    told = capsys.readouterr().err
    assert "two bits, seed 0: compression.activations: " in told
    assert "none, seed 0: optimizer.lr must be finite and not negative, got -1" in told
    assert told.count("optimizer.lr") == 1  # once, not for every cell
    assert not (here / "studies").exists()


@pytest.mark.parametrize("place", ["--smoke", "--debug.smoke=true", "study", "recipe"])
def test_a_smoke_run_is_no_cell(here, capsys, place):
    """It wrote elsewhere, and the finished cell was taken for one of its recipe."""
    study = read_study("mine.yaml")
    cells = cells_of(study, Scale(), Path("studies/mine/all"))
    for cell in cells:
        made(cell, {"lr": 1})
    if place == "study":
        (here / "mine.yaml").write_text(STUDY.replace("options: {", "options: {debug.smoke: true, ", 1))
    elif place == "recipe":
        (here / "tiny.yaml").write_text(f"{(here / 'tiny.yaml').read_text()}debug: {{smoke: true}}\n")
    assert cli.main(["study", "mine.yaml", *([place] if place.startswith("--") else [])]) == 2
    told = capsys.readouterr().err
    assert "none, seed 0: debug.smoke must be false, because a smoke run is no cell of a study" in told
    assert told.count("debug.smoke") == 1  # once, not for every cell
    for cell in cells:
        assert json.loads((cell.folder / "cell.json").read_text()) == {"origin": {"lr": 1}}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nobody"], "NAME must be a packaged study or the path of a YAML file, got 'nobody'"),
        (["mine.yaml", "--scale", "huge"], "--scale must be a scale of the study mine, got 'huge'"),
        (["mine.yaml", "--row", "ten bits"], "--row must be a row of the study at this scale, got 'ten bits'"),
        (["mine.yaml", "other.yaml"], "one NAME is enough, got 'other.yaml' as well"),
        (["report", "mine.yaml"], "got 'mine.yaml' as well; write thinwire study mine.yaml --report"),
        (["mine.yaml", "--report"], "studies/mine/all does not exist; run the study first"),
        (["mine.yaml", "--report", "--folder", "."], "--folder must name the folder of this study, and . has no cells"),
        (["mine.yaml", "--report", "--folder", "other"], "and other has cells of another study or scale"),
        (
            ["mine.yaml", "--training.seed", "3"],
            "--training.seed must be left out: a study gives each cell its own; the",
        ),
        (["mine.yaml", "--output=x"], "--output must be left out: a study gives each cell its own; --folder is for"),
        (["."], "NAME must be a packaged study or the path of a YAML file, got a folder"),
    ],
)
def test_a_wrong_word_is_answered_by_a_sentence(here, capsys, arguments, sentence):
    (here / "other/cells/ten-bits/seed-0").mkdir(parents=True)
    (here / "other/cells/ten-bits/seed-0/cell.json").write_text("{}")
    assert cli.main(["study", *arguments]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_a_score_that_no_cell_has_is_told_before_any_runs(here, capsys):
    """All cells were trained, and the report had no number."""
    for score, sentence in (
        ("lossy", "mine.yaml: score must be one of loss, perplexity, accuracy, matthews, got 'lossy'"),
        ("accuracy", "none, seed 0: score must be one of loss, perplexity for this recipe, got 'accuracy'"),
    ):
        (here / "mine.yaml").write_text(f"{STUDY}score: {score}\n")
        assert cli.main(["study", "mine.yaml", "--check"]) == 2
        assert capsys.readouterr().err == f"{sentence}\n"
    (here / "mine.yaml").write_text(STUDY.replace("options: {", "options: {data.held_out: 0, "))
    assert cli.main(["study", "mine.yaml", "--check"]) == 2
    assert "compares scores of held-out samples, and there are none; set data.held_out" in capsys.readouterr().err


@pytest.mark.slow
def test_a_check_lists_the_cells(here, capsys):
    assert cli.main(["study", "mine.yaml", "--check"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1:] == ["  none, seed 0: to begin, 6 steps", "  two bits, seed 0: to begin, 6 steps"]


def _finished(report):
    """The finished cells of a report, by row."""
    table = next(table for table in report["tables"] if table["title"] == "Finished cells")
    return {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["rows"]}


@pytest.mark.slow
@pytest.mark.processes
def test_a_study_goes_on_where_it_stopped_and_reports_what_it_has(here, capsys):
    # 1. stopped in the middle of the first cell, after a checkpoint: the study looks for signals twice a second
    long = ["study", "mine.yaml", "--training.steps", "80", "--training.evaluate_every", "40 steps"]
    long += ["--checkpoint.every", "5 steps"]
    folder = here / "studies/mine/all"
    cell = folder / "cells/none/seed-0"
    with started([*THINWIRE, *long, "--jobs", "1"], here) as study:
        study.wait_until(lambda: list(cell.glob("checkpoints/*/manifest.json")))
        study.process.send_signal(signal.SIGINT)
        assert study.wait() == 130
        assert "the same command goes on" in study.stderr and not study.processes()
    assert cli.main(["study", "mine.yaml", "--report"]) == 0
    unfinished = (folder / "report.md").read_text()
    assert "0 of 2 cells are finished. 2 are missing" in unfinished and "not begun" in unfinished
    # 2. the same command goes on; its cell ends as one that nobody stopped, of real processes
    again = completed([*THINWIRE, *long, "--jobs", "2"], here, timeout=600)
    assert again.status == 0, again.stderr
    assert "1 to go on from a checkpoint, 1 to begin" in again.stdout
    assert "report.html, report.md and report.json are in studies/mine/all" in again.stdout
    asked = json.loads((cell / "cell.json").read_text())["command"][1:]
    several = completed([*THINWIRE, "train", *asked, "--output", "several"], here, timeout=600)
    assert several.status == 0, several.stderr
    assert "goes on from the checkpoint of step" in (cell / "log.txt").read_text()
    assert not (cell / "checkpoints").exists()
    # 3. what is finished is not run again; what was made by another recipe is
    capsys.readouterr()
    assert cli.main([*long, "--check"]) == 0
    assert "2 cells in studies/mine/all: 2 already finished" in capsys.readouterr().out
    assert cli.main([*long, "--check", "--optimizer.lr", "0.1"]) == 0
    told = capsys.readouterr().out
    assert "none, seed 0 begins anew, because these have changed: optimizer.lr" in told
    # 4. the report has the published numbers, ours, and the picture
    assert cli.main(["study", "mine.yaml", "--report"]) == 0
    report = json.loads((folder / "report.json").read_text())
    scores = report["tables"][0]
    line = dict(zip(scores["columns"], scores["rows"][1], strict=True))
    assert line["row"] == "two bits" and line["published on"] == 3.5 and line["seeds"] == 1
    assert 2 < line["bits, activations"] < 8 < line["bits, gradients"] < 14  # with the headers of tiny frames
    assert _finished(report)["none"]["weights digest"] == digest(here / "several")[:16]
    assert report["verdicts"] == {"cannot tell": 1} and report["missing"] == 0
    page = (folder / "report.html").read_text()
    assert "<svg" in page and "2 of 2 cells are finished." in page
