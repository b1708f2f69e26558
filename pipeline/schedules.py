"""The schedules of torch.distributed.pipelining by name: where stages live, and in what order the work is done.

torch gives every schedule as data, rank -> actions. A real run hands that to its own schedule class; a simulation runs
the same actions on one process, in one order that keeps every stage's own order, so the numbers are the same.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from types import SimpleNamespace
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from thinwire.errors.calls import call, called, first_line
from thinwire.errors.imports import find, is_path
from thinwire.errors.names import colon_hint, did_you_mean
from thinwire.pipeline.errors import OptionsError

Order = dict[int, list[_Action | None]]
FirstForwards = Callable[[int, int], list[int]]
"""(num_stages, num_microbatches) -> how many forwards each stage starts with."""
LossFn = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class ScheduleSpec:
    """One schedule: torch's class, how many stages a process holds, how they lie over the processes, and its rule.

    `placement` is "loop" (stage i on process i % P) or "v" (down the processes and back up). `rule` gives the mistake
    in (num_microbatches, num_stages, num_processes), or None. `first_forwards` gives, for (num_stages,
    num_microbatches), the number of forwards that each stage starts with, if the order is `alternating`; else torch
    gives the order.
    """

    torch_class: Callable[..., Any]
    stages_per_process: int
    placement: Literal["loop", "v"]
    rule: Callable[[int, int, int], str | None]
    first_forwards: FirstForwards | None = None

    def __post_init__(self) -> None:
        per_process, rule = self.stages_per_process, self.rule
        OptionsError.require(
            (
                self.takes_several if self.first_forwards is None else callable(self.torch_class),
                "torch_class of a ScheduleSpec must extend torch's PipelineScheduleMulti, whose order can be read "
                f"before a run, got {self.torch_class!r}; for one stage a process see alternating_schedule",
            ),
            (
                type(per_process) is int and per_process >= 1,
                f"stages_per_process of a ScheduleSpec must be an int of at least 1, got {per_process!r}",
            ),
            (
                self.placement in ("loop", "v"),
                f'placement of a ScheduleSpec must be "loop" or "v", got {self.placement!r}',
            ),
            (callable(rule), f"rule of a ScheduleSpec must be a function, got {rule!r}"),
            (
                self.first_forwards is None or callable(self.first_forwards),
                f"first_forwards of a ScheduleSpec must be a function, got {self.first_forwards!r}",
            ),
        )

    @property
    def takes_several(self) -> bool:
        """Whether torch's class takes a list of stages."""
        return isinstance(self.torch_class, type) and issubclass(self.torch_class, PipelineScheduleMulti)

    def mistakes(self, num_stages: int, per_process: int, num_microbatches: int) -> list[str]:
        """Why this schedule cannot run with these numbers, a sentence for each reason."""
        fixed = self.stages_per_process == 1 or self.placement == "v"
        if per_process < 1 or (fixed and per_process != self.stages_per_process):
            return [f"pipeline.stages_per_process must be {self.stages_per_process} here, got {per_process}"]
        if num_stages % per_process:
            return [f"pipeline.num_stages must be a multiple of {per_process} stages a process, got {num_stages}"]
        broken = call(
            self.rule,
            *(num_microbatches, num_stages, num_stages // per_process),
            name=called(self.rule),
            takes="(num_microbatches, num_stages, num_processes)",
            error=OptionsError,
        )
        if not isinstance(broken, str | None):
            return [f"{called(self.rule)} must return a sentence, or None where nothing is wrong, got {broken!r}"]
        return [broken] if broken else []


def _any_number(num_microbatches: int, num_stages: int, num_processes: int) -> str | None:
    return None


def _fills_the_pipeline(num_microbatches: int, num_stages: int, num_processes: int) -> str | None:
    if num_microbatches >= num_stages:
        return None
    return (
        f"pipeline.num_microbatches must be at least num_stages for this schedule, got {num_microbatches} < "
        f"{num_stages}; raise --pipeline.num_microbatches"
    )


def _whole_rounds(num_microbatches: int, num_stages: int, num_processes: int) -> str | None:
    rounds = max(1, num_microbatches // num_processes)
    if num_microbatches % rounds == 0:
        return None
    return (
        f"pipeline.num_microbatches must be a multiple of its {rounds} rounds over {num_processes} processes for this "
        f"schedule, got {num_microbatches}; take {rounds * (num_microbatches // rounds)}"
    )


def fill_and_drain(num_stages: int, num_microbatches: int) -> list[int]:
    """Forwards each stage runs before its first backward under GPipe: all of them."""
    return [num_microbatches] * num_stages


def one_forward_one_backward(num_stages: int, num_microbatches: int) -> list[int]:
    """Forwards each stage runs before its first backward under Schedule1F1B: S - s on stage s.

    Torch's own table of it (2.13, 2.15) numbers the last stage's forwards from 1, so it is written out here.
    """
    return [min(num_microbatches, num_stages - stage) for stage in range(num_stages)]


def wide_area(num_stages: int, num_microbatches: int, round_trip: float = 2.0) -> list[int]:
    """Forwards each stage runs before its first backward under 1f1b-wan: 2(S - 1 - s) + 1 on stage s.

    `round_trip` is the time of a micro-batch over one boundary, through the next stage and back, in units of one
    forward and one backward: 1 if frames take no time (then this is 1F1B), 2 if they take as long as compute, more over
    links of high latency. Stage 0 holds at most 2S - 1 micro-batches, the last stage holds one.
    """
    return [min(num_microbatches, math.ceil(round_trip * (num_stages - 1 - s)) + 1) for s in range(num_stages)]


def ask_first_forwards(first_forwards: FirstForwards, num_stages: int, num_microbatches: int) -> list[int]:
    """How many forwards each stage starts with, by a function that may be a user's.

    Raises OptionsError if the function fails, or gives numbers that could not run.
    """
    name, numbers = called(first_forwards), (num_stages, num_microbatches)
    takes, where = "(num_stages, num_microbatches)", f"for {num_stages} stages and {num_microbatches} micro-batches"
    found = call(first_forwards, *numbers, name=name, takes=takes, error=OptionsError, where=where)
    if not isinstance(found, list | tuple) or not all(type(number) is int for number in found):
        raise OptionsError(f"{name} must return a list of ints, got {found!r} {where}")
    if len(found) != num_stages:
        raise OptionsError(f"{name} must return a number for each stage, got {found!r} {where}")
    return list(found)


def alternating(first: Sequence[int], num_microbatches: int) -> Order:
    """One stage a process; each runs its number of forwards, then a backward and a forward in turn, then what is left.

    `first` has a number for each stage, 1 .. num_microbatches. A number may not be larger than the one before it: a
    stage cannot run ahead of the stage that feeds it. first [3, 1] with 3 micro-batches:

        stage 0   F0 F1 F2 B0 B1 B2
        stage 1   F0 B0 F1 B1 F2 B2

    Raises OptionsError where these numbers could not run.
    """
    falling = all(later <= earlier for earlier, later in pairwise(first))
    if not falling or not all(1 <= count <= num_microbatches for count in first):
        raise OptionsError(
            f"first forwards must lie in 1..{num_microbatches} and not rise from stage to stage, got {list(first)}"
        )
    order: Order = {}
    for stage, count in enumerate(first):
        forwards = [_Action(stage, _ComputationType.FORWARD, index) for index in range(num_microbatches)]
        backwards = [_Action(stage, _ComputationType.FULL_BACKWARD, index) for index in range(num_microbatches)]
        turns = chain.from_iterable(zip(backwards, forwards[count:], strict=False))
        order[stage] = [*forwards[:count], *turns, *backwards[num_microbatches - count :]]
    return order


def alternating_schedule(first_forwards: FirstForwards) -> ScheduleSpec:
    """A schedule of one stage a process, by the forwards each stage starts with: a row of `SCHEDULES`, or your own."""
    return ScheduleSpec(partial(_alternating_runtime, first_forwards), 1, "loop", _any_number, first_forwards)


def _alternating_runtime(
    first_forwards: FirstForwards, stage: PipelineStage, num_microbatches: int, *, loss_fn: LossFn, scale_grads: bool
) -> Any:
    """Torch's runtime with our own order, in the place of a schedule class of torch."""
    schedule = _PipelineScheduleRuntime([stage], num_microbatches, loss_fn=loss_fn, scale_grads=scale_grads)
    order = alternating(ask_first_forwards(first_forwards, stage.num_stages, num_microbatches), num_microbatches)
    schedule._prepare_schedule_with_comms(order)
    return schedule


class Schedules(dict[str, ScheduleSpec]):
    """The schedules by name; `module:name` is imported, and must be a `ScheduleSpec` of your own."""

    def __missing__(self, name: str) -> ScheduleSpec:
        if not is_path(name):
            hint = did_you_mean(name, self) or colon_hint(name)
            raise OptionsError(
                f"pipeline.schedule must be one of {', '.join(self)}, or module:name for your own, got {name}{hint}"
            )
        found = find(name, OptionsError, "pipeline.schedule")
        if not isinstance(found, ScheduleSpec):
            raise OptionsError(f"pipeline.schedule {name} must be a ScheduleSpec, got {type(found).__name__}")
        return found


SCHEDULES: Mapping[str, ScheduleSpec] = Schedules(
    {
        "gpipe": ScheduleSpec(ScheduleGPipe, 1, "loop", _any_number, fill_and_drain),
        "1f1b": ScheduleSpec(Schedule1F1B, 1, "loop", _fills_the_pipeline, one_forward_one_backward),
        "1f1b-wan": alternating_schedule(wide_area),
        "looped-bfs": ScheduleSpec(ScheduleLoopedBFS, 2, "loop", _any_number),
        "interleaved-1f1b": ScheduleSpec(ScheduleInterleaved1F1B, 2, "loop", _whole_rounds),
        "interleaved-zero-bubble": ScheduleSpec(ScheduleInterleavedZeroBubble, 2, "loop", _whole_rounds),
        "zbv-zero-bubble": ScheduleSpec(ScheduleZBVZeroBubble, 2, "v", _any_number),
        "dualpipev": ScheduleSpec(ScheduleDualPipeV, 2, "v", _fills_the_pipeline),
    }
)
"""Name -> schedule; a name that is not here is the path of one's own."""


def process_of_stages(name: str, num_stages: int, num_processes: int) -> dict[int, int]:
    """Stage index -> process, for a schedule by name."""
    return dict(generate_stage_to_rank_mapping(num_processes, num_stages, SCHEDULES[name].placement))


def build(name: str, stages: Sequence[PipelineStage], num_microbatches: int, loss_fn: LossFn) -> Any:
    """Torch's schedule over this process's stages; gradients are not scaled, the loss already is."""
    spec = SCHEDULES[name]
    first = list(stages) if spec.takes_several else stages[0]
    return spec.torch_class(first, num_microbatches, loss_fn=loss_fn, scale_grads=False)


def build_merged(
    order: Sequence[_Action], stages: Sequence[PipelineStage], num_microbatches: int, loss_fn: LossFn
) -> Any:
    """A schedule that runs `order` with every stage on this one process."""
    schedule = _PipelineScheduleRuntime(list(stages), num_microbatches, loss_fn=loss_fn, scale_grads=False)
    # as it is: torch would add steps for sharded weights and for reduced gradients, which do nothing here
    schedule._prepare_schedule_with_comms({0: list(order)}, format="compute_comms")
    return schedule


def actions(name: str, num_stages: int, num_processes: int, num_microbatches: int) -> Order:
    """The schedule's compute as data: process -> actions in order, None where it idles. Needs no process group."""
    first_forwards = SCHEDULES[name].first_forwards
    if first_forwards is not None:
        return alternating(ask_first_forwards(first_forwards, num_stages, num_microbatches), num_microbatches)
    stage_of = process_of_stages(name, num_stages, num_processes)
    stages = [
        SimpleNamespace(
            stage_index=index,
            num_stages=num_stages,
            group_size=num_processes,
            group_rank=0,
            submod=nn.Identity(),
            device="cpu",
            has_backward=True,
            is_first=index == 0,
            is_last=index == num_stages - 1,
        )
        for index in range(num_stages)
        if stage_of[index] == 0
    ]
    order = _order_alone(SCHEDULES[name].torch_class)(stages, num_microbatches, loss_fn=nn.Identity()).pipeline_order
    return {
        process: [action for action in row if action is None or action.is_compute_op] for process, row in order.items()
    }


def splits_backward(name: str, num_stages: int, num_processes: int, num_microbatches: int) -> bool:
    """Whether the schedule computes the gradients of inputs and those of weights apart."""
    rows = actions(name, num_stages, num_processes, num_microbatches).values()
    parts = chain.from_iterable(_parts(action) for row in rows for action in row if action is not None)
    return any(part.computation_type is _ComputationType.BACKWARD_INPUT for part in parts)


def check_order(name: str, num_stages: int, num_processes: int, num_microbatches: int) -> None:
    """Work out the order of a user's schedule, so that one that cannot run is reported at once.

    Raises OptionsError if its functions fail, if a forward or backward is lacking, comes twice, or waits for itself, or
    if a stage does not lie where the order runs it.
    """
    try:
        order = actions(name, num_stages, num_processes, num_microbatches)
        _require_each_once(order, num_stages, num_microbatches)
        merge(order)
    except OptionsError as error:
        raise OptionsError([f"pipeline.schedule {name}: {mistake}" for mistake in error.mistakes]) from error
    except Exception as error:
        raise OptionsError(f"pipeline.schedule {name} must give an order that can run: {first_line(error)}") from error
    place = process_of_stages(name, num_stages, num_processes)
    for process, row in order.items():
        for action in filter(None, row):
            if away := [part.stage_index for part in _parts(action) if place[part.stage_index] != process]:
                raise OptionsError(
                    f"pipeline.schedule {name} must run each stage on its process, got stage {away[0]} on process "
                    f'{process}, where placement="{SCHEDULES[name].placement}" puts it on {place[away[0]]}'
                )


def _require_each_once(order: Order, num_stages: int, num_microbatches: int) -> None:
    done = Counter(_yields(part) for row in order.values() for action in filter(None, row) for part in _parts(action))
    stages, microbatches = range(num_stages), range(num_microbatches)
    wanted = [(kind, s, m) for kind in ("forward", "backward") for s in stages for m in microbatches]
    wrong = next((work for work in wanted if done[work] != 1), None)
    if wrong is not None:
        kind, stage, microbatch = wrong
        raise OptionsError(
            f"an order must run each forward and backward once, got {done[wrong]} {kind}s of micro-batch {microbatch} "
            f"on stage {stage}"
        )


def _order_alone(torch_class: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's class without the additions that it needs only to run; they take most of its time."""
    assert isinstance(torch_class, type)
    return type(torch_class.__name__, (torch_class,), {"_prepare_schedule_with_comms": lambda *_, **__: None})


def merge(order: Mapping[int, Sequence[_Action | None]]) -> list[_Action]:
    """One sequence of all processes' actions: every process's own order kept, nothing before what it depends on.

    Processes take turns, each advancing one action if its input has been computed: a forward needs the previous
    stage's forward of that micro-batch, a backward the next stage's (input) backward.
    """
    waiting = {process: deque(action for action in row if action is not None) for process, row in order.items()}
    last_stage = max(part.stage_index for row in waiting.values() for action in row for part in _parts(action))
    done: set[tuple[str, int, int]] = set()
    merged: list[_Action] = []
    while any(waiting.values()):
        progressed = False
        for row in waiting.values():
            if row and all(need in done for part in _parts(row[0]) for need in _needs(part, last_stage)):
                action = row.popleft()
                merged.append(action)
                done.update(_yields(part) for part in _parts(action))
                progressed = True
        if not progressed:
            works = [_yields(_parts(row[0])[0]) for row in waiting.values() if row]
            heads = ", ".join(f"the {kind} of micro-batch {m} on stage {s}" for kind, s, m in works)
            raise OptionsError(f"an order must not wait for itself, and each process is about to wait: {heads}")
    return merged


def _parts(action: _Action) -> Sequence[_Action]:
    return action.sub_actions or (action,)


def _kind(action: _Action) -> str:
    return {"B": "backward", "I": "backward", "F": "forward"}.get(str(action.computation_type.value), "other")


def _yields(action: _Action) -> tuple[str, int, int]:
    assert action.microbatch_index is not None
    return _kind(action), action.stage_index, action.microbatch_index


def _needs(action: _Action, last_stage: int) -> list[tuple[str, int, int]]:
    kind, stage, microbatch = _yields(action)
    if kind == "forward" and stage > 0:
        return [("forward", stage - 1, microbatch)]
    if kind == "backward" and stage < last_stage:
        return [("backward", stage + 1, microbatch)]
    return []
