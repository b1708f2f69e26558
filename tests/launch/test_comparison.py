"""What a report says of several runs together: made of what runs leave, and of nothing else."""

import json
import math
from dataclasses import replace

import pytest
import yaml
from matplotlib.axes import Axes
from pandas import DataFrame

from thinwire.launch.comparison.comparison import compare, differences, find_baseline, loss_charts, mean_curve
from thinwire.launch.comparison.plots import Curve, curves, points
from thinwire.launch.comparison.runs import RunFiles
from thinwire.launch.recipe.fields import WITHOUT_EFFECT, is_among
from thinwire.pipeline.errors import OptionsError

STEPS, MICROBATCHES, FRAMES = 4, 2, 8
NBYTES = {"none": 4000, "q(4)": 500, "q(8)": 1000}


def made(tmp_path, name, *, on=3.0, off=3.0, codec="none", seed=0, stages=2, layers=(2, 2), accuracy=None):
    """The files of a run of two stages that took 1 s a step, 0.3 s of them computing on each stage."""
    scores = {
        mode: {"loss": loss} | ({} if accuracy is None else {"accuracy": accuracy})
        for mode, loss in (("on", on), ("off", off))
    }
    channels = [
        {
            "boundary": 0,
            "channel": channel,
            "codec": codec,
            "frames": FRAMES,
            "bytes": FRAMES * NBYTES[codec],
            "uncompressed": FRAMES * 4000,
            "elements": FRAMES * 1000,
            "rows": FRAMES,
            "full_rows": FRAMES // 4,
        }
        for channel in ("activations", "gradients")
    ]
    seconds = {"compute": 0.3 * STEPS, "encode": 0.0, "wait": 0.1, "decode": 0.0}
    summary = {
        "name": name,
        "steps": STEPS,
        "running": False,
        "metered_from": 0,
        "replicas": [],
        "training_seconds": 4.0,
        "held_out": scores,
        "held_out_digest": "a",
        "channels": channels,
        "stages": [{"stage": stage, "layers": layers[stage], "seconds": seconds} for stage in range(2)],
    }
    recipe = {
        "name": name,
        "pipeline": {"num_stages": stages, "num_microbatches": MICROBATCHES, "accumulation": 1, "schedule": "gpipe"},
        "compression": {"activations": codec, "gradients": codec, "boundaries": {}},
        "training": {"seed": seed, "steps": STEPS},
        "replicas": {"count": 1},
    }
    steps = [{"step": n, "loss": 5.0 - n, "seconds": 1.0 + n, "samples": 8, "bytes": 100} for n in range(STEPS)]
    evaluations = [{"step": 2, "on": {"loss": 3.5}}, {"step": STEPS, "on": {"loss": on}}]
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    return RunFiles(folder, summary, yaml.safe_dump(recipe), steps, evaluations)


def columns(table):
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


@pytest.mark.slow
def test_the_first_table_says_what_compression_cost(tmp_path):
    runs = [
        made(tmp_path, "none", on=3.0, off=3.0, accuracy=0.9),
        made(tmp_path, "four", on=3.25, off=3.5, codec="q(4)", accuracy=0.8),
    ]
    table = compare(runs, find_baseline(runs, None)).tables[0]
    none, four = columns(table)
    assert (four["activations/gradients"], four["bits, activations"], four["MB in training"]) == ("q(4)", 4.0, 0.01)
    assert four["fewer bytes"] == 8.0 and none["bits, gradients"] == 32.0
    assert (four["loss on, mean"], four["loss off, mean"], four["accuracy, % on, mean"]) == (3.25, 3.5, 80)
    assert (four["loss on, mean difference"], four["loss off, mean difference"], four["on - off"]) == (0.25, 0.5, -0.25)
    assert four["accuracy, % on, mean difference"] == -10 and none["loss on, mean difference"] == 0
    assert (four["in full, %"], four["steps"], four["seeds"]) == (25, STEPS, 1)
    assert "Differences are to none, to the run of the same seed" in table.note and "std" not in str(table.columns)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["replicas", "shared"])
