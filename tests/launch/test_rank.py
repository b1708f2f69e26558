"""Variables of torchrun: read where a process group is meant, ignored elsewhere, and never a traceback."""

from contextlib import nullcontext

import pytest

from support.run_files import summary
from support.tiny_run import write_recipe
from thinwire.launch import cli
from thinwire.launch.processes import stage
from thinwire.launch.run import assembly
from thinwire.launch.shared.rank import check_rendezvous, is_spread, own_rank, processes_of_host
from thinwire.pipeline.devices import device
from thinwire.pipeline.errors import OptionsError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture
def told(monkeypatch):
    """Sets the variables, and removes those that are not given."""

    def tell(**values):
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    tell()
    return tell


def test_without_a_rank_the_other_variables_are_nobodys(told):
    told(WORLD_SIZE="many", LOCAL_RANK="first")
    assert own_rank() is None


def test_a_rank_of_torchrun_is_read(told):
    told(RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    assert own_rank() == 3


def test_all_wrong_values_are_told_at_once(told):
    told(RANK="zero", LOCAL_RANK="-1")
    with pytest.raises(OptionsError) as caught:
        own_rank()
    starts = [mistake.partition(";")[0] for mistake in caught.value.mistakes]
    assert starts == [
        "RANK must be a whole number where RANK is set, got 'zero'",
        "WORLD_SIZE must be a whole number where RANK is set, got nothing",
        "LOCAL_RANK must be a whole number where RANK is set, got '-1'",
    ]
    told(RANK="2", WORLD_SIZE="2")
    with pytest.raises(OptionsError, match="RANK must be below WORLD_SIZE, got 2 of 2; start the processes with torch"):
        own_rank()


@pytest.mark.parametrize(
    ("address", "port", "said"),
    [
        (None, None, ["MASTER_ADDR must be an address where RANK is set, got nothing", "got nothing"]),
        ("host", "x", ["MASTER_PORT must be a port where RANK is set, got 'x'"]),
        ("host", "70000", ["MASTER_PORT must be a port where RANK is set, got '70000'"]),
        ("host", "29500", []),
    ],
)
def test_a_process_with_a_rank_is_told_where_the_others_are(monkeypatch, address, port, said):
    for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(OptionsError) if said else nullcontext() as caught:
        check_rendezvous()
    if said:
        assert all(part in told for part, told in zip(said, caught.value.mistakes, strict=True)), caught.value


def test_training_with_a_rank_and_nowhere_to_meet_is_a_sentence(told, monkeypatch, capsys):
    """It was a traceback of torch, after the data had been read."""
    monkeypatch.setattr(stage.parent, "end_with_parent", lambda: None)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    told(RANK="0", WORLD_SIZE="2")
    assert cli.main(["train", "gpt2-tiny"]) == 2
    assert "MASTER_ADDR must be an address where RANK is set, got nothing; start" in capsys.readouterr().err


@pytest.mark.parametrize(("here", "spread"), [(None, True), ("1", True), ("2", False)])
def test_a_process_that_is_not_told_of_others_on_its_host_has_it_alone(told, here, spread):
    """One place took them to be on one host, another on several."""
    told(RANK="1", WORLD_SIZE="2", **({} if here is None else {"LOCAL_WORLD_SIZE": here}))
    assert (is_spread(1), processes_of_host()) == (spread, int(here or 1))


def test_training_answers_a_wrong_value_with_a_sentence(told, monkeypatch, capsys):
    monkeypatch.setattr(stage.parent, "end_with_parent", lambda: None)
    told(RANK="zero", WORLD_SIZE="2")
    assert cli.main(["train", "gpt2-tiny"]) == 2
    assert "RANK must be a whole number where RANK is set, got 'zero'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_simulation_ignores_them(told, tmp_path, monkeypatch):
    """With an outline and RANK it took itself for a stage process, and ended in a traceback."""
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    told(RANK="1", WORLD_SIZE="x", LOCAL_RANK="y", LOCAL_WORLD_SIZE="z")
    given = ["--data.outline", "nowhere.json", "--training.steps", "1", "--data.held_out", "0", "--output", "run"]
    assert cli.main(["simulate", "tiny.yaml", *given]) == 0
    assert summary(tmp_path / "run")["steps"] == 1


@pytest.mark.parametrize(
    ("values", "spread"),
    [
        ({"WORLD_SIZE": "4"}, False),
        ({"RANK": "0", "WORLD_SIZE": "4"}, True),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, True),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, False),
    ],
)
def test_a_run_has_other_hosts_only_where_a_process_group_is_meant(told, values, spread):
    told(**values)
    assert is_spread(own_rank()) is spread


class Chosen(Exception):
    """Ends a run where it has chosen its device."""


def test_a_simulation_takes_the_first_gpu_whatever_the_environment_says(told, tmp_path, monkeypatch):
    """A cluster set LOCAL_RANK for other programs, and the simulation took that GPU."""
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)

    def use(device):
        raise Chosen(device)

    monkeypatch.setattr(device, "num_gpus", lambda: 4)
    monkeypatch.setattr(assembly, "use", use)
    told(RANK="1", LOCAL_RANK="3", WORLD_SIZE="8")
    with pytest.raises(Chosen, match="cuda:0"):
        cli.main(["simulate", "tiny.yaml", "--training.device", "cuda", "--output", "run"])
