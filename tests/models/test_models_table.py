"""The tables of models in docs/reference/models.md: all that tests cut, read and export, and why others are refused."""

import re

import pytest
from transformers import CONFIG_MAPPING

from support.family_cases import ALL
from support.models import blueprint
from support.pages import DOCS
from thinwire.models.errors import ModelError
from thinwire.models.options import ModelOptions

DOCUMENT = DOCS / "reference" / "models.md"
KINDS = {"causal-lm": "language models", "classification": "classifiers of text"}
REFUSED = {
    "blocks hand on more than the hidden state": "blocks of this model hand on more than the hidden state",
    "blocks run more than once": "must run each of its .* blocks once",
    "the blocks are not one list": "must have its blocks in one list",
    "weights stand outside of modules": "must hold its weights in modules",
    "the forward does not run in parts": "must run block by block, and does not",
    "no tiny copy can be made": "must be compared with a tiny copy of itself, and none can be made",
    "images or sound are read too": "must be one that reads text alone",
}
"""Why a language model is refused -> what the error says."""


def test_the_page_names_the_families_that_tests_run_with():
    rows = re.findall(rf"^\| (.+) \| ({'|'.join(KINDS.values())}) \|", DOCUMENT.read_text(), re.MULTILINE)
    named = [(name, kind) for names, kind in rows for name in re.findall("`(.+?)`", names)]
    assert named == sorted(named, key=lambda each: (list(KINDS.values()).index(each[1]), each[0]))
    assert {*named} == {(case.family, KINDS[case.task]) for case in ALL.values()}


def refused():
    """Families that the page says are refused in their default configurations, and why."""
    found = re.findall(r"^\| ((?:`[\w-]+`,? ?)+) \| (.+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    return {name: why for names, why in found if why in REFUSED for name in re.findall("`(.+?)`", names)}


def test_every_reason_is_on_the_page():
    assert {*refused().values()} == {*REFUSED}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in refused() if name in CONFIG_MAPPING])
def test_a_family_is_refused_for_the_reason_on_the_page(name):
    with pytest.raises(ModelError, match=REFUSED[refused()[name]]):
        blueprint(ModelOptions(name=name), task="causal-lm").compare()
