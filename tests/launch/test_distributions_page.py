"""The page on distributions: its table is that of its numbers, and its measures are right for known tensors."""

import json
import runpy

import pytest
import torch

from support.pages import DOCS

MEASURED = DOCS / "measured"
SCRIPT = runpy.run_path(str(MEASURED / "distributions.py"))


def with_nan(row):
    """The measures of a tensor; JSON has null for a kurtosis that a tensor of zeros has not."""
    return {name: float("nan") if value is None else value for name, value in row.items()}


def numbers():
    """What distributions.json has, with keys as the script has them."""
    told = json.loads((MEASURED / "distributions.json").read_text())
    return {
        model: {
            float(epoch): {(key.split()[0], int(key.split()[1])): with_nan(row) for key, row in rows.items()}
            for epoch, rows in by_epoch.items()
        }
        for model, by_epoch in told.items()
    }


def test_the_table_on_the_page_is_that_of_the_numbers():
    assert SCRIPT["table"](numbers()) in (MEASURED / "distributions.md").read_text()


def test_known_tensors_have_known_measures():
    torch.manual_seed(0)
    gaussian = torch.randn(2000, 50).double()
    found = SCRIPT["measured"](1e-6 * gaussian)
    assert found["excess kurtosis"] == pytest.approx(0, abs=0.1) and found["zeros, %"] == 0
    assert found["largest channel / median"] == pytest.approx(1, abs=0.1)
    assert found["energy of the largest 10 %"] == pytest.approx(43.9, abs=1), "beyond 1.645 deviations"
    gaussian[:, 7] *= 20
    heavy = SCRIPT["measured"](gaussian.relu())
    assert heavy["excess kurtosis"] > 20 and heavy["zeros, %"] == pytest.approx(50, abs=1)
    assert heavy["largest channel / median"] == pytest.approx(20, rel=0.1)
