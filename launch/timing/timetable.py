"""The order of a schedule as arrays, in rounds of actions that do not depend on each other.

The seconds of an action do not change the order. So an order is compiled once, and simulated often: each round takes a
few operations over arrays, for two stages or a thousand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from thinwire.pipeline.schedules import SCHEDULES, Order, actions, placement

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = range(4)
"""The kinds of action. A backward is whole, or split in two."""
_KIND_OF = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD_INPUT, "W": BACKWARD_WEIGHT}

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Timetable:
    """All actions of one pass through a schedule, round after round. Arrays are [actions] unless said otherwise.

    An action waits for a message and gives one. Message s * M + m is the activation of micro-batch m that stage s
    takes; S * M + s * M + m is the gradient that it takes. Message 2 * S * M is no message, and always there.
    """

    num_stages: int
    num_microbatches: int
    process_of: Integers
    """[stages]: the process of each stage."""
    process: Integers
    stage: Integers
    microbatch: Integers
    kind: Integers
    """Forward, backward, or one of the two parts of a backward."""
    needs: Integers
    """The message an action waits for."""
    gives: Integers
    """The message an action sends."""
    rounds: Integers
    """[rounds + 1]: the index of the first action of each round. A process has at most one action in a round."""
    held: Integers
    """[processes]: the most micro-batches whose activations a process keeps at one time, over all its stages."""

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return len(self.held)

    @property
    def held_by_stage(self) -> Integers:
        """[stages]: the most micro-batches whose activations a stage keeps at one time."""
        order = np.argsort(self.stage, kind="stable")
        return _held(self.stage[order], self.kind[order], self.num_stages)

    @property
    def nothing(self) -> int:
        """The message that is always there."""
        return 2 * self.num_stages * self.num_microbatches


@lru_cache(maxsize=16)
def timetable(schedule: str, num_stages: int, num_microbatches: int) -> Timetable:
    """The timetable of a schedule by name, with the number of stages in each process that the schedule needs.

    Call it only with numbers in which `SCHEDULES[schedule].mistakes` finds no mistake.
    """
    spec = SCHEDULES[schedule]
    num_processes = num_stages // spec.stages_per_process
    order = actions(schedule, num_stages, num_processes, num_microbatches)
    where = placement(schedule, num_stages, num_processes)
    return compile_order(order, [where[stage] for stage in range(num_stages)], num_microbatches)


def compile_order(order: Order, process_of: Sequence[int], num_microbatches: int) -> Timetable:
    """The timetable of an order of torch's actions. Actions that torch overlaps come one after another, as they run."""
    flat = [
        (process, part.stage_index, _KIND_OF[str(part.computation_type.value)], part.microbatch_index)
        for process, row in sorted(order.items())
        for action in row
        if action is not None
        for part in (action.sub_actions or (action,))
    ]
    process, stage, kind, microbatch = np.array(flat, dtype=np.int64).T
    return _in_rounds(process, stage, kind, microbatch, np.array(process_of), num_microbatches)


def _in_rounds(
    process: Integers,
    stage: Integers,
    kind: Integers,
    microbatch: Integers,
    process_of: Integers,
    num_microbatches: int,
) -> Timetable:
    """Put actions into rounds. In each round, every process acts whose next message is there.

    The actions are given process by process, each in its order.
    """
    num_stages = len(process_of)
    needs, gives = _messages(stage, kind, microbatch, num_stages, num_microbatches)
    nothing = 2 * num_stages * num_microbatches
    processes = np.arange(process_of.max() + 1)
    head = np.searchsorted(process, processes)
    last = np.searchsorted(process, processes, side="right")
    there = np.zeros(nothing + 1, dtype=bool)
    there[nothing] = True
    rounds = []
    busy = head < last
    while busy.any():
        able = processes[busy]
        able = able[there[needs[head[able]]]]
        assert len(able), "the schedule waits for itself"
        chosen = head[able]
        rounds.append(chosen)
        there[gives[chosen]] = True
        head[able] += 1
        busy[able] = head[able] < last[able]
    order = np.concatenate(rounds)
    return Timetable(
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        process_of=process_of,
        process=process[order],
        stage=stage[order],
        microbatch=microbatch[order],
        kind=kind[order],
        needs=needs[order],
        gives=gives[order],
        rounds=np.concatenate([[0], np.cumsum([len(chosen) for chosen in rounds])]),
        held=_held(process, kind, len(processes)),
    )


def _messages(
    stage: Integers, kind: Integers, microbatch: Integers, num_stages: int, num_microbatches: int
) -> tuple[Integers, Integers]:
    """The message that each action waits for from another stage, and the message that it gives to one.

    Between actions of one stage there are no messages: their order is enough.
    """
    nothing = 2 * num_stages * num_microbatches
    own = stage * num_microbatches + microbatch
    gradient = num_stages * num_microbatches + own
    forward = kind == FORWARD
    back = (kind == BACKWARD) | (kind == BACKWARD_INPUT)
    needs, gives = np.full((2, len(stage)), nothing)
    needs = np.where(forward & (stage > 0), own, needs)
    needs = np.where(back & (stage < num_stages - 1), gradient, needs)
    gives = np.where(forward & (stage < num_stages - 1), own + num_microbatches, gives)
    gives = np.where(back & (stage > 0), gradient - num_microbatches, gives)
    return needs, gives


def _held(process: Integers, kind: Integers, num_processes: int) -> Integers:
    """The most forwards of a process, at any time, whose backward is not complete."""
    change = np.where(kind == FORWARD, 1, np.where(kind == BACKWARD_INPUT, 0, -1))
    kept = np.cumsum(change)  # every process ends with none kept
    return np.maximum.reduceat(kept, np.searchsorted(process, np.arange(num_processes)))
