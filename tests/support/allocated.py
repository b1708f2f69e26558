"""The memory that torch allocates for a call: every tensor, those inside its kernels too."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes of the CPU that the call holds at one time, beyond what was there before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    held = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most