def test_what_replicas_and_stages_with_the_same_weights_sent_counts_too(tmp_path, who):
    """A run whose replicas compress was the uncompressed baseline, and sent as much as one whose replicas do not.

    What stages sent of a tied head was left out.
    """
    runs = []
    for name, codec, nbytes in (("coded", "ef(q(4))", 16_000), ("plain", "none", 128_000)):
        run = made(tmp_path, name)
        rows = [{"stage": stage, "codec": codec, "bytes": nbytes, "uncompressed": 128_000} for stage in range(2)]
        recipe = run.recipe.replace("count: 1", f"count: 1\n  gradients: {codec}")
        runs.append(replace(run, summary=run.summary | {who: rows}, recipe=recipe))
    coded, plain = runs
    assert find_baseline(runs, None) is plain
    found = columns(compare(runs, plain).tables[0])
    assert [row["activations/gradients"] for row in found] == [f"none, {who} ef(q(4))", "none"]
    assert [row["MB in training"] for row in found] == [0.1, 0.32]  # 64 kB over the boundary
    assert [row["fewer bytes"] for row in found] == [round(320 / 96, 2), 1.0]
    assert coded.trained["MB"].iloc[-1] == pytest.approx(0.096)


@pytest.mark.slow
def test_a_run_of_few_bytes_sent_some(tmp_path):
    """It sent 0 MB."""
    run = made(tmp_path, "none")
    for channel in run.summary["channels"]:
        channel["bytes"] = 300
    assert columns(compare([run], None).tables[0])[0]["MB in training"] == 0.0006


@pytest.mark.slow
def test_the_baseline_is_the_named_run_else_the_first_uncompressed_one(tmp_path):
    four, none = made(tmp_path, "four", codec="q(4)"), made(tmp_path, "none")
    assert find_baseline([four, none], None) is none
    assert find_baseline([four, none], tmp_path / "four") is four
    assert find_baseline([four], None) is None
    with pytest.raises(OptionsError, match="--baseline must be one of the runs of the report"):
        find_baseline([four], tmp_path.relative_to(tmp_path) / "other")
    without = compare([four, made(tmp_path, "eight", codec="q(8)")], None).tables[0]
    assert "difference" not in " ".join(without.columns) and "name one with --baseline" in without.note


@pytest.mark.slow
def test_runs_that_differ_by_seed_alone_have_a_mean_and_a_spread(tmp_path):
    runs = [
        *(made(tmp_path, f"none-{seed}", on=3.0 + seed, seed=seed) for seed in range(2)),
        *(made(tmp_path, f"four-{seed}", on=4.0 + 3 * seed, seed=seed, codec="q(4)") for seed in range(2)),
    ]
    found = compare(runs, runs[0])
    none, four = columns(found.tables[0])
    assert (four["runs"], four["seeds"], four["loss on, mean"]) == ("four-0, four-1", 2, 5.5)
    assert four["loss on, std"] == round(3 / math.sqrt(2), 4) and none["loss on, std"] == round(1 / math.sqrt(2), 4)
    assert four["loss on, mean difference"] == 2.0
    assert (four["loss on, best"], none["loss on, best"]) == (4.0, 3.0)
    assert found.warning == "" and found.tables[1].title == "What differs between the recipes"


@pytest.mark.slow
def test_a_run_of_another_seed_than_the_baseline_has_no_difference(tmp_path):
    """It subtracted seed 0's `none` from seed 1's runs, so what a seed does was said to be the cost of compression."""
    none, four = made(tmp_path, "none"), made(tmp_path, "four", on=3.25, seed=1, codec="q(4)")
    [_, apart] = columns(compare([none, four], none).tables[0])
    assert apart["loss on, mean difference"] is None


