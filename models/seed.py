"""Seeds derived from names: the same number in every process, independent of all other draws.

Python's own hash() differs from process to process, and consecutive seeds of one generator give related streams, so
every seed is a slice of a cryptographic hash of what it is for.
"""

import hashlib
import json
from contextlib import AbstractContextManager

import torch


def derive_seed(*purpose: int | str) -> int:
    """The seed, in [0, 2**63), of one purpose, e.g. (7, "transformer.h.3.ln_1") or (7, "epoch", 2)."""
    digest = hashlib.blake2b(json.dumps(purpose).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Seeded(AbstractContextManager[None]):
    """A context in which torch's CPU generator has the state of another; it is put back at the end."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __enter__(self) -> None:
        self._saved = torch.random.get_rng_state()
        torch.random.set_rng_state(self._generator.get_state())

    def __exit__(self, *exception: object) -> None:
        torch.random.set_rng_state(self._saved)
