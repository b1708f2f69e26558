"""What a gate must know, as its launcher gives it. The launcher needs no ZeroMQ, so this is not with the gate."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class GateSettings:
    """What a gate must know."""

    address: str
    keys: str
    """Their file."""
    replica: int
    heartbeat: float
    """Seconds of silence after which it calls again."""
    timeout: float
    """Seconds of silence after which it gives up."""
    agreed: dict[str, str]

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))
