"""The comparison at the start: both ends of a boundary exchange their settings before the first frame.

It uses the rendezvous store, where writing never waits. When the first stage of a process connects, all announce their
settings; only then it waits for its neighbours. So the stages of a process can be built and used in any order.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from thinwire.errors import ThinwireWarning
from thinwire.pipeline.errors import MismatchError, WireError
from thinwire.pipeline.processes import posts
from thinwire.pipeline.processes.transport import reaching


class Handshake:
    """The settings that the stages of one process group have announced; its name keeps several pipelines apart."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self._name, self._timeout, self._round = group.group_name, timeout, 0

    def restart(self) -> None:
        """Begin a new round, in every process; earlier announcements are not read again."""
        self._round += 1

    def announce(self, stage: str, boundary: int, version: int, configuration: Mapping[str, Any]) -> None:
        """Announce the settings of a stage at one of its boundaries, as JSON values. Never waits.

        `version` counts how often the tensors of the boundary have changed, alike at both ends.
        """
        self._store.set(f"{boundary}/{version}/{stage}", posts.written(configuration))

    def compare(
        self, stage: str, neighbour: str, boundary: int, version: int, configuration: Mapping[str, Any]
    ) -> None:
        """Wait for the announcement of a stage's neighbour, and compare.

        Raises MismatchError with every difference, PeerError if the neighbour announces nothing in time, WireError if
        it is no object of JSON. Warns if only the torch version differs.
        """
        what = f"stage {stage} was waiting for the configuration of stage {neighbour} at boundary {boundary}"
        word = self._wait(f"{boundary}/{version}/{neighbour}", what)
        told = posts.read(word, f"stage {neighbour} must announce its settings as JSON")
        if not isinstance(told, dict):  # a stranger may have written it
            raise WireError(f"stage {neighbour} must announce its settings as an object, got {type(told).__name__}")
        _raise_on_difference(configuration, told, boundary, stage, neighbour)

    def tell_training(self, stage: str, trains: bool) -> None:
        """Report to all stages whether anything in a stage trains. Never waits."""
        self._store.set(f"trains/{stage}", posts.written(trains))

    def trains(self, stage: str) -> bool:
        """Whether anything in a stage trains; PeerError if it does not report in time."""
        word = self._wait(f"trains/{stage}", f"waiting for stage {stage} to report whether it trains")
        return bool(posts.read(word, f"stage {stage} must report whether it trains"))

    def _wait(self, name: str, what: str) -> bytes:
        store = self._store
        with reaching(what):
            store.wait([name], self._timeout)
            return bytes(store.get(name))

    @property
    def _store(self) -> dist.Store:
        default = dist.distributed_c10d._get_default_store()
        return dist.PrefixStore(f"thinwire/{self._name}/{self._round}", default)


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The fields in which two configurations differ, with both values."""
    names = [*mine, *(name for name in theirs if name not in mine)]
    return {name: (mine.get(name), theirs.get(name)) for name in names if mine.get(name) != theirs.get(name)}


def _raise_on_difference(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], boundary: int, stage: str, neighbour: str
) -> None:
    found = differences(mine, theirs)
    if "torch" in found:
        here, there = found.pop("torch")
        warnings.warn(
            f"boundary {boundary}: stage {stage} runs torch {here}, stage {neighbour} {there}; results may differ in "
            f"the last bits",
            ThinwireWarning,
            stacklevel=3,
        )
    if found:
        # a terminal would act on what cannot be printed
        shown = {name if name.isprintable() else repr(name): values for name, values in found.items()}
        lines = [f"  {name}: {here!r} here, {there!r} there" for name, (here, there) in shown.items()]
        raise MismatchError(
            f"the two ends of boundary {boundary} must be started alike; stage {stage} (here) and stage {neighbour} "
            f"(there) differ in:\n" + "\n".join(lines)
        )
