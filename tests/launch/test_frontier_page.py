"""The table of docs/measured/frontier.md is what the script beside it makes of the study's report."""

import json
import runpy
from dataclasses import replace

from support.pages import DOCS

MEASURED = DOCS / "measured"
SCRIPT = runpy.run_path(str(MEASURED / "frontier.py"))


def test_the_table_on_the_page_is_that_of_the_report():
    _, pairs = SCRIPT["pairs_of"](str(MEASURED / "frontier.json"))
    page = (MEASURED / "frontier.md").read_text()
    assert len(pairs) == len(
        [row for row in json.loads((MEASURED / "frontier.json").read_text())["tables"][0]["rows"] if row[-1]]
    )
    assert SCRIPT["table"](pairs) in page


def test_a_pair_is_on_the_frontier_if_no_pair_with_fewer_bits_has_a_lower_loss():
    _, (pair, *_) = SCRIPT["pairs_of"](str(MEASURED / "frontier.json"))
    losses = {1.0: 3.0, 2.0: 2.5, 3.0: 2.7, 4.0: 2.0}
    pairs = [replace(pair, name=str(bits), activations=bits, gradients=bits, on=loss) for bits, loss in losses.items()]
    assert [best.name for best in SCRIPT["frontier"](pairs)] == ["1.0", "2.0", "4.0"]
