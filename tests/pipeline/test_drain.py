"""What of the exchange between replicas was hidden, from times by several clocks."""

import pytest

from thinwire.pipeline.replicas.step_exchanges import hidden, reported

# stage 2 is done first; stage 0 begins at 6 and at 16
EXCHANGES = [[(6.0, 8.0), (16.0, 18.0)], [(4.0, 5.0), (14.0, 18.0)], [(2.0, 7.0), (12.0, 16.0)]]


def test_what_lies_before_the_last_stage_begins_is_hidden():
    assert hidden(EXCHANGES) == pytest.approx([0.0, (1 + 2) / (1 + 4), (4 + 4) / (5 + 4)])


def test_times_are_put_on_one_clock_stage_by_stage():
    """Each clock says t; the next one says 2 t + 100, or 0.5 t - 3."""
    lines = [(2.0, 100.0), (0.5, -3.0)]
    clocks = [lambda t: (((t + 3) / 0.5) - 100) / 2, lambda t: (t + 3) / 0.5, lambda t: t]
    reports = [
        {
            "seconds": {"encode": 1.0},
            "last": [tuple(map(clock, pair)) for pair in pairs],
            "next_clock": line,
        }
        for clock, pairs, line in zip(clocks, EXCHANGES, [*lines, (1.0, 0.0)], strict=True)
    ]
    shares = [stage["hidden"] for stage in reported(reports)]
    assert shares == pytest.approx(hidden(EXCHANGES))
    assert reported(reports)[0]["encode"] == 1.0


@pytest.mark.parametrize("unknown", [{"last": []}, {"next_clock": None}])
def test_nothing_is_said_about_what_is_not_known(unknown):
    report = {"seconds": {"wire": 2.0}, "last": [(1.0, 2.0)], "next_clock": (1.0, 0.0)}
    assert reported([report, {**report, **unknown}]) == [{"wire": 2.0, "hidden": None}] * 2
