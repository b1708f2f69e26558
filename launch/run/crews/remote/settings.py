"""What a proxy must know, as its launcher gives it. It needs no ZeroMQ, so it is not with the proxy."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.interfaces import found, parted


@dataclass(frozen=True)
class ProxySettings:
    """What a proxy must know."""

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


def check_host(address: str) -> None:
    """Raise OptionsError if this host finds no address for the host of a meeting place."""
    try:
        found(address)
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise OptionsError(
            f"replicas.meeting must name a host that this one finds, got {parted(address)[0]}: {said}; give its address"
        ) from error
