"""What a run says of slower links when it ends."""

import pytest

from thinwire.launch.recipe.recipe import parse
from thinwire.launch.results import slower_links
from thinwire.launch.results.slower_links import crowding, show_slower_links, speeds

STEPS = 100


@pytest.fixture(autouse=True)
def one_machine(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")


def summary(codec="q(4)", steps=STEPS):
    """The quickstart's: 16 samples a step, 1 s each; 12.5 kB a frame in place of 1 MB."""
    frames = 4 * steps
    rows = [
        {"boundary": boundary, "channel": channel, "codec": codec, "frames": frames, "bytes": 12_500 * frames,
         "uncompressed": 1_000_000 * frames}
        for boundary in range(3)
        for channel in ("activations", "gradients")
    ]  # fmt: skip
    seconds = {"compute": 0.1 * steps, "encode": 0.0, "decode": 0.0}
    stages = [{"stage": stage, "seconds": seconds} for stage in range(4)]
    return {"steps": steps, "metered_from": 0, "training_seconds": 1.0 * steps, "channels": rows, "stages": stages}


def test_a_slow_link_costs_what_its_frames_take():
    here, *predicted = speeds(parse(["quickstart"]), summary()).rows
    assert here == ["this machine, measured", 16.0, None, None]
    found = {link: numbers for link, *numbers in predicted}
    assert list(found) == ["1gbit", "100mbit", "10mbit"]
    # uncompressed at 10 Mbit/s: 4 frames of 0.8 s one after the other and two more to fill, there and back
    uncompressed = 16 / found["10mbit"][1]
    assert 2 * 6 * 0.8 < uncompressed < 2 * 6 * 0.8 + 1.1
    assert found["10mbit"][2] > 5 > found["1gbit"][2] > 1
    assert all(compressed < 16 for compressed, *_ in found.values()), "no link makes a step faster than it was here"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"steps": 5}, "the first steps are slower than the others"),
        ({"codec": "none"}, "there is nothing to gain"),
    ],
)
def test_a_run_that_cannot_tell_says_nothing(changed, why):
    assert speeds(parse(["quickstart"]), summary(**changed)) is None, why


@pytest.mark.parametrize(("everywhere", "here"), [("4", "2"), ("1", "1")])
def test_a_run_over_real_links_or_in_one_process_says_nothing(monkeypatch, everywhere, here):
    monkeypatch.setenv("WORLD_SIZE", everywhere)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    assert speeds(parse(["quickstart"]), summary()) is None


def test_the_table_says_what_is_measured_and_what_is_not(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(slower_links.dist, "get_world_size", lambda: 4)
    show_slower_links(parse(["quickstart"]), summary())
    lines = capsys.readouterr().out.splitlines()
    assert ["this", "machine,", "measured", "16.00", "-", "-"] in [line.split() for line in lines]
    assert any("predicted, not measured" in line for line in lines)
    assert slower_links.PREDICTED in lines and not any("sums of gradients" in line for line in lines)
    show_slower_links(parse(["quickstart"]), summary() | {"shared": [{}]})
    assert "the predicted times leave out sums of gradients of weights" in capsys.readouterr().out
    show_slower_links(parse(["quickstart"]), summary(steps=5))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("cores", "said"), [(4, ""), (2, "4 processes shared 2 cores here;"), (1, "shared 1 core here;")]
)
def test_a_run_says_that_its_processes_had_to_share_cores(monkeypatch, cores, said):
    monkeypatch.setattr(slower_links, "cores", lambda: cores)
    assert said in crowding(parse(["quickstart"])) and bool(said) == bool(crowding(parse(["quickstart"])))
