import inspect

import pytest
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.pipelining import schedules as torch_schedules

from support.own_code import add_module
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.options import PipelineOptions
from thinwire.pipeline.schedules import (
    SCHEDULES,
    ScheduleSpec,
    actions,
    alternating,
    alternating_schedule,
    merge,
    one_forward_one_backward,
    process_of_stages,
    wide_area,
)


def names(row):
    return [str(action) for action in row if action is not None]


def test_gpipe_on_two_stages_is_this_table():
    order = actions("gpipe", num_stages=2, num_processes=2, num_microbatches=2)
    assert {process: names(row) for process, row in order.items()} == {
        0: ["0F0", "0F1", "0B0", "0B1"],
        1: ["1F0", "1F1", "1B0", "1B1"],
    }
    assert names(merge(order)) == ["0F0", "1F0", "0F1", "1F1", "1B0", "0B0", "1B1", "0B1"]


def test_1f1b_on_two_stages_is_this_table():
    order = actions("1f1b", num_stages=2, num_processes=2, num_microbatches=3)
    assert {process: names(row) for process, row in order.items()} == {
        0: ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"],
        1: ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"],
    }


def test_1f1b_wan_on_three_stages_is_this_table():
    order = actions("1f1b-wan", num_stages=3, num_processes=3, num_microbatches=6)
    assert {process: " ".join(names(row)) for process, row in order.items()} == {
        0: "0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0B2 0B3 0B4 0B5",
        1: "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5",
        2: "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5",
    }


def test_warm_up_may_be_what_a_round_trip_asks_for():
    assert wide_area(4, 32, round_trip=1.0) == one_forward_one_backward(4, 32) == [4, 3, 2, 1]
    assert wide_area(4, 32) == [7, 5, 3, 1]
    assert wide_area(4, 8, round_trip=2.5) == [8, 6, 4, 1]
    order = alternating([3, 1], num_microbatches=3)
    assert names(order[0]) == ["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]
    assert names(order[1]) == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]


@pytest.mark.parametrize("first", [[1, 2], [4, 1], [1, 0]])
def test_first_forwards_that_cannot_run_are_refused(first):
    with pytest.raises(OptionsError, match=r"must lie in 1\.\.3 and not rise from stage to stage, got"):
        alternating(first, num_microbatches=3)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_merging_keeps_every_stages_order_and_every_dependency(name, num_processes):
    num_stages = num_processes * SCHEDULES[name].stages_per_process
    order = actions(name, num_stages, num_processes, num_microbatches=8)
    merged = merge(order)
    flat = [part for action in merged for part in (action.sub_actions or (action,))]
    for row in order.values():
        kept = [action for action in row if action is not None]
        assert [action for action in merged if action in kept] == kept
    place = {(part.stage_index, part.computation_type.value, part.microbatch_index): i for i, part in enumerate(flat)}
    assert len(place) == len(flat), "an action stands twice"
    for (stage, kind, microbatch), position in place.items():
        if kind == "F" and stage > 0:
            assert place[stage - 1, "F", microbatch] < position
        if kind in "BI" and stage < num_stages - 1:
            after = place.get((stage + 1, "B", microbatch), place.get((stage + 1, "I", microbatch)))
            assert after < position


def test_v_schedules_go_down_and_back_up():
    assert process_of_stages("zbv-zero-bubble", num_stages=4, num_processes=2) == {0: 0, 1: 1, 2: 1, 3: 0}
    assert process_of_stages("interleaved-1f1b", num_stages=4, num_processes=2) == {0: 0, 1: 1, 2: 0, 3: 1}


@pytest.mark.parametrize(
    ("name", "num_stages", "per_process", "num_microbatches", "said"),
    [
        ("gpipe", 4, 2, 4, "pipeline.stages_per_process must be 1 here, got 2"),
        ("zbv-zero-bubble", 6, 3, 6, "pipeline.stages_per_process must be 2 here, got 3"),
        ("interleaved-1f1b", 5, 2, 4, "pipeline.num_stages must be a multiple of 2 stages a process, got 5"),
        ("1f1b", 4, 1, 2, "at least num_stages for this schedule, got 2 < 4; raise --pipeline.num_microbatches"),
        ("interleaved-1f1b", 4, 2, 5, "multiple of its 2 rounds over 2 processes for this schedule, got 5; take 4"),
        ("dualpipev", 4, 2, 3, "at least num_stages for this schedule, got 3 < 4"),
    ],
)
def test_impossible_numbers_are_told(name, num_stages, per_process, num_microbatches, said):
    (mistake,) = SCHEDULES[name].mistakes(num_stages, per_process, num_microbatches)
    assert said in mistake


@pytest.mark.parametrize("name", SCHEDULES)
def test_possible_numbers_are_not(name):
    per_process = SCHEDULES[name].stages_per_process
    assert SCHEDULES[name].mistakes(4 * per_process, per_process, 8) == []


@pytest.mark.parametrize("name", [name for name, spec in SCHEDULES.items() if spec.first_forwards is None])
def test_an_order_is_made_without_what_torch_adds_to_run_it(name, monkeypatch):
    """That took most of the minute that the orders of a thousand stages took."""

    def lowered(*arguments, **options):
        raise AssertionError("torch has lowered the order")

    monkeypatch.setattr(torch_schedules._PipelineScheduleRuntime, "_prepare_schedule_with_comms", lowered)
    assert sorted(actions(name, 4, 2, 4)) == [0, 1]


def test_the_help_of_the_option_names_every_schedule():
    source = inspect.getsource(PipelineOptions)
    told = source.partition("Order of the work")[2].partition('"""')[0].replace("(", " ").replace(")", " ")
    assert set(SCHEDULES) <= set(told.replace(",", " ").split())


