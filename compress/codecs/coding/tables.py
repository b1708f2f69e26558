"""Tables of the lane code: how frequent each symbol is, by class of scale. Every machine makes the same ones.

Class c has the logistic distribution of scale s = 0.06 * 2**(c/4), in integers: k takes what lies between k - 1/2 and
k + 1/2. Frequencies are parts of 4096. A table has the integers from -K to K, and an escape for all others. With
T(k) = 1 / (1 + exp((k - 1/2) / s)), what lies above k - 1/2:

    K        the largest from 1 to 127 for which 4096 * (T(K) - T(K + 1)) is at least 1/2, or 0
    escape   2 * 4096 * T(K + 1), rounded, at least 2
    k > 0    1 + N(k) - N(k + 1), where N(k) is T(k) * (4095 - escape - 2 * K), rounded; -k as k
    0        what is left

From class 36 on tables would need more integers. These classes send the b = (c - 32) // 4 low bits of an integer apart,
all as frequent, and what is above them, rounded to the nearest, by the table of b octaves below.

The power and exp are those of the module decimal, which rounds correctly, with 28 digits.
"""

from dataclasses import dataclass
from decimal import Context, Decimal
from functools import cache, cached_property
from itertools import pairwise
from math import isqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PROBABILITY_BITS = 12
TOTAL = 1 << PROBABILITY_BITS
SYMBOLS = 256
ESCAPE, ZERO = 0, 128
"""The symbol of an escape, and that of the integer 0; that of k is 128 + k."""
OWN, CLASSES = 36, 68
"""Classes that have a table of their own, and all."""
LARGEST = 127
OCTAVE = 4
"""Classes of an octave."""
NO_BITS = OWN
"""The table of symbols that are certain: those of no low bits. Behind it are those of 1 to 8 low bits."""
UNIT = 16
"""Mean sizes and bits are integers of 2**-16."""
_EXACT = Context(prec=28)


def frequencies(number: int) -> tuple[int, ...]:
    """The frequencies of all symbols in a class below OWN: 256 integers, whose sum is 4096."""
    scale = Decimal("0.06") * _EXACT.power(Decimal(2), Decimal(number) / OCTAVE)

    def above(k: int) -> Decimal:
        return _EXACT.divide(Decimal(1), 1 + _EXACT.exp(_EXACT.divide(Decimal(2 * k - 1), 2 * scale)))

    tails = [above(k) for k in range(LARGEST + 2)]
    last = max((k for k in range(1, LARGEST + 1) if 2 * TOTAL * (tails[k] - tails[k + 1]) >= 1), default=0)
    escape = max(2, round(2 * TOTAL * tails[last + 1]))
    counts = [round((TOTAL - 1 - escape - 2 * last) * tail) for tail in tails]
    side = [1 + counts[k] - counts[k + 1] for k in range(1, last + 1)]
    zero = TOTAL - escape - 2 * sum(side)
    unused = LARGEST - last
    return (escape, *[0] * unused, *reversed(side), zero, *side, *[0] * unused)


@dataclass(frozen=True)
class Tables:
    """Tables in the forms that coding needs, a row each."""

    frequency: NDArray[np.int64]
    """[tables, 256]"""
    start: NDArray[np.int64]
    """The sum of the frequencies before a symbol [tables, 256]."""
    slot: NDArray[np.uint32]
    """By the low 12 bits of a state: symbol | frequency - 1 << 8 | place in the symbol's share << 20 [tables, 4096]."""

    certain: int
    """The table of a symbol that is certain, for what lies beyond the end."""

    @staticmethod
    def of(frequency: NDArray[np.int64], certain: int) -> "Tables":
        """The forms of tables of these frequencies [tables, 256]."""
        start = frequency.cumsum(1) - frequency
        symbols = np.stack([np.repeat(np.arange(SYMBOLS), each) for each in frequency])
        shares, starts = (np.take_along_axis(each, symbols, 1) for each in (frequency, start))
        slot = symbols | (shares - 1) << 8 | (np.arange(TOTAL) - starts) << 20
        return Tables(frequency, start, slot.astype(np.uint32), certain)

    @property
    def packed(self) -> NDArray[np.uint32]:
        """Frequencies, and starts from bit 16 on [tables * 256]."""
        return (self.frequency | self.start << 16).astype(np.uint32).reshape(-1)

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The frequencies and starts [tables * 256], and the slots [tables * 4096], int64."""
        arrays = self.frequency, self.start, self.slot.astype(np.int64)
        first, second, third = (torch.from_numpy(each.reshape(-1)) for each in arrays)
        return first, second, third


@cache
def tables() -> Tables:
    """The tables of all classes below OWN, and behind them of low bits."""
    low = [[TOTAL >> bits] * (1 << bits) + [0] * (SYMBOLS - (1 << bits)) for bits in range(9)]
    return Tables.of(np.array([*(frequencies(number) for number in range(OWN)), *low], np.int64), NO_BITS)


@dataclass(frozen=True)
class Classes:
    """What the sender chooses classes by: integers of 2**-16, int64.

    Integers of mean size m take `least` + m * `slope` bits each in a class: the tangent, at the mean size of the class,
    to the bits of classes over their mean sizes.
    """

    mean: NDArray[np.int64]
    """The mean size of an integer in each class [68]."""
    least: NDArray[np.int64]
    """The bits that one takes if all are 0, by the tangent [68]."""
    slope: NDArray[np.int64]
    """The bits that a mean size larger by 1 takes [68]."""
    bounds: NDArray[np.int64]
    """From which mean size on the next class is better [67]."""
    reach: NDArray[np.int64]
    """The largest integer of the tables of classes below OWN [36]."""


@cache
def classes() -> Classes:
    """What is known of classes. Bits are to the base 2 by float64, rounded: no receiver needs them."""
    frequency = tables().frequency[:OWN]
    whole = np.abs(np.arange(SYMBOLS) - ZERO) * (np.arange(SYMBOLS) != ESCAPE)
    mean = (frequency * whole).sum(1) << UNIT >> PROBABILITY_BITS
    shares = frequency / TOTAL
    bits = -(shares * np.log2(np.where(shares > 0, shares, 1))).sum(1)
    low = np.arange(1, (CLASSES - OWN) // OCTAVE + 1).repeat(OCTAVE)
    own = np.arange(OWN, CLASSES) - OCTAVE * low
    mean = np.concatenate([mean, mean[own] << low])
    bits = np.concatenate([bits, bits[own] + low])
    reach = np.where(frequency > 0, whole, 0).max(1)
    bounds = np.array([isqrt(int(a) * int(b)) for a, b in pairwise(mean)])
    sizes = mean / (1 << UNIT)
    slope = np.gradient(bits, sizes)
    least, slope = (np.rint(each * (1 << UNIT)).astype(np.int64) for each in (bits - slope * sizes, slope))
    return Classes(mean, least, slope, bounds, reach)
