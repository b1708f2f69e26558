"""Replicas that step alone, and exchange with those that are present; the page on replicas has the arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from thinwire.compress import Progress
from thinwire.models.digest import tensor_lines, weights_digest
from thinwire.pipeline.errors import WireError
from thinwire.pipeline.measuring.spans import Work
from thinwire.pipeline.options import ReplicaOptions
from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.replicas.exchange import Replicas, connect, setting_of, statistics_of
from thinwire.pipeline.replicas.local_steps import LocalSteps, MakeOptimizer, trained_names
from thinwire.pipeline.replicas.member import InFull
from thinwire.pipeline.replicas.membership.attendance import Attendance, Taken
from thinwire.pipeline.replicas.membership.mail import Mail, MailEnds, MailListener
from thinwire.pipeline.replicas.replica_passes import ReplicaPasses
from thinwire.pipeline.replicas.shared import SharedWeights
from thinwire.pipeline.replicas.stage_exchange import StageExchange
from thinwire.pipeline.saving.state import parameters_of, saved_state, trained
from thinwire.pipeline.stages.compressed_stage import CompressedStage


@dataclass(frozen=True, kw_only=True)
class PresentReplicas(Replicas):
    """The replica of this process, which exchanges through the membership server."""

    attendance: Attendance
    mail: Mail

    @property
    def weight(self) -> int:
        """What sums over those who take part are divided by to be means."""
        return sum(self.mail.weights.values())


def replicas_of(
    stages: Sequence[CompressedStage],
    where: Placement,
    options: ReplicaOptions,
    agreement: Mapping[str, Any],
    in_full: InFull,
    passes: Sequence[int],
    attendance: Attendance | None,
) -> Replicas:
    """The replicas of these stages, connected: as `connect`, or through the membership server if they may be lost."""
    if attendance is None:
        return connect(stages, where, options, agreement, in_full, passes)
    replica = attendance.replica
    here, mail = range(replica, replica + 1), Mail(replica)
    links = MailEnds(mail, replica, stages[0].num_stages)
    member = partial(MailListener, mail=mail)
    exchanges = {
        stage.stage_index: StageExchange(
            trained(stage.submod),
            setting_of(stage, options, in_full),
            here,
            links,
            member,
            # what a replica moved is known of every parameter, so all of them are used everywhere
            everyone=lambda mine: [mine],
        )
        for stage in stages
    }
    statistics = statistics_of(stages, exchanges, options, here, links, member)
    return PresentReplicas(options, here, exchanges, statistics, attendance=attendance, mail=mail)


class PresentSteps(LocalSteps):
    """All stages of this process between two exchanges with those replicas that are present.

    `samples` are those of this replica in a step.
    """

    held_name = "held"

    def __init__(
        self,
        stages: Sequence[CompressedStage],
        replicas: PresentReplicas,
        make_optimizer: MakeOptimizer,
        shared: SharedWeights | None,
        *,
        samples: int,
    ) -> None:
        super().__init__(stages, replicas, make_optimizer, shared)
        self._stages, self._samples = stages, samples
        self._attendance, self._mail = replicas.attendance, replicas.mail

    def first_step(self, done: int, steps: int) -> int:
        """Take the weights of another replica if those here are old; the step that comes next.

        A replica that has the weights of the end gives them: the others may have lost them.
        """
        end = (self._passes(), save(self._common())) if self._held >= steps else None
        with self._waiting("waiting for the replicas that train"):
            taken = self._attendance.begin(self._held, self._digest(), end)
        if taken is None:
            return done
        self._take(taken, steps)
        return taken.step

    def after_step(self, done: int, steps: int, progress: Progress) -> int:
        """If an exchange is due, average what the replicas that take part moved, and move the common weights.

        The average is weighted by samples. If they went on without this replica, take the weights of one of them, and
        go on with the next step of the others.
        """
        last = done == steps
        if not self._is_due(done, steps):
            return done
        self._send(progress)
        samples = (done - self._held) * self._samples
        what = "waiting for the exchange with the other replicas"
        with self._stages[0].meter.beside_exchange(), self._waiting(what):
            answer = self._attendance.exchange(done, samples, self._mail.collect(), last=last)
        if isinstance(answer, Taken):
            self._mail.discard()
            for stage in self._stages:
                stage.meter.drop_exchange()
            self._take(answer, steps)
            return answer.step
        self._mail.deliver(answer.samples, answer.frames)
        self._land(progress)
        self._held = done
        state = save(self._common()) if answer.gives else None
        self._attendance.applied(done, self._digest(), self._passes(), state, last=last)
        return done

    def is_behind(self, done: int) -> bool:
        """Never: its last exchange stands, for the other replicas may be gone."""
        return False

    def _take(self, taken: Taken, steps: int) -> None:
        """Take the common weights, the outer momentum and the passes of another replica; drop what is here.

        WireError if they cannot be those of a run of so many steps.
        """
        with _checking(taken):
            if taken.step > steps:
                raise WireError(f"they are of step {taken.step} of {steps}")
            passes = [_passes(stage, taken.passes[stage.stage_index]) for stage in self._stages]
            state = load(taken.state)
            for index, copies in self._copies.items():
                prefix = f"{index}/"
                given = {name[len(prefix) :]: each for name, each in state.items() if name.startswith(prefix)}
                copies.take_common(given)
            self._replicas.statistics.take_common(state)
        for index in self._copies:
            # errors of older messages: a part of them has been sent since, by an exchange that the checkpoint has not
            errors = self._replicas.state_dict(index)
            emptied = {name: each if name == "used" else torch.zeros_like(each) for name, each in errors.items()}
            self._replicas.load_state_dict(index, emptied)
        for stage, last in zip(self._stages, passes, strict=True):
            stage.passes = last
        self._held = taken.step

    def _common(self) -> dict[str, Tensor]:
        """Copies of the common weights and the outer momentum, by stage, and of the common statistics."""
        weights = {
            f"{index}/{name}": each
            for index, copies in self._copies.items()
            for name, each in copies.common_state().items()
        }
        return weights | self._replicas.statistics.common_state()

    def _passes(self) -> dict[int, dict[str, int]]:
        """By stage, the index of its last pass, by phase."""
        return {stage.stage_index: _counts(stage) for stage in self._stages}

    def _digest(self) -> str:
        """That of the common weights of all stages here, and of all their buffers."""
        return weights_digest(line for stage in self._stages for line in tensor_lines(_changing(stage)))

    def _waiting(self, what: str) -> Any:
        return self._stages[0].meter.section("neighbour", what, Work("exchange"))


@contextmanager
def _checking(taken: Taken) -> Iterator[None]:
    """Turn what reading the weights of another replica raises into a WireError that names it."""
    try:
        yield
    except (WireError, SafetensorError, KeyError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise WireError(f"the weights that replica {taken.giver} gave cannot be used: {what}") from error


def _changing(stage: CompressedStage) -> dict[str, Tensor]:
    """The common weights that a stage trains, and its buffers, which it may change."""
    frozen = parameters_of(stage.submod).keys() - trained_names(stage).keys()
    return {name: each for name, each in saved_state(stage.submod).items() if name not in frozen}


def _counts(stage: CompressedStage) -> dict[str, int]:
    return {str(phase): count for phase, count in stage.passes.items()}


def _passes(stage: CompressedStage, told: Mapping[str, int]) -> Any:
    return {phase: told[phase] for phase in stage.passes}


MakeSteps = Callable[..., LocalSteps]


def steps_of(replicas: Replicas, passes: ReplicaPasses, pass_size: int) -> MakeSteps:
    """Makes the steps of replicas that step alone, whether they are always there or may be lost.

    The mean is over all samples. Those of the first kind weight what they send. Each of the second kind says in an
    exchange how many samples it has had, and who gets its frames weights them; so does a simulation of them.
    """
    if isinstance(replicas, PresentReplicas):
        return partial(PresentSteps, samples=pass_size * passes.passes[replicas.here.start])
    return LocalSteps if replicas.weights else partial(LocalSteps, weigh=passes.weight)