@pytest.mark.slow
def test_differences_are_of_the_seeds_that_both_have(tmp_path):
    """The means of other seeds were subtracted, so what a seed does to both was said to be the cost of compression."""
    nones = [made(tmp_path, f"none-{seed}", on=3.0 + seed, seed=seed) for seed in range(3)]
    fours = [made(tmp_path, f"four-{seed}", on=3.5 + seed, seed=seed, codec="q(4)") for seed in (1, 2, 5)]
    found = compare([*nones, *fours], nones[0]).tables[0]
    none, four = columns(found)
    assert (none["loss on, mean difference"], four["loss on, mean difference"]) == (0.0, 0.5)
    assert (four["seeds"], four["loss on, mean"]) == (3, round(3.5 + 8 / 3, 4))
    assert "Differences are to none-0, none-1, none-2, to the run of the same seed" in found.note
    [_, apart] = columns(compare([*nones[:2], *fours[1:]], nones[0]).tables[0])
    assert apart["loss on, mean difference"] is None


@pytest.mark.slow
def test_no_two_of_twelve_runs_are_drawn_alike(monkeypatch):
    """Runs of names with a colon had one colour, and from the seventh run on held-out points were those of another."""
    lines = [
        Curve(f"mine: {run}: {kind}", [(0.0, float(run))], marker)
        for run in range(12)
        for kind, marker in (("training", ""), ("held out", "o"))
    ]
    drawn, plot = [], Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda *given, **style: drawn.append(style) or plot(*given, **style))
    curves(lines, "title")
    assert len({(style["color"], style["linestyle"]) for style in drawn if "marker" not in style}) == 12
    assert len({(style["color"], style["marker"]) for style in drawn if "marker" in style}) == 12


@pytest.mark.slow
def test_what_differs_between_the_recipes_is_listed_and_warned_of(tmp_path):
    """Runs with another cut were compared without a word."""
    runs = [made(tmp_path, "none"), made(tmp_path, "four", codec="q(4)", layers=(3, 1))]
    assert differences(runs) == {
        "compression.activations": ["none", "q(4)"],
        "compression.gradients": ["none", "q(4)"],
        "pipeline.layers": [[2, 2], [3, 1]],
    }
    found = compare(runs, runs[0])
    assert found.tables[-1].rows[-1] == ["pipeline.layers", "[2, 2]", "[3, 1]"]
    assert found.warning.startswith("These runs differ in more than compression and seed: in pipeline.layers.")


def test_data_that_changed_between_runs_are_warned_of(tmp_path):
    """Losses of other held-out samples were compared without a word."""
    runs = [made(tmp_path, name) for name in ("none", "again", "later")]
    assert compare(runs, runs[0]).warning == ""
    runs[2] = replace(runs[2], summary=runs[2].summary | {"held_out_digest": "b"})
    said = "The held-out samples of again and later are not the same, as their data changed in between. So the"
    assert compare(runs, runs[0]).warning.startswith(said)
    other = yaml.safe_dump(yaml.safe_load(runs[2].recipe) | {"data": {"limit": 9}})
    assert "held-out samples" not in compare([*runs[:2], replace(runs[2], recipe=other)], runs[0]).warning


@pytest.mark.slow
def test_fields_that_no_loss_depends_on_are_listed_and_not_warned_of(tmp_path):
    """A run that saved more often was said to be no measure of compression."""
    runs = [made(tmp_path, "none"), made(tmp_path, "often")]
    other = yaml.safe_load(runs[1].recipe)
    other |= {"save_every": 10, "checkpoint": {"every": "5 steps"}, "data": {"outline": "x"}}
    other["training"]["recompute"] = True
    runs[1] = replace(runs[1], recipe=yaml.safe_dump(other))
    names = {"save_every", "checkpoint.every", "data.outline", "training.recompute"}
    assert set(differences(runs)) == names and all(is_among(name, WITHOUT_EFFECT) for name in names)
    found = compare(runs, runs[0])
    assert found.warning == "" and found.tables[0].rows[0][0] == "none, often"


