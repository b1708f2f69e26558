"""Random words on a GPU: those of NumPy's PCG64, each made from its place alone, so that no host draws them.

PCG64's state of 128 bits goes from s to M s + c, and a word is made of the state alone. So i steps on the state is
s + G(i) d, where d = (M - 1) s + c is the first step and G(i) = 1 + M + .. + M^(i - 1): a product and a sum modulo
2^128. Blocks of 4,096 words begin at G(4096 b), where the first step is M^(4096 b) d; within each of them one table
of G serves. A number of 128 bits is a pair of int64, its low and its high half: torch has no unsigned products.
"""

from functools import cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from thinwire.compress.transfer import put

Halves = tuple[Tensor, Tensor]
_BLOCK, _BLOCKS = 1 << 12, 1 << 10
"""Words of a block, and blocks that are made at once: what is made of 4 M words lies in the memory of any GPU."""
_MULTIPLIER = 0x2360ED051FC65DA44385DF649FCCF645
_WHOLE, _LOW = (1 << 128) - 1, (1 << 32) - 1
_SIGN = -(1 << 63)


class DeviceWords:
    """The words of PCG64(seed), from the first on: called with n, it gives the next n, int64 on `device`."""

    def __init__(self, seed: int, device: torch.device) -> None:
        known = np.random.PCG64(seed).state["state"]
        self._state, self._increment, self._device = known["state"], known["inc"], device

    def __call__(self, count: int) -> Tensor:
        """The next `count` words; nobody waits for the device."""
        within, begins, growth = tables(self._device)
        parts = [] if count else [torch.empty(0, dtype=torch.int64, device=self._device)]
        for start in range(0, count, _BLOCK * _BLOCKS):
            size = min(_BLOCK * _BLOCKS, count - start)
            blocks = -(-size // _BLOCK)
            step = (self._state * (_MULTIPLIER - 1) + self._increment) & _WHOLE
            of_block = _product((begins[0][:blocks], begins[1][:blocks]), _halves(step))
            states = _sum(of_block, _halves(self._state))
            steps = _product((growth[0][:blocks], growth[1][:blocks]), _halves(step))
            low, high = _sum(_product(within, _column(steps)), _column(states))
            parts.append(_word(low, high).view(-1)[:size])
            self._state = (self._state + _geometric(size) * step) & _WHOLE
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@cache
def tables(device: torch.device) -> tuple[Halves, Halves, Halves]:
    """G(1) to G(4096); G(4096 b) and M^(4096 b) of each block b."""
    within = list(accumulate(range(_BLOCK), lambda total, _: (total * _MULTIPLIER + 1) & _WHOLE, initial=0))
    jump, begin = pow(_MULTIPLIER, _BLOCK, 1 << 128), within[-1]
    begins = list(accumulate(range(_BLOCKS - 1), lambda total, _: (total * jump + begin) & _WHOLE, initial=0))
    growth = list(accumulate(range(_BLOCKS - 1), lambda power, _: (power * jump) & _WHOLE, initial=1))
    first, second, third = (_on_device(each, device) for each in (within[1:], begins, growth))
    return first, second, third


def _geometric(count: int) -> int:
    """G(count)."""
    # modulo 2^128 nothing can be divided by M - 1, so the power is taken modulo more
    return (pow(_MULTIPLIER, count, (_MULTIPLIER - 1) << 128) - 1) // (_MULTIPLIER - 1) & _WHOLE


def _on_device(numbers: list[int], device: torch.device) -> Halves:
    low, high = torch.tensor([_halves(number) for number in numbers]).unbind(1)
    return put(low.contiguous(), device), put(high.contiguous(), device)


def _halves(number: int) -> tuple[int, int]:
    """A number of 128 bits as two of 64 with a sign."""
    low, high = (number >> shift & 0xFFFFFFFFFFFFFFFF for shift in (0, 64))
    return low - ((low >> 63) << 64), high - ((high >> 63) << 64)


def _column(halves: Halves) -> Halves:
    return halves[0].unsqueeze(1), halves[1].unsqueeze(1)


def _product(one: Halves, other: Halves | tuple[int, int]) -> Halves:
    low, high = one[0] * other[0], one[0] * other[1] + one[1] * other[0]
    # the high half of the product of the low ones, in pieces of 32 bits
    a, b, c, d = one[0] & _LOW, one[0] >> 32 & _LOW, other[0] & _LOW, other[0] >> 32 & _LOW
    middle = b * c + (a * c >> 32 & _LOW)
    second = a * d + (middle & _LOW)
    return low, high.add_(b * d).add_(middle >> 32 & _LOW).add_(second >> 32 & _LOW)


def _sum(one: Halves, other: Halves | tuple[int, int]) -> Halves:
    low = one[0] + other[0]
    carried = (low ^ _SIGN) < (one[0] ^ _SIGN)
    return low, one[1] + other[1] + carried


def _word(low: Tensor, high: Tensor) -> Tensor:
    """The halves, joined and turned right by the six highest bits."""
    turn = high >> 58 & 63
    joined = low.bitwise_xor_(high)
    # torch shifts the sign in: it is taken out again
    right = (joined >> turn) ^ ((joined >> 63) << (63 - turn) << 1)
    return right.bitwise_or_(joined << (-turn & 63))
