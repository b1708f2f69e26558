import pytest

from thinwire.launch.shared.links import parse_bandwidth, parse_latency
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
    ],
)
def test_what_cannot_be_read_is_answered_with_examples(parse, text, said):
    with pytest.raises(OptionsError) as caught:
        parse(text)
    assert str(caught.value) == said
