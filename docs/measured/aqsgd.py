"""Direct quantization beside AQ-SGD on a pretrained model: python docs/measured/aqsgd.py PICTURE NAME=RUN[,RUN ...] ...

Each RUN is the folder of a run of `thinwire simulate`; those of one name differ in the seed. Printed is the held-out
loss at the end, compression on and off, by seed. PICTURE.png and PICTURE.svg have the loss of each training step of the
first runs, and points for the held-out loss without compression where a run was evaluated.
"""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

COLOURS = ("#222222", "#1b9e77", "#d95f02", "#7570b3", "#e7298a")


def lines(path: Path) -> list[dict]:
    """The lines of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    """Print a row for each name, and draw."""
    picture, *named = sys.argv[1:]
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    print("| activations | held-out loss by seed, compression on | off |\n|---|---|---|")
    for colour, one in zip(COLOURS, named, strict=False):
        name, _, runs = one.rpartition("=")
        folders = [Path(run) for run in runs.split(",")]
        ends = [lines(folder / "evaluations.jsonl")[-1] for folder in folders]
        on, off = (", ".join(f"{end[how]['loss']:.4f}" for end in ends) for how in ("on", "off"))
        print(f"| `{name}` | {on} | {off} |")
        steps, scored = (lines(folders[0] / file) for file in ("metrics.jsonl", "evaluations.jsonl"))
        trained = axes.plot(range(1, len(steps) + 1), [step["loss"] for step in steps], color=colour, label=name)
        trained[0].set(linestyle="--" if name == "none" else "-", zorder=3 if name == "none" else 2)
        axes.plot([each["step"] for each in scored], [each["off"]["loss"] for each in scored], "o", ms=5, color=colour)
    axes.set(xlabel="step; 8 are an epoch", ylabel="loss, nats a token", yscale="log")
    axes.set_yticks([2.5, 3, 4, 6, 8, 10], ["2.5", "3", "4", "6", "8", "10"])
    axes.minorticks_off()
    for epoch in range(8, 32, 8):
        axes.axvline(epoch + 0.5, color="#cccccc", lw=0.8, zorder=0)
    axes.legend(frameon=False, fontsize=9)
    for suffix in (".png", ".svg"):
        figure.savefig(picture + suffix, dpi=130)


if __name__ == "__main__":
    main()