OWN = """
from torch.distributed.pipelining import ScheduleLoopedBFS, ScheduleZBVZeroBubble
from thinwire.pipeline.schedules import ScheduleSpec, alternating_schedule


def refuse(num_microbatches, num_stages, num_processes):
    return "pipeline.num_microbatches must be even for this schedule" if num_microbatches % 2 else None


class Forgetful(ScheduleLoopedBFS):
    def _calculate_single_rank_operations(self, rank):
        return super()._calculate_single_rank_operations(rank)[:-1]


class Gap(ScheduleLoopedBFS):
    def _calculate_single_rank_operations(self, rank):
        return [action for action in super()._calculate_single_rank_operations(rank) if str(action) != "2B1"]


class Waiting(ScheduleLoopedBFS):
    def _calculate_single_rank_operations(self, rank):
        return super()._calculate_single_rank_operations(rank)[::-1]


def of(torch_class, rule=lambda *numbers: None):
    return ScheduleSpec(torch_class, 2, "loop", rule)


good = of(ScheduleLoopedBFS)
picky = of(ScheduleLoopedBFS, refuse)
chatty = of(ScheduleLoopedBFS, lambda *numbers: True)
narrow = of(ScheduleLoopedBFS, lambda number: None)
forgetful, gap, waiting, misplaced = of(Forgetful), of(Gap), of(Waiting), of(ScheduleZBVZeroBubble)
few = alternating_schedule(lambda stages, microbatches: [1])
floats = alternating_schedule(lambda stages, microbatches: [microbatches / 2] * stages)
one_argument = alternating_schedule(lambda stages: [1] * stages)
failing = alternating_schedule(lambda stages, microbatches: [1 / 0])
rising = alternating_schedule(lambda stages, microbatches: list(range(1, stages + 1)))
none = alternating_schedule(lambda stages, microbatches: None)
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("picky", "pipeline.num_microbatches must be even for this schedule"),
        ("chatty", "own_schedules.<lambda> must return a sentence, or None where nothing is wrong, got True"),
        (
            "narrow",
            "own_schedules.<lambda> must take (num_microbatches, num_stages, num_processes): too many positional",
        ),
        (
            "forgetful",
            "pipeline.schedule own_schedules:forgetful: an order must run each forward and backward once, got 0 backw",
        ),
        (
            "gap",
            "pipeline.schedule own_schedules:gap: an order must run each forward and backward once, got 0 backwards of "
            "micro-batch 1 on stage 2",
        ),
        (
            "waiting",
            "pipeline.schedule own_schedules:waiting: an order must not wait for itself, and each process is about "
            "to wait: the backward of micro-batch 0 on stage 0, the backward of micro-batch 0 on stage 1",
        ),
        (
            "misplaced",
            "pipeline.schedule own_schedules:misplaced must run each stage on its process, got stage 3 on proc",
        ),
        (
            "few",
            "pipeline.schedule own_schedules:few: own_schedules.<lambda> must return a number for each stage, got [1]",
        ),
        (
            "floats",
            "pipeline.schedule own_schedules:floats: own_schedules.<lambda> must return a list of ints, got [2.5",
        ),
        ("none", "pipeline.schedule own_schedules:none: own_schedules.<lambda> must return a list of ints, got None"),
        (
            "one_argument",
            "pipeline.schedule own_schedules:one_argument: own_schedules.<lambda> must take (num_stages, ",
        ),
        (
            "failing",
            "pipeline.schedule own_schedules:failing: own_schedules.<lambda> failed for 4 stages and 5 micro-ba",
        ),
        (
            "rising",
            "pipeline.schedule own_schedules:rising: first forwards must lie in 1..5 and not rise from stage to",
        ),
    ],
)
def test_a_mistake_in_a_schedule_of_ones_own_is_one_sentence(monkeypatch, name, said):
    add_module(monkeypatch, "own_schedules", OWN)
    with pytest.raises(OptionsError) as caught:
        PipelineOptions(num_stages=4, num_microbatches=5, schedule=f"own_schedules:{name}")
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_a_schedule_of_ones_own_is_taken(monkeypatch):
    add_module(monkeypatch, "own_schedules", OWN)
    assert PipelineOptions(num_stages=4, num_microbatches=5, schedule="own_schedules:good").num_processes == 2
    assert PipelineOptions(num_stages=4, num_microbatches=6, schedule="own_schedules:picky").num_processes == 2


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: ScheduleSpec(Schedule1F1B, 1, "loop", lambda *numbers: None),
            "torch_class of a ScheduleSpec must extend torch's PipelineScheduleMulti, whose order can be read before a "
            f"run, got {Schedule1F1B}; for one stage a process see alternating_schedule",
        ),
        (
            lambda: alternating_schedule([1, 2]),
            "first_forwards of a ScheduleSpec must be a function, got [1, 2]",
        ),
    ],
)
def test_a_description_that_cannot_be_right_is_refused_when_it_is_made(make, said):
    with pytest.raises(OptionsError) as caught:
        make()
    assert str(caught.value) == said


def test_a_description_that_cannot_be_right_is_told_with_its_module(tmp_path, monkeypatch):
    text = "from thinwire.pipeline.schedules import alternating_schedule\nshort = alternating_schedule([1])\n"
    (tmp_path / "wrong_schedules.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OptionsError) as caught:
        PipelineOptions(schedule="wrong_schedules:short")
    said = "module wrong_schedules of 'wrong_schedules:short': first_forwards of a ScheduleSpec must be a function"
    assert str(caught.value) == f"pipeline.schedule: {said}, got [1]"
