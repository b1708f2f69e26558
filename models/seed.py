"""Seeds derived from names. Every process gets the same number, and it depends on no other draw.

Python's hash() differs from process to process, and seeds 1, 2, 3 of one generator give related streams. So each seed
is a part of a cryptographic hash of its purpose.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(*purpose: int | str) -> int:
    """The seed of one purpose, such as (7, "transformer.h.3.ln_1") or (7, "epoch", 2): a number in [0, 2**63)."""
    digest = hashlib.blake2b(json.dumps(purpose).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seeded(generator: torch.Generator, device: torch.device) -> Iterator[None]:
    """Inside, torch's CPU generator has the state of `generator`. At the end its own state comes back.

    On a GPU, the generator of the GPU has the same seed. It draws other numbers than a CPU.
    """
    with torch.random.fork_rng(devices=[]):
        torch.random.set_rng_state(generator.get_state())
        if device.type == "cpu":
            yield
            return
        of_gpu = torch.get_device_module(device).default_generators[device.index]
        saved = of_gpu.get_state()
        of_gpu.manual_seed(generator.initial_seed())
        try:
            yield
        finally:
            of_gpu.set_state(saved)
