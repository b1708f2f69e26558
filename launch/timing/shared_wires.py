"""One step over hosts whose links share a wire, simulated event by event.

`step_time` gives each direction between two processes a wire of its own. Here a frame takes the wires of hosts:

    host   one uplink and one downlink a host: a frame keeps the sender's uplink and the receiver's downlink busy
    home   one inbound wire a host, for frames from both sides; a message keeps it busy for its latency too, so messages
           come one after another. This is the model of Protocol NanoGPT, with 50 ms a message

A wire serves frames in the order in which they are ready.
"""

from __future__ import annotations

import heapq
from itertools import count

import numpy as np

from thinwire.launch.timing.network import Wires
from thinwire.launch.timing.step_time import (
    ActionCosts,
    ChannelTiming,
    Compute,
    Course,
    Seconds,
    action_costs,
    course_of,
    time_step,
)
from thinwire.launch.timing.timetable import Timetable


def time_over(
    wires: Wires, table: Timetable, compute: Compute, activations: ChannelTiming, gradients: ChannelTiming
) -> Course:
    """Simulate one step; arguments as of `time_step`. `duplex` counts for `pair` alone."""
    if wires == "pair":
        return time_step(table, compute, activations, gradients)
    return _Events(table, action_costs(table, compute, activations, gradients), wires).run()


class _Events:
    """The events of one step in order of time: an action has ended, or a frame has arrived."""

    def __init__(self, table: Timetable, costs: ActionCosts, wires: Wires) -> None:
        self._table, self._costs, self._wires = table, costs, wires
        actions = range(len(table.kind))
        self._queues = [[i for i in actions if table.process[i] == p][::-1] for p in range(table.num_processes)]
        self._taker = {int(table.needs[i]): int(table.process[i]) for i in actions}
        self._free = [0.0] * table.num_processes
        self._up, self._down = [0.0] * table.num_processes, [0.0] * table.num_processes
        self._there = {table.nothing: 0.0}
        self._running = [False] * table.num_processes
        self._heap: list[tuple[float, int, str, int]] = []
        self._number = count()
        self._start, self._idle_from, self._departure, self._arrival = np.zeros((4, len(table.kind)))
        self._sent: Seconds = np.zeros(table.nothing + 1)

    def run(self) -> Course:
        """The course of the step."""
        for process in range(self._table.num_processes):
            self._begin(process)
        while self._heap:
            now, _, what, action = heapq.heappop(self._heap)
            if what == "ended":
                self._running[int(self._table.process[action])] = False
                self._send(action, now)
                self._begin(int(self._table.process[action]))
            else:
                self._arrive(action, now)
        assert not any(self._queues), "the schedule waits for itself"
        return course_of(
            self._table, self._costs, self._start, self._idle_from, self._sent, self._departure, self._arrival
        )

    def _begin(self, process: int) -> None:
        """Start the next action of a process, if the process is idle and the input is there."""
        queue = self._queues[process]
        if self._running[process] or not queue or int(self._table.needs[queue[-1]]) not in self._there:
            return
        action = queue.pop()
        start = max(self._free[process], self._there[int(self._table.needs[action])])
        self._start[action], self._idle_from[action] = start, self._free[process]
        self._free[process] = start + float(self._costs.duration[action])
        self._running[process] = True
        heapq.heappush(self._heap, (self._free[process], next(self._number), "ended", action))

    def _send(self, action: int, now: float) -> None:
        """Put the output of an action on its wires."""
        message = int(self._table.gives[action])
        self._departure[action] = self._arrival[action] = now
        if message == self._table.nothing:
            return
        self._sent[message] = now
        if not self._costs.crosses[action]:
            self._arrive(action, now)
            return
        source, target = int(self._table.process[action]), self._taker[message]
        on_wire, latency = float(self._costs.on_wire[action]), float(self._costs.latency[action])
        if self._wires == "home":
            leaves = max(now, self._down[target])
            self._down[target] = arrival = leaves + latency + on_wire
        else:
            leaves = max(now, self._up[source], self._down[target])
            self._up[source] = self._down[target] = leaves + on_wire
            arrival = leaves + on_wire + latency
        self._departure[action], self._arrival[action] = leaves, arrival
        heapq.heappush(self._heap, (arrival, next(self._number), "arrived", action))

    def _arrive(self, action: int, now: float) -> None:
        message = int(self._table.gives[action])
        self._there[message] = now
        self._begin(self._taker[message])
