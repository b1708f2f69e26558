"""Figure 5(c) of 2206.01299 by our arithmetic: the page has what the script computes, and the paper's claim holds."""

import runpy

import pytest

from support.pages import DOCS

MEASURED = DOCS / "measured"
SCRIPT = runpy.run_path(str(MEASURED / "figure5c.py"))


@pytest.fixture(scope="module")
def found():
    return SCRIPT["speeds"]()


@pytest.mark.slow
def test_the_tables_on_the_page_are_those_of_the_script(found):
    page = (MEASURED / "figure5c.md").read_text()
    assert SCRIPT["table"](found) in page
    assert SCRIPT["comparison"](found) in page


def test_the_weights_are_those_of_gpt2_xl():
    """The library's GPT2-XL has 1,557,611,200, its head shared with the embedding; here the head is a second tensor."""
    assert sum(SCRIPT["ELEMENTS"]) == 1_557_611_200 + 50257 * 1600


@pytest.mark.parametrize(("bandwidth", "much"), [(1e9, 1.05), (500e6, 1.25), (300e6, 1.5), (200e6, 1.8), (100e6, 2.3)])
def test_both_compressions_are_needed_on_slow_links(found, bandwidth, much):
    """ "disabling any of them will lead to a much lower training throughput": the slower the link, the lower."""
    speed = {name: found[bandwidth, name].samples_per_second for name in SCRIPT["ROWS"]}
    assert speed["both"] > much * max(speed["activations"], speed["model gradients"])
    assert min(speed["activations"], speed["model gradients"]) > speed["nothing"]
