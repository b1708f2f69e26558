"""The table of docs/measured/frontier.md is what the script beside it makes of the study's report."""

import json
import runpy
from dataclasses import replace

import pytest

from support.pages import DOCS

MEASURED = DOCS / "measured"
SCRIPT = runpy.run_path(str(MEASURED / "frontier.py"))


@pytest.mark.parametrize("study", ["frontier", "frontier-resnet"])
def test_the_table_on_the_page_is_that_of_the_report(study):
    report = MEASURED / f"{study}.json"
    _, pairs = SCRIPT["pairs_of"](str(report))
    assert len(pairs) == len([row for row in json.loads(report.read_text())["tables"][0]["rows"] if row[-1]])
    assert SCRIPT["table"](pairs) in (MEASURED / "frontier.md").read_text()


def test_the_tables_of_the_real_model_are_those_of_its_reports():
    script = runpy.run_path(str(MEASURED / "what_a_bit_buys.py"))
    all_weights = {"four": ["", "-1"], "two": ["-two"], "eight": ["-eight", "-eight-1"]}
    reports = all_weights | {"LoRA": ["-lora", "-lora-1"], "LoRA, two": ["-lora-two"], "LoRA, eight": ["-lora-eight"]}
    found = {
        name: script["points"]([str(MEASURED / f"what-a-bit-buys{each}.json") for each in scales])
        for name, scales in reports.items()
    }
    for name, scales in all_weights.items():
        assert all(len(point.on) == len(scales) for points in found[name].values() for point in points), name
        assert sum(map(len, found[name].values())) == 22, f"{name}: a run misses"
    assert script["tables"](found) in (MEASURED / "frontier.md").read_text()


def test_a_pair_is_on_the_frontier_if_no_pair_with_fewer_bits_has_a_lower_loss():
    _, (pair, *_) = SCRIPT["pairs_of"](str(MEASURED / "frontier.json"))
    losses = {1.0: 3.0, 2.0: 2.5, 3.0: 2.7, 4.0: 2.0}
    pairs = [replace(pair, name=str(bits), activations=bits, gradients=bits, on=loss) for bits, loss in losses.items()]
    assert [best.name for best in SCRIPT["frontier"](pairs)] == ["1.0", "2.0", "4.0"]