@pytest.mark.slow
def test_seeds_that_diverged_are_counted_apart(tmp_path):
    """A mean of two losses was said to be one of three seeds."""
    nones = [made(tmp_path, f"none-{seed}", on=3.0 + seed, seed=seed) for seed in range(2)]
    fours = [made(tmp_path, f"four-{seed}", on=4.0 + seed, seed=seed, codec="q(4)") for seed in range(3)]
    fours.append(made(tmp_path, "four-3", on=None, off=9.0, seed=3, codec="q(4)"))
    found = compare([*nones, *fours], nones[0]).tables[0]
    none, four = columns(found)
    assert (none["seeds"], none["diverged"]) == (2, 0) and (four["seeds"], four["diverged"]) == (3, 1)
    assert (four["loss on, mean"], four["loss off, mean"]) == (5.0, 3.0), "both are of the same seeds"
    assert found.note.endswith("no number have diverged.")
    assert "diverged" not in compare(nones, nones[0]).tables[0].columns
    [lost] = columns(compare([replace(run, summary=fours[-1].summary) for run in nones], None).tables[0])
    assert (lost["seeds"], lost["diverged"], lost["loss on, mean"], lost["loss on, std"]) == (0, 2, None, None)


@pytest.mark.slow
def test_a_seed_counts_once(tmp_path):
    """A run that was given twice, or beside its simulation, was a mean of two seeds with a spread of zero."""
    runs = [made(tmp_path, f"none-{seed}", on=3.0 + seed, seed=seed) for seed in range(2)]
    once, again = (compare([*runs, *more], None).tables[0] for more in ([], runs))
    [alone], [both] = columns(once), columns(again)
    assert {**both, "runs": ""} == {**alone, "runs": ""} and alone["seeds"] == 2
    assert "the first one counts" in again.note and "the first one counts" not in once.note
    [twice] = columns(compare([runs[0], runs[0]], None).tables[0])
    assert (twice["seeds"], twice["loss on, mean"]) == (1, 3.0)


def still_training(run, steps):
    """The run, when it had done so many of its steps."""
    summary = {**run.summary, "steps": steps, "planned_steps": STEPS, "running": True}
    return replace(run, summary=summary, steps=run.steps[:steps])


@pytest.mark.slow
def test_a_run_that_is_not_finished_is_told_and_counts_in_no_mean(tmp_path):
    """Its loss at step 2 was compared with that of a finished run, and averaged with those of other seeds."""
    none, four = made(tmp_path, "none"), made(tmp_path, "four", codec="q(4)")
    told = "Not all runs are finished: four has done 2 of 4 steps. So their losses do not show the cost of compression."
    assert told in compare([none, still_training(four, 2)], none).warning
    stopped = replace(four, summary={**four.summary, "steps": 3})
    assert "different numbers of steps, from 3 to 4." in compare([none, stopped], none).warning
    seeds = [made(tmp_path, f"none-{seed}", on=3.0 + seed, seed=seed) for seed in range(3)]
    seeds[2] = still_training(seeds[2], 2)
    for baseline in (seeds[0], seeds[2]):
        [means, left] = columns(compare(seeds, baseline).tables[0])
        assert (left["runs"], left["loss on, mean"]) == ("none-2", 5.0)
        assert (means["runs"], means["seeds"], means["loss on, mean"]) == ("none-0, none-1", 2, 3.5)
        assert means["loss on, mean difference"] == 0


@pytest.mark.slow
def test_a_machine_that_was_busier_in_one_run_is_named(tmp_path):
    none, four = made(tmp_path, "none"), made(tmp_path, "four", codec="q(4)")
    for stage in four.summary["stages"]:
        stage["seconds"] = {name: 2.6 * spent for name, spent in stage["seconds"].items()}
    assert "took up to 2.6 times as long" in compare([none, four], none).warning


