"""The launcher of replicas that may be lost: it starts the processes of each, and starts a replica again that is lost.

The others go on meanwhile; the membership server reports who is there. The launcher has one thread, because a
process with several must not be forked.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.launch.run import failures, forks, host_data, stage_processes
from thinwire.launch.run.assembly import Prepared, real_placement
from thinwire.launch.run.elastic.agent import Agent
from thinwire.launch.run.elastic.own import AGAIN_VARIABLE, REPLICA_VARIABLE, SERVER_VARIABLE, of_replica
from thinwire.launch.run.folders import check_folders, what_is_left
from thinwire.launch.run.resume import BEGUN
from thinwire.launch.run.wire import agreed_with_data
from thinwire.launch.shared import scratch
from thinwire.launch.shared.exit_codes import FailedError, StoppedError

_POLL = 0.05

MakeStart = Callable[[bool], stage_processes.Start]
"""How a stage process is started: for the first time, or to go on from the newest checkpoint."""


@dataclass
class _Running:
    """A replica that runs, and its private folder."""

    processes: stage_processes.StageProcesses
    folder: Path
    resources: ExitStack
    again: bool = False
    """Whether the replica has been started before."""


@dataclass
class _Ended:
    """How the replicas ended that run no more."""

    well: set[int] = field(default_factory=set)
    lost: dict[int, str] = field(default_factory=dict)
    """What happened to those that do not come again."""
    reports: list[failures.Report] = field(default_factory=list)


class Launcher:
    """All replicas of a run, or the one of this host.

    `came` are the signals that this process got so far.
    """

    def __init__(self, prepared: Prepared, make_start: MakeStart, came: Sequence[signal.Signals]) -> None:
        self._prepared, self._recipe, self._make_start, self._came = prepared, prepared.recipe, make_start, came
        self._where = real_placement(prepared.recipe)
        self._here = prepared.recipe.replicas.here
        self._agreed = agreed_with_data(prepared.recipe, prepared.data, prepared.blueprint)
        self._left = prepared.recipe.checkpoint.restarts
        self._running: dict[int, _Running] = {}
        self._begun: set[int] = set()  # those that have begun anew, where that was asked for
        self._ended = _Ended()
        self._asked = False

    def run(self) -> None:
        """Start all replicas, and wait until all have ended.

        Raises:
            OptionsError: a replica cannot write to its folder.
            FailedError: a replica met at its first start what others would meet too; or none is left; or the first,
                whose folder is that of the run, is lost for good.
            StoppedError: a signal came.
        """
        for replica in self._here:
            check_folders(of_replica(self._prepared, replica).recipe)
        again = False
        while self._run(again=again):
            again = True
        if self._came and len(self._ended.well) < len(self._here):
            left = what_is_left(self._recipe)
            raise StoppedError(failures.explain_stopped(self._came[0], self._ended.reports, left), self._came[0])
        self._report_end()

    def _run(self, *, again: bool) -> bool:
        """Run all replicas with one membership server; whether it was lost, and they start again with another."""
        self._ended = _Ended(reports=self._ended.reports)  # those who have ended start again too
        with closing(Agent(self._recipe, self._agreed)) as agent:
            try:
                for replica in self._here:
                    self._start(agent, replica, again=again)
                while self._running:
                    if agent.is_gone:
                        told, lasting = agent.ending()
                        if lasting:
                            raise FailedError(told)
                        if self._came:  # the checkpoints are what they were, and there is nothing to stop after
                            print(told, file=sys.stderr)
                            return False
                        self._spend_restart(told)
                        return True
                    if not self._pass_on_signals(agent):
                        return False
                    for replica, running in list(self._running.items()):
                        if running.processes.is_over() and not agent.is_gone:
                            self._end(agent, replica)
                    time.sleep(_POLL)
                agent.end(lambda: len(self._came) > self._asked)
                return False
            finally:
                for replica, running in self._running.items():
                    running.processes.end(expected=True)
                    self._note(replica, running)
                    running.resources.close()
                    agent.loses(replica, for_good=True)  # a server on another host waits for it no more
                self._running = {}

    def _start(self, agent: Agent, replica: int, *, again: bool) -> None:
        """Start the processes of a replica."""
        wanted, resources = self._recipe, ExitStack()
        folder = resources.enter_context(scratch.folder())
        if not forks.is_safe():
            host_data.keep(self._prepared.data, wanted.data, wanted.training.seed, folder)
        processes = resources.enter_context(
            closing(stage_processes.StageProcesses(wanted.wire.heartbeat, wanted.wire.timeout))
        )
        self._running[replica] = _Running(processes, folder, resources, again)
        given = stage_processes.environments(wanted.group_processes, wanted.training.threads, folder)
        marked = {AGAIN_VARIABLE: "1"} if again else {}
        own = {**marked, REPLICA_VARIABLE: str(replica), SERVER_VARIABLE: agent.comes(replica)}
        processes.start(self._make_start(replica in self._begun), [{**each, **own} for each in given])

    def _pass_on_signals(self, agent: Agent) -> bool:
        """Pass the first signal on, so that all stop after the next exchange; False if all are to stop at once."""
        if self._came and self._recipe.checkpoint.wanted and not self._asked:
            self._asked = True
            print(
                "the run stops after the next exchange and a checkpoint, or at once if no step is done; a second "
                "signal stops it at once",
                file=sys.stderr,
            )
            agent.stop()
        return len(self._came) <= self._asked

    def _end(self, agent: Agent, replica: int) -> None:
        """Take note of how a replica ended, and start it again if it was lost."""
        running = self._running.pop(replica)
        with running.resources:
            end = running.processes.end(expected=bool(self._came))
            reports = failures.read_reports(running.folder) | failures.silences(end.silent, self._where, replica)
            self._note(replica, running)
        self._ended.reports += reports.values()
        if end.finished:
            self._ended.well.add(replica)
        if end.finished or self._came:
            agent.loses(replica, for_good=True)
            return
        told = failures.explain(reports, end.failed, self._where, end.hung, replica)
        # NaN, a full disk or damaged checkpoints are of one replica: it may come back, and the others go on
        if not running.again and any(report.of_all for report in reports.values()):
            agent.loses(replica, for_good=True)
            raise failures.failure(reports, end.failed, end.hung, told)
        agent.loses(replica, for_good=not self._left)
        if self._left:
            self._spend_restart(f"{told}\nreplica {replica} is lost, and the others go on")
            self._start(agent, replica, again=True)
        else:
            self._ended.lost[replica] = told
            if len(self._here) > 1:  # else the end says it
                print(
                    f"{told}\nreplica {replica} is lost for good: no restarts are left; the others go on",
                    file=sys.stderr,
                )

    def _note(self, replica: int, running: _Running) -> None:
        """Note whether a replica that has ended had begun anew."""
        self._begun |= {replica} if (running.folder / BEGUN).exists() else set()

    def _spend_restart(self, told: str) -> None:
        """Count a restart. FailedError if none is left."""
        if not self._left:
            raise FailedError(told)
        self._left -= 1
        print(f"{told}\nstarting again from the newest checkpoint; restarts left: {self._left}", file=sys.stderr)

    def _report_end(self) -> None:
        """Say who is not there at the end. FailedError if it is the first replica, or if none is there."""
        well, lost = sorted(self._ended.well), self._ended.lost
        if not well:
            raise FailedError([*lost.values(), *filter(None, [what_is_left(self._recipe)])])
        if 0 in lost:
            place = of_replica(self._prepared, well[0]).recipe.folder
            raise FailedError(f"{lost[0]}\nthe run has ended without replica 0: its weights and scores are in {place}")
        if lost:
            names = ", ".join(map(str, sorted(lost)))
            print(f"the run has ended without replica {names}", file=sys.stderr)
