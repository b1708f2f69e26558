"""The order of a schedule, as the simulation of a step takes it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from thinwire.pipeline.schedules import actions, merge, process_of_stages

FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "I", "W"
"""Kinds of action, as torch writes them; a backward that is not split is another."""


class Action(NamedTuple):
    """A forward, a backward or a part of one, of a micro-batch on a stage."""

    process: int
    stage: int
    microbatch: int
    kind: str
    source: int | None
    """The index of the action of another stage whose output it waits for; None if it needs none."""
    target: int | None
    """The process of the stage that takes its output; None if no other stage does."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Timetable:
    """All actions of one pass through a schedule."""

    num_stages: int
    num_processes: int
    actions: tuple[Action, ...]
    """Every process's own order kept, and nothing before what it waits for."""

    def held(self, by: Literal["process", "stage"]) -> list[int]:
        """The most micro-batches whose activations each process, over all its stages, or each stage keeps at one time.

        They are forwards whose backward is not complete.
        """
        count = self.num_processes if by == "process" else self.num_stages
        kept, most = [0] * count, [0] * count
        for action in self.actions:
            holder: int = getattr(action, by)
            kept[holder] += {FORWARD: 1, BACKWARD_INPUT: 0}.get(action.kind, -1)
            most[holder] = max(most[holder], kept[holder])
        return most


@lru_cache(maxsize=16)
def timetable(schedule: str, num_stages: int, num_processes: int, num_microbatches: int) -> Timetable:
    """The timetable of a schedule by name. Actions that torch overlaps come one after another, as they run.

    Call it only with numbers in which `SCHEDULES[schedule].mistakes` finds no mistake.
    """
    where = process_of_stages(schedule, num_stages, num_processes)
    found = list[Action]()
    given = dict[tuple[bool, int, int], int]()  # what takes an output -> the index of the action that gives it
    for together in merge(actions(schedule, num_stages, num_processes, num_microbatches)):
        for part in together.sub_actions or (together,):
            kind, stage, microbatch = str(part.computation_type.value), part.stage_index, part.microbatch_index
            assert microbatch is not None
            forward = kind == FORWARD
            taker = stage + 1 if forward else stage - 1
            source = given.pop((forward, stage, microbatch), None)
            target = None if kind == BACKWARD_WEIGHT else where.get(taker)
            if target is not None:
                given[forward, taker, microbatch] = len(found)
            found.append(Action(where[stage], stage, microbatch, kind, source, target))
    return Timetable(num_stages=num_stages, num_processes=num_processes, actions=tuple(found))
