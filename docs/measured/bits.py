"""The table and the picture of bits.md: bits really sent against signal to noise, for tensors of several kinds.

python docs/measured/bits.py        prints the table and writes docs/measured/bits.png
"""

from pathlib import Path

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor

from thinwire.compress import parse
from thinwire.launch.bench.codecs.inputs import captured
from thinwire.launch.bench.codecs.trial import quality

FAMILIES = {
    "q": [f"q({bits})" for bits in (1, 2, 3, 4, 5, 6)],
    "q, clip": [f'q({bits}, clip="mse")' for bits in (1, 2, 3, 4, 5)],
    "q, auto, clip": [f'q({bits}, grid="auto", clip="mse")' for bits in (1, 2, 3, 4, 5)],
    "nf": [f"nf({bits})" for bits in (1, 2, 3, 4)],
    "nf, rotated": [f'nf({bits}, rotate="hadamard")' for bits in (1, 2, 3, 4)],
    "q, rotated": [f'q({bits}, rotate="hadamard")' for bits in (2, 3, 4, 5, 6)],
    "q, outliers": [f"q({bits}, outliers=0.01)" for bits in (1, 2, 3, 4, 5)],
    "q, coded": [f'q({bits}, code="entropy")' for bits in (2, 3, 4, 5, 6)],
    "q, auto, clip, coded": [f'q({bits}, grid="auto", clip="mse", code="entropy")' for bits in (2, 3, 4, 5)],
    "nf, coded": [f'nf({bits}, code="entropy")' for bits in (3, 4)],
    "topk": [f'topk({share}, values="q(4)")' for share in (0.02, 0.1, 0.3, 0.5, 0.7)],
}
BOUND = 20 * torch.tensor(2.0).log10().item()
"""dB a bit: the rate-distortion bound of a Gaussian."""


def kinds() -> dict[str, list[Tensor]]:
    """Tensors [512, 1024] of three distributions, and what crosses the boundaries of the quickstart after 40 steps."""
    generator = torch.Generator().manual_seed(0)
    noise, other = (torch.randn(512, 1024, generator=generator) for _ in range(2))
    heavy = torch.where(torch.rand(512, 1024, generator=generator) < 0.01, 20 * other, noise)
    sent = {f"quickstart {channel}": messages for channel, messages in captured(["quickstart"], 40).items()}
    return {"Gaussian": [noise], "after ReLU": [noise.relu()], "1 % spikes": [heavy], **sent}


def main() -> None:
    """Measure every codec on every kind."""
    data = kinds()
    rows = {
        expression: [quality(parse(expression), messages) for messages in data.values()]
        for expressions in FAMILIES.values()
        for expression in expressions
    }
    print("| codec | bits | bits: quickstart |", *(f" {kind} |" for kind in data), sep="")
    print("|---" * (3 + len(data)), "|", sep="")
    for expression, found in rows.items():
        bits = f"{found[0].bits_per_element:.2f} | {found[-1].bits_per_element:.2f}"
        print(f"| `{expression}` | {bits} |", *(f" {one.snr_db:.1f} |" for one in found), sep="")
    draw(list(data), rows)


def draw(names: list[str], rows: dict[str, list]) -> None:
    """One panel a kind: a line a family, and the bound."""
    figure = Figure(figsize=(4 * len(names), 4.5), dpi=80, layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True)
    for index, (name, panel) in enumerate(zip(names, panels, strict=True)):
        panel.set_prop_cycle(color=colormaps["tab20"].colors)
        for family, expressions in FAMILIES.items():
            found = [rows[expression][index] for expression in expressions]
            panel.plot([one.bits_per_element for one in found], [one.snr_db for one in found], "o-", ms=3, label=family)
        panel.plot([0, 6.5], [0, 6.5 * BOUND], "k--", lw=1, label="bound of a Gaussian")
        panel.set(title=name, xlabel="bits an element", xlim=(0, 6.5), ylim=(-5, 40))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("signal to noise, dB")
    panels[-1].legend(fontsize=7)
    figure.savefig(Path(__file__).with_suffix(".png"))


if __name__ == "__main__":
    main()
