"""The two streams of a GPU that frames need: that of compute, and a side stream on which they are copied.

    compute   | encode | mark |  ...                    | hold | decode | mark |
    side               | copy to pinned memory |   | copy to the GPU |

The host only gives orders here, and never waits. An event says when an order is done.
"""

from __future__ import annotations

import torch
from torch import Tensor


class CopyStream:
    """The side stream of a device, beside the stream on which this thread computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = torch.Stream(device)

    def mark(self) -> torch.Event:
        """The moment when the device has done all compute that it was asked for until now."""
        return torch.accelerator.current_stream(self.device).record_event()

    def copy(self, source: Tensor, target: Tensor, after: torch.Event) -> torch.Event:
        """Copy on the side stream, not before `after`; the moment when the copy is done."""
        self._side.wait_event(after)
        with self._side:
            target.copy_(source, non_blocking=True)
        return self._side.record_event()

    def hold_compute(self, until: torch.Event) -> None:
        """Have later compute wait for a moment, on the device."""
        torch.accelerator.current_stream(self.device).wait_event(until)
