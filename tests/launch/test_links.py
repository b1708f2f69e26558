import pytest

from thinwire.launch.shared.links import Links, parse_bandwidth, parse_latency, parse_loss, parse_overrides
from thinwire.pipeline.errors import OptionsError


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_bandwidth, "500kbit", 0.5),
        (parse_bandwidth, "100mbit", 100.0),
        (parse_bandwidth, "2.5gbit", 2500.0),
        (parse_bandwidth, "none", None),
        (parse_bandwidth, " 100MBIT", 100.0),
        (parse_latency, "500us", 0.5),
        (parse_latency, "20ms", 20.0),
        (parse_latency, "1s", 1000.0),
        (parse_loss, "1%", 0.01),
        (parse_loss, "0%", 0.0),
        (parse_overrides, ["1-2:20mbit"], {(1, 2): 20.0, (2, 1): 20.0}),
        (parse_overrides, ["1-2:20mbit", "2>1:none"], {(1, 2): 20.0, (2, 1): None}),
        (parse_overrides, [], {}),
    ],
)
def test_what_people_write_as_numbers(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "said"),
    [
        (parse_bandwidth, "100", "a bandwidth must be like 500kbit, 100mbit, 1gbit, or none, got '100'"),
        (parse_bandwidth, "-1mbit", "a bandwidth must be like 500kbit, 100mbit, 1gbit, or none, got '-1mbit'"),
        (parse_bandwidth, "1MB", "a bandwidth must be like 500kbit, 100mbit, 1gbit, or none, got '1MB'"),
        (parse_latency, "20", "a latency must be like 500us, 20ms or 1s, got '20'"),
        (parse_loss, "0.1", "a loss must be like 0.1% or 1%, got '0.1'"),
        (parse_overrides, ["1-2"], "a link must be like 1-2:20mbit, or 1>2:20mbit for one direction, got '1-2'"),
        (parse_overrides, ["1-2:x"], "a bandwidth must be like 500kbit, 100mbit, 1gbit, or none, got 'x'"),
    ],
)
def test_what_cannot_be_read_is_answered_with_examples(parse, text, said):
    with pytest.raises(OptionsError) as caught:
        parse(text)
    assert str(caught.value) == said


def test_links_that_cannot_be_are_told_all_at_once():
    with pytest.raises(OptionsError) as caught:
        Links(num_hosts=0, bandwidth=0.0, latency=-1, loss=1.0)
    assert str(caught.value).splitlines() == [
        "hosts must be from 1 to 250, got 0",
        "latency must not be negative, got -1 ms",
        "loss must be at least 0 and below 100%, got 100%",
        "a bandwidth must be from 10kbit to 100gbit, or none, got 0 Mbit/s",
    ]


@pytest.mark.parametrize("pair", [(1, 1), (0, 2), (5, 0)])
def test_a_link_joins_two_hosts_that_there_are(pair):
    with pytest.raises(OptionsError) as caught:
        Links(num_hosts=2, overrides={pair: 20.0})
    assert str(caught.value) == f"a link must join two of the hosts 0 to 1, got {min(pair)} and {max(pair)}"
