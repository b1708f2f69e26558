"""Several clients of split learning, which train in turn: fields of a recipe, with their checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from thinwire.errors.words import listed
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.options.changes import changed
from thinwire.pipeline.options.durations import misspelt, read_duration

MOST_CLIENTS = 10000
"""The most clients of a run."""
Division = Literal["random", "label", "order"]
"""How the samples of one data set are divided among clients."""


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Clients that hold the samples and train in turn, round after round."""

    count: int = 1
    """Number of clients."""
    division: Division = "random"
    """How samples are divided among the clients, in pieces of one size: "random"; "label" (sorted by label, so each
    client has few classes); or "order" (the first piece of the data is the first client's)."""
    turn: str = "1 epoch"
    """Length of a client's turn: "50 steps", or "1 epoch", which is one pass through that client's samples."""
    outlines: list[str] = field(default_factory=list)
    """Files of `thinwire outline`, one for each client in their order, if each has data of its own: `data.name` is then
    the data of the client whose turn it is. Needs division order."""

    def __post_init__(self) -> None:
        mistakes = misspelt("clients.turn", self.turn)
        if not mistakes and read_duration(self.turn)[0] == 0:
            mistakes = [f"clients.turn must be at least a step, got {self.turn!r}"]
        if not 1 <= self.count <= MOST_CLIENTS:
            mistakes.append(f"clients.count must be from 1 to {MOST_CLIENTS}, got {self.count}")
        if self.outlines and (self.count, self.division) != (len(self.outlines), "order"):
            mistakes.append(
                f"clients.count must be the number of clients.outlines, {len(self.outlines)}, and clients.division "
                f"order, because each client has the samples of its outline; got {self.count} and {self.division}"
            )
        if mistakes or (mistakes := self._without_effect()):
            raise OptionsError(mistakes)

    def _without_effect(self) -> list[str]:
        """A sentence if fields are set that say what several clients do, and there is one."""
        set_here = [] if self.outlines else [f"clients.{name}" for name in changed(self)]
        if self.count > 1 or not set_here:
            return []
        return [
            f"clients.count must be above 1 for {listed(set_here)}: a single client has all samples, and every turn; "
            f"raise it, or drop {'them' if len(set_here) > 1 else 'the field'}"
        ]
