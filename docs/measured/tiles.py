"""The table of tiles in bits.md: which tiles of 32 to rotate, and how many bits a tile, after TAH-Quant.

    python docs/measured/tiles.py [TENSORS]       TENSORS as for bits.py

Signal to noise in dB of 4 bits an element and a bf16 scale a tile. What earns its place is a codec; the rest is written
out here.
"""

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from bits import kinds
from torch import Tensor

from thinwire.compress.codecs.grid import bfloat16_above

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "codecs"))
from allocate import allocated_bits
from rotated import turn, turn_back_

TILE = 32
BITS = 4

Coder = Callable[[Tensor], Tensor]
"""Gives tiles [C, 32] as they are decoded."""


def quantized(tiles: Tensor, bits: Tensor | int = BITS) -> Tensor:
    """Tiles as `q(bits, group=32)` decodes them; `bits` may be [C, 1]."""
    scales = scales_of(tiles)
    steps = scales * 2.0 ** (1 - torch.as_tensor(bits))
    return ((tiles / steps.masked_fill(steps == 0, torch.inf)).floor() + 0.5) * steps


def scales_of(tiles: Tensor) -> Tensor:
    """The scale of each tile."""
    return bfloat16_above(tiles.abs().amax(1, keepdim=True), 2.0**-118).float() * (1 + 2**-22)


def rotating(chosen: Callable[[Tensor], Tensor]) -> Coder:
    """Rotates the tiles that `chosen` marks."""

    def coder(tiles: Tensor) -> Tensor:
        decoded = quantized(turn(tiles))
        turn_back_(decoded)
        return torch.where(chosen(tiles).unsqueeze(1), decoded, quantized(tiles))

    return coder


def is_peaked(tiles: Tensor) -> Tensor:
    """Which tiles have a largest magnitude of more than twice the second: TAH-Quant's rule."""
    first, second = tiles.abs().topk(2, dim=1).values.unbind(1)
    return first > 2 * second


def is_far(tiles: Tensor) -> Tensor:
    """Which tiles have a largest magnitude of more than 2.5 root mean squares."""
    return tiles.abs().amax(1) > 2.5 * tiles.square().mean(1).sqrt()


def narrows(tiles: Tensor) -> Tensor:
    """Which tiles have a smaller scale when rotated."""
    return (scales_of(turn(tiles)) < scales_of(tiles)).squeeze(1)


def by_scale(tiles: Tensor) -> Tensor:
    """Bits from the scales of all tiles together, 1 to 8."""
    return quantized(tiles, allocated_bits(scales_of(tiles), BITS).unsqueeze(1))


def by_entropy(sign: int) -> Coder:
    """A bit more for the quarter of the tiles with most (1) or least (-1) entropy, one less for the other end's."""

    def coder(tiles: Tensor) -> Tensor:
        shares = tiles.abs() / tiles.abs().sum(1, keepdim=True).clamp(min=1e-30)
        order = (sign * torch.special.entr(shares).sum(1)).argsort()
        bits, quarter = torch.full((len(tiles), 1), BITS), len(tiles) // 4
        bits[order[:quarter]] -= 1
        bits[order[len(order) - quarter :]] += 1
        return quantized(tiles, bits)

    return coder


CODERS: Mapping[str, Coder] = {
    "`q(4, group=32)`": quantized,
    "rotated where the largest is more than twice the second": rotating(is_peaked),
    "rotated where the largest is more than 2.5 root mean squares": rotating(is_far),
    "rotated where that narrows the range": rotating(narrows),
    "all rotated": rotating(lambda tiles: torch.ones(len(tiles), dtype=torch.bool)),
    "3, 4 or 5 bits, most for the most entropy": by_entropy(1),
    "3, 4 or 5 bits, most for the least entropy": by_entropy(-1),
    "1 to 8 bits by scale": by_scale,
}


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    found = kinds(Path(sys.argv[1]) if sys.argv[1:] else None)
    print("| 4.5 bits |", *(f" {kind} |" for kind in found), sep="")
    print("|---" * (1 + len(found)), "|", sep="")
    for name, coder in CODERS.items():
        cells = []
        for messages in found.values():
            noise = signal = 0.0
            for tiles in (message.float().reshape(-1, TILE) for message in messages):
                noise += float((coder(tiles) - tiles).double().square().sum())
                signal += float(tiles.double().square().sum())
            cells.append(f" {10 * math.log10(signal / noise):.1f} |")
        print(f"| {name} |", *cells, sep="", flush=True)


if __name__ == "__main__":
    main()
