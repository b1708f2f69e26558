"""Seeds derived from names. Every process gets the same number, and it depends on no other draw.

Python's hash() differs from process to process, and seeds 1, 2, 3 of one generator give related streams. So each seed
is a part of a cryptographic hash of its purpose.
"""

import hashlib
import json
from contextlib import AbstractContextManager

import torch

_CPU = torch.device("cpu")


def derive_seed(*purpose: int | str) -> int:
    """The seed of one purpose, such as (7, "transformer.h.3.ln_1") or (7, "epoch", 2): a number in [0, 2**63)."""
    digest = hashlib.blake2b(json.dumps(purpose).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Seeded(AbstractContextManager[None]):
    """A context in which torch's CPU generator has the state of `generator`. At the end its own state comes back.

    On a GPU, the generator of the GPU has the same seed. It draws other numbers than a CPU.
    """

    def __init__(self, generator: torch.Generator, device: torch.device = _CPU) -> None:
        self._generator = generator
        self._gpu = None if device.type == "cpu" else device

    def __enter__(self) -> None:
        self._saved = torch.random.get_rng_state()
        torch.random.set_rng_state(self._generator.get_state())
        if self._gpu is not None:
            self._of_gpu = torch.get_device_module(self._gpu).default_generators[self._gpu.index]
            self._saved_on_gpu = self._of_gpu.get_state()
            self._of_gpu.manual_seed(self._generator.initial_seed())

    def __exit__(self, *exception: object) -> None:
        torch.random.set_rng_state(self._saved)
        if self._gpu is not None:
            self._of_gpu.set_state(self._saved_on_gpu)
