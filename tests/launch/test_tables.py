import json

import pytest
from rich.console import Console

from thinwire.launch.shared.tables import Table, document, duration_text, show, text_of

TABLE = Table(
    "speed",
    ("codec", "GB/s", "lossless", "[bytes]"),
    (("q(4)", 1.23456, False, 12345), ("none", None, True, 0)),
    note="one thread",
)


def test_a_document_comes_back_from_its_json():
    text = json.dumps(document("bench", [TABLE], machine="a laptop"))
    assert json.loads(text)["machine"] == "a laptop"
    assert json.loads(text)["title"] == "bench"
    [table] = json.loads(text)["tables"]
    assert Table(**table).to_json() == json.loads(json.dumps(TABLE.to_json()))


def test_a_terminal_shows_every_cell_and_takes_no_markup(capsys):
    show([TABLE])
    shown = capsys.readouterr().out
    for word in ("speed", "q(4)", "1.235", "no", "yes", "12,345", "-", "[bytes]"):
        assert word in shown.split(), (word, shown)
    assert "one thread" in shown


def test_numbers_stay_whole_on_a_narrow_terminal():
    """A bench showed 2,155.9 as "2,155." over "9"."""
    numbers = [2155.9, 1.0, 98765.4, 3.25]
    wide = Table(
        "speed",
        ("links", "who", *(f"of what was measured {letter}" for letter in "abcdefgh")),
        (("300 Mbit/s", "aqsgd(q(2))/q(8)", *numbers, *numbers),),
    )
    console = Console(width=80)
    with console.capture() as shown:
        console.print(wide.rich())
    assert [shown.get().split().count(text_of(number)) for number in numbers] == [2] * 4, shown.get()
    assert max(map(len, shown.get().splitlines())) <= 80


def test_what_is_too_wide_for_a_terminal_is_shown_in_parts_that_fit(capsys, monkeypatch):
    """A study's report had lines of 182 characters."""
    monkeypatch.setenv("COLUMNS", "40")
    numbers = [1234.5 + column for column in range(12)]
    show([Table("speed", ("who", *("x" * 9 for _ in numbers)), (("aqsgd(q(2))", *numbers),), "wide")])
    said = capsys.readouterr().out
    assert [word for word in said.split() if word[0] == "1"] == [text_of(number) for number in numbers], said
    assert max(map(len, said.splitlines())) <= 40 and said.count("aqsgd") == 6 and said.count("wide") == 1


def test_a_long_name_stays_readable_in_a_narrow_terminal(capsys, monkeypatch):
    """Names of rows were cut into lines of nine characters, beside columns of dashes as wide."""
    monkeypatch.setenv("COLUMNS", "80")
    names = ("row", *(f"loss of seed {seed}, {what}" for seed in range(4) for what in ("mean", "std")))
    name = 'activations aqsgd(q(2, per="channel", grid="midtread"), first=q(8, step=0.1))'
    show([Table("study", names, [[name, *(3.072, None) * 4]])])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and any('per="channel", grid="midtread"),' in line for line in lines)


def test_markdown_has_the_same_cells():
    assert TABLE.markdown == (
        "## speed\n\n| codec | GB/s | lossless | [bytes] |\n|---|---:|---|---:|\n"
        "| q(4) | 1.235 | no | 12,345 |\n| none | - | yes | 0 |\n\none thread"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.3, "0.3 s"),
        (12, "12 s"),
        (59.6, "1 min"),
        (320, "5 min 20 s"),
        (3600, "1 h"),
        (11_100, "3 h 5 min"),
        (90_000, "1 day 1 h"),
        (172_800, "2 days"),
        (10**6, "11 days 13 h"),
    ],
)
def test_times_are_said_as_people_say_them(seconds, text):
    assert duration_text(seconds) == text


def test_columns_of_numbers_are_known_by_their_cells():
    assert TABLE.numeric == (False, True, False, True)
    assert Table("empty", ("a", "b"), ()).numeric == (False, False)


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (None, "-"),
        (True, "yes"),
        (False, "no"),
        (1234567, "1,234,567"),
        (0.0, "0"),
        (0.00012345, "0.0001234"),
        (999.96, "1000"),
        (123456.7, "123,457"),
        (float("nan"), "nan"),
        ("as it is", "as it is"),
    ],
)
def test_cells_are_told_as_people_read_them(cell, text):
    assert text_of(cell) == text


def test_a_column_of_fractions_lines_up_at_the_point():
    rows = ((0.56, 1e-9, 812.34, 1), (0.6, 2.5, 102, 2), (float("nan"), 0.0, None, 3))
    assert Table("numbers", ("a", "b", "c", "d"), rows).texts == [
        ["0.56", "1e-09", "812.3", "1"],
        ["0.60", "2.5", "102.0", "2"],
        ["nan", "0", "-", "3"],
    ]
    assert Table("far apart", ("a",), ((0.0625,), (65536.5,))).texts == [["0.0625"], ["65,536"]]
    assert Table("empty", ("a",), ()).texts == []


def test_a_row_has_a_cell_a_column():
    with pytest.raises(ValueError, match="got 1 for 2 in row 1 of 'speed'"):
        Table("speed", ("a", "b"), ((1, 2), (3,)))