@pytest.mark.slow
def test_losses_are_placed_over_bytes_and_seconds(tmp_path):
    run = made(tmp_path, "four", codec="q(4)")
    total = 2 * FRAMES * NBYTES["q(4)"] / 1e6
    assert [*run.trained["MB"]] == pytest.approx([total * share for share in (0.25, 0.5, 0.75, 1)])
    assert points(run.trained, "seconds") == [(1, 5), (3, 4), (6, 3), (10, 2)]
    assert points(run.scored("on"), "seconds") == [(3, 3.5), (10, 3.0)]
    assert points(replace(run, evaluations=[{"step": 0, "on": {"loss": 4.0}}]).scored("on"), "MB") == [(0, 4.0)]
    titles = [chart.title for chart in compare([run, run], run).charts]
    assert titles == ["Loss over steps", "Loss over bytes sent", "Loss over time, measured"]


@pytest.mark.slow
def test_runs_of_several_seeds_are_one_curve_of_means_at_the_steps_that_all_have(tmp_path):
    long, short, lost = (
        DataFrame(lines, columns=["step", "seconds", "loss"])
        for lines in ([(1.0, 10.0, 5.0), (2.0, 20.0, 4.0)], [(2.0, 24.0, 3.0)], [(2.0, 24.0, math.nan)])
    )
    assert points(mean_curve([long]), "seconds") == [(10.0, 5.0), (20.0, 4.0)]
    assert points(mean_curve([long, short]), "seconds") == [(22.0, 3.5)]
    [(place, loss)] = points(mean_curve([long, lost]), "seconds")
    assert place == 22.0 and math.isnan(loss), "it was not the mean of those that are left"
    seeds = [made(tmp_path, f"none-{seed}", on=3.0 + seed, seed=seed) for seed in range(2)]
    over_steps, *others = loss_charts({"none": seeds, "four": [made(tmp_path, "four", codec="q(4)")]})
    assert "none: training" in over_steps.svg and "none-0" not in over_steps.svg and len(others) == 2


def test_an_evaluation_is_placed_by_its_step_where_the_log_lacks_steps(tmp_path):
    """It was taken for the place in the log: of a replica that came back, evaluations were drawn at the end."""
    run = made(tmp_path, "lost")
    lines = [{"step": n, "loss": 5.0, "seconds": 1.0, "samples": 8, "bytes": 100} for n in (0, 1, 10, 11, 12, 13)]
    scored = [{"step": step, "on": {"loss": 3.5}} for step in (8, 12)]
    run = replace(run, steps=lines, evaluations=scored, summary=run.summary | {"steps": 12})
    assert points(run.scored("on")) == [(8, 3.5), (12, 3.5)]
    between, after = points(run.scored("on"), "seconds")
    assert 2 < between[0] < 3 and after == (4, 3.5)
    total = 2 * FRAMES * NBYTES["none"] / 1e6
    assert run.trained["MB"][3] == pytest.approx(total), "two steps came after the summary"


@pytest.mark.slow
def test_what_was_metered_with_the_last_cut_is_divided_by_its_steps(tmp_path):
    """It was divided by all steps, so a run whose cut changed seemed faster, and to have sent less."""
    whole, cut = made(tmp_path, "whole"), made(tmp_path, "cut", codec="q(4)")
    late = [step | {"step": step["step"] + 12} for step in cut.steps]
    early = [late[0] | {"step": n} for n in range(12)]
    cut = replace(cut, steps=[*early, *late], summary=cut.summary | {"steps": 12 + STEPS, "metered_from": 12})
    total = 2 * FRAMES * NBYTES["q(4)"] / 1e6
    assert cut.trained["MB"].iloc[-1] == pytest.approx(total * (12 + STEPS) / STEPS)
    found = compare([whole, cut], whole)
    assert " Bytes of cut are those since step 12, where the cut changed." in found.tables[0].note
    assert "busy" not in found.warning


@pytest.mark.slow
def test_the_numbers_are_json_values_for_the_page(tmp_path):
    runs = [made(tmp_path, "none"), made(tmp_path, "four", codec="q(4)")]
    found = compare(runs, runs[0])
    assert json.loads(json.dumps([table.to_json() for table in found.tables])) is not None
    assert all("<svg" in chart.svg for chart in found.charts)
