"""The best cut of a recipe, as `thinwire predict` finds it from the costs of layers."""

import json

import pytest

from thinwire.launch import cli

pytestmark = pytest.mark.slow

RECIPE = """
model: {name: gpt2, config: {vocab_size: 256, n_layer: 4, n_embd: 16, n_head: 2, n_positions: 16}}
data: {name: pydoc, limit: 1000, block_size: 16}
pipeline: {num_stages: 3, layers: [1, 1, 4], num_microbatches: 2, microbatch_size: 2}
training: {steps: 1}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    return tmp_path


def asked(capsys, *options):
    """The tables of layers and cuts, and the document they come from."""
    assert cli.main(["predict", "tiny.yaml", "--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    tables = found["tables"][-3:]
    return [[dict(zip(t["columns"], row, strict=True)) for row in t["rows"]] for t in tables], found


def test_costs_are_measured_and_links_counted(here, capsys):
    options = ["--bandwidth", "100mbit", "--memory", "64"]
    (layers, own, best), found = asked(capsys, *options)
    assert found["title"] == "prediction of tiny"
    assert [row["layer"] for row in layers] == ["embedding", *(f"block {index}" for index in range(4)), "head"]
    assert [row["layers"] for row in own] == [1, 1, 4]
    assert [row["layers"] for row in best] == found["layers"]
    assert [row["stage"] for row in layers] == [stage for stage in range(3) for _ in range(found["layers"][stage])]
    firsts = [0, found["layers"][0], sum(found["layers"][:2])]
    assert [row["first layer"] for row in best] == [layers[first]["layer"] for first in firsts]
    assert all(row["forward, ms"] > 0 and row["backward, ms"] > 0 and row["kept, MB"] >= 0 for row in layers)
    assert sum(row["weights, MB"] for row in layers) > 0
    assert max(row["compute, of slowest"] for row in best) == 1
    assert all(0 < row["memory, MB"] < 64_000 for row in best)  # the process of the tests itself is counted
    assert sum(found["layers"]) == 6 and min(found["layers"]) >= 1
    for optimizer, copies in ((["adamw"], 4), (["sgd", "--optimizer.momentum", "0"], 2)):
        (layers, _, best, *_), found = asked(capsys, *options, "--optimizer.name", *optimizer)
        first = [row for row in layers if row["stage"] == 0]
        memory = sum(copies * row["weights, MB"] + 2 * row["kept, MB"] for row in first)
        working = max(cost["working_bytes"] for cost in found["measured"]["costs"][: len(first)])
        process = found["measured"]["process_bytes"]
        assert process > 1e8, "torch"
        assert best[0]["memory, MB"] == pytest.approx(1.1 * (memory + working / 1e6) + process / 1e6, rel=1e-9)
    own, cut = found["fits"]
    assert own.startswith("the cut of the recipe fits: its stages need ") and own.count(" of 64 GB") == 3
    assert cut.startswith("the best cut fits: ")


def test_the_tables_are_whole_on_80_columns_and_what_it_recommends_is_an_option(here, capsys):
    assert cli.main(["predict", "tiny.yaml", "--bandwidth", "100mbit", "--codec", "q(8)"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        max(map(len, lines[next(place for place, line in enumerate(lines) if line.startswith("layers,")) : -4])) <= 80
    )
    words = {word for line in lines for word in line.split()}
    # a name that is broken within a word is none of these
    assert {"embedding", "compute,", "slowest", "weights,", "memory,"} <= words
    advice = lines[-1].removeprefix("to use the best cut: ").replace("'", "").split(maxsplit=1)
    assert advice[0] == "--pipeline.layers"
    assert cli.main(["predict", "tiny.yaml", "--json", *advice]) == 0
    tables = json.loads(capsys.readouterr().out)["tables"]
    assert [row[3] for row in tables[-2]["rows"]] == json.loads(advice[1])
    assert sorted(here.iterdir()) == [here / "tiny.yaml"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--memory", "-1"], "--memory must be above 0 GB, got -1"),
        (["--memory", "1", "2"], "--memory must be one number for all stages, or one for each of 3, got 2"),
        (["--measured", "a.json"], "--measured must name a file for each of the 3 stages, in their order, got 1"),
        (["--measured", "a.json", "a.json", "a.json"], "cannot read --measured a.json: No such file or directory"),
        (["--measured", "tiny.yaml", "tiny.yaml", "tiny.yaml"], "tiny.yaml must be the output of `thinwire predict"),
        (
            ["--memory", "0.0000001"],
            "no cut of 6 layers into 3 stages keeps each stage within 1e-07 GB of memory: stages of one layer take ",
        ),
        (
            ["--memory", "1", "--forward-ms", "1", "--backward-ms", "1"],
            "--memory and --measured are of measured layers: leave out --forward-ms and --backward-ms",
        ),
        (["--pipeline.num_stages", "7", "--pipeline.layers", "null"], "each stage must have a layer, got 7 stages"),
        (
            ["--pipeline.scedule", "7"],
            "there is no option --pipeline.scedule (did you mean --pipeline.schedule?); see",
        ),
    ],
)
def test_what_cannot_be_cut_is_one_sentence(here, capsys, options, said):
    assert cli.main(["predict", "tiny.yaml", *options]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    assert said in told.err


def test_a_slow_machine_gets_fewer_layers_where_each_measured_its_own(here, capsys):
    assert cli.main(["predict", "tiny.yaml", "--json"]) == 0
    fast = json.loads(capsys.readouterr().out)
    assert fast["measured"]["device"] == "cpu"
    fast["measured"]["process_bytes"] = 0
    for cost in fast["measured"]["costs"]:
        cost.update(forward=0.01, backward=0.02)
    (here / "fast.json").write_text(json.dumps(fast))
    for cost in fast["measured"]["costs"]:
        cost.update(forward=0.03, backward=0.06)
    fast["measured"]["device"] = "cuda:0 (OLD)"
    (here / "slow.json").write_text(json.dumps(fast))
    unlimited = ["--bandwidth", "none"]
    (layers, _, best, *_), found = asked(capsys, *unlimited, "--measured", "fast.json", "slow.json", "fast.json")
    assert found["layers"] == [3, 1, 2] and "measured" not in found
    assert found["workload"]["forward"] == pytest.approx([0.01, 0.03, 0.04]), "each stage at its place"
    assert [row["measured in"] for row in best] == ["fast.json", "slow.json", "fast.json"]
    assert [row["compute, of slowest"] for row in best] == pytest.approx([1, 1, 2 / 3])
    assert [row["slow.json, ms"] for row in layers] == pytest.approx([90] * 6)
    assert found["tables"][-3]["note"] == "fast.json: cpu; slow.json: cuda:0 (OLD)"
    (here / "old").mkdir()
    (here / "old/fast.json").symlink_to(here / "slow.json")
    (layers, _, best, *_), _ = asked(capsys, *unlimited, "--measured", "fast.json", "old/fast.json", "./fast.json")
    assert [row["measured in"] for row in best] == ["fast.json", "old/fast.json", "fast.json"]
    assert layers[0]["old/fast.json, ms"] == pytest.approx(90)
    alike = [*unlimited, "--measured", *["fast.json"] * 3]
    (_, _, best, *_), found = asked(capsys, *alike, "--memory", "1", "0.000231", "1")
    assert found["layers"] == [3, 1, 2] and best[1]["memory, MB"] <= 0.231
    _, found = asked(capsys, *alike, "--memory", "1", "1", "0.000231")
    assert "does not fit: stage 2 needs 0.000" in found["fits"][0] and "GB and has 0.000231 GB" in found["fits"][0]


def test_costs_of_other_microbatches_or_models_are_not_mixed(here, capsys):
    for name, options in (
        ("one", []),
        ("two", ["--pipeline.microbatch_size", "1"]),
        ("three", ["--model.config.n_layer", "3"]),
    ):
        cut = ["--pipeline.layers", "null"]
        assert cli.main(["predict", "tiny.yaml", "--json", *cut, *options]) == 0
        (here / f"{name}.json").write_text(capsys.readouterr().out)
    for other, said in (("two", "must be of the same micro-batches"), ("three", "has the costs of another model")):
        assert cli.main(["predict", "tiny.yaml", "--measured", "one.json", "one.json", f"{other}.json"]) == 2
        assert said in capsys.readouterr().err
